"Layers that say how they may be cut and otherwise behave like torch's."
from libai_wb.layers.attention import Attention, from_by_head, to_by_head
from libai_wb.layers.drop import DrawingLayer, Dropout, DropPath, PatchDropout, TokenMask, add_branch
from libai_wb.layers.embedding import Embedding, PatchEmbedding, VocabEmbedding
from libai_wb.layers.foreign import make_invariant
from libai_wb.layers.linear import Linear, Linear1D
from libai_wb.layers.loss import check_labels, cross_entropy
from libai_wb.layers.mlp import MLP
from libai_wb.layers.norm import LayerNorm
from libai_wb.layers.transformer import TransformerLayer
from libai_wb.layers.window import PatchMerging, WindowAttention
from libai_wb.layers.window_v2 import WindowAttentionV2

__all__ = ["Attention", "DrawingLayer", "DropPath", "Dropout", "Embedding", "LayerNorm", "Linear", "Linear1D", "MLP",
           "PatchDropout", "PatchEmbedding", "PatchMerging", "TokenMask", "TransformerLayer", "VocabEmbedding",
           "WindowAttention", "WindowAttentionV2", "add_branch", "check_labels", "cross_entropy", "from_by_head",
           "make_invariant", "to_by_head"]
