from libai.config import LazyCall
from libai.models import VisionTransformer

from .vit_tiny_patch16_224 import cfg

cfg.embed_dim, cfg.num_heads = 768, 12
model = LazyCall(VisionTransformer)(cfg=cfg)
