"""Swin-V2-Nano (147 thousand parameters) on the 8×8 digits of scikit-learn: seconds on one core."""
from libai_wb.config import LazyCall
from libai_wb.data.datasets import digits
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.models.swin_v2 import SwinTransformerV2

from .common.optim import optim
from .common.train import train

model = LazyCall(SwinTransformerV2)(
    img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=32, depths=(2, 2), num_heads=(2, 4), window_size=2,
    drop_path_rate=0.1, pretrained_window_sizes=(0, 0))
dataloader = dict(
    train=LazyCall(TrainLoader)(dataset=LazyCall(digits)(train=True)),
    test=LazyCall(EvalLoader)(dataset=LazyCall(digits)(train=False)),
)
optim.params.no_weight_decay = True  # the network behind the bias, factors of the scores, biases of q and v, positions
optim.lr = 5e-3
train.update(global_batch_size=64, train_iter=400, warmup_ratio=0.1)
