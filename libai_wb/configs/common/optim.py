"""AdamW with LiBai's parameter groups: no weight decay on norms and biases, one global clipping norm."""
from torch.optim import AdamW

from libai_wb.config import LazyCall
from libai_wb.optim.build import get_default_optimizer_params

optim = LazyCall(AdamW)(
    params=LazyCall(get_default_optimizer_params)(weight_decay_norm=0.0, weight_decay_bias=0.0, clip_grad_max_norm=1.0),
    lr=1e-3,
    weight_decay=0.05,
    betas=(0.9, 0.999),
    eps=1e-8,
)
