"""MAE-Nano on the 8×8 digits of scikit-learn, without their labels: seconds on one core."""
from libai_wb.config import LazyCall
from libai_wb.data.datasets import digits
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.evaluation import ReconstructionEvaluator
from libai_wb.models.mae import MaskedAutoencoder

from .common.optim import optim
from .common.train import train

model = LazyCall(MaskedAutoencoder)(
    img_size=8, patch_size=2, in_chans=1, embed_dim=32, depth=4, num_heads=4,
    decoder_embed_dim=16, decoder_depth=2, decoder_num_heads=2, mlp_ratio=4.0,
    mask_ratio=0.75, norm_pix_loss=False)  # more than a quarter of the patches are constant
dataloader = dict(
    train=LazyCall(TrainLoader)(dataset=LazyCall(digits)(train=True)),
    test=LazyCall(EvalLoader)(dataset=LazyCall(digits)(train=False)),
)
optim.params.clip_grad_max_norm = None
optim.update(lr=5e-3, betas=(0.9, 0.95))
train.update(global_batch_size=64, train_iter=400, warmup_ratio=0.05)
train.scheduler.update(alpha=0.0, shift=True)  # a cosine that starts behind the warm-up and ends at 0
train.evaluation.evaluator = LazyCall(ReconstructionEvaluator)()
