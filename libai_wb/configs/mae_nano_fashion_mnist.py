"""MAE-Nano on Fashion-MNIST without its labels: minutes on two CPU cores."""
from libai_wb.config import LazyCall
from libai_wb.data.datasets import fashion_mnist
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.evaluation import ReconstructionEvaluator
from libai_wb.models.mae import MaskedAutoencoder

from .common.optim import optim
from .common.train import train

model = LazyCall(MaskedAutoencoder)(
    img_size=28, patch_size=4, in_chans=1, embed_dim=64, depth=4, num_heads=4, decoder_embed_dim=32, decoder_depth=2,
    decoder_num_heads=4, mlp_ratio=4.0, mask_ratio=0.75, norm_pix_loss=False)  # a third of the patches are constant
dataloader = dict(
    train=LazyCall(TrainLoader)(dataset=LazyCall(fashion_mnist)(train=True)),
    test=LazyCall(EvalLoader)(dataset=LazyCall(fashion_mnist)(train=False)),
)
optim.params.update(clip_grad_max_norm=None, weight_decay_1d=0.0)
optim.update(lr=3e-3, betas=(0.9, 0.95))
train.update(global_batch_size=128, train_iter=3000, warmup_ratio=0.05)
train.scheduler.update(alpha=0.0, shift=True)
train.evaluation.evaluator = LazyCall(ReconstructionEvaluator)()
