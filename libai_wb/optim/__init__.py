"Optimizers for large batches, and parameter groups for PyTorch's."
from libai_wb.optim.build import check_norm_type, get_default_optimizer_params, group_names, reduce_param_groups
from libai_wb.optim.lamb import Lamb, logical_norms, trust_ratios
from libai_wb.optim.lars import Lars
from libai_wb.optim.layer_decay import layer_decay_params, layer_ids

__all__ = ["Lamb", "Lars", "check_norm_type", "get_default_optimizer_params", "group_names", "layer_decay_params",
           "layer_ids", "logical_norms", "reduce_param_groups", "trust_ratios"]
