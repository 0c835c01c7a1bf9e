"Models by name; importing the package registers them."
from libai_wb.models.registry import create_model, list_models, model_spec, register_model
from libai_wb.models.vit import VisionTransformer, from_timm_state_dict, to_timm_state_dict

__all__ = ["VisionTransformer", "create_model", "from_timm_state_dict", "list_models", "model_spec", "register_model",
           "to_timm_state_dict"]
