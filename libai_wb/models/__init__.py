"Models by name; importing the package registers them."
from libai_wb.models.mae import MaskedAutoencoder, show_reconstruction
from libai_wb.models.registry import create_model, list_models, model_spec, register_model
from libai_wb.models.swin import SwinTransformer
from libai_wb.models.swin_v2 import SwinTransformerV2
from libai_wb.models.utils import GraphBase  # lends the names of LiBai's modules, too
from libai_wb.models.vit import LinearProbe, VisionTransformer
from libai_wb.models.weights import from_foreign, to_foreign

__all__ = ["GraphBase", "LinearProbe", "MaskedAutoencoder", "SwinTransformer", "SwinTransformerV2",
           "VisionTransformer", "create_model", "from_foreign", "list_models", "model_spec",
           "register_model", "show_reconstruction", "to_foreign"]
