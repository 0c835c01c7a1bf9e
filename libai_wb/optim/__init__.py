"Parameter groups for PyTorch's optimizers."
from libai_wb.optim.build import get_default_optimizer_params, group_names, reduce_param_groups

__all__ = ["get_default_optimizer_params", "group_names", "reduce_param_groups"]
