"""Swin-Nano on Fashion-MNIST: about five minutes on two CPU cores."""
from libai_wb.config import LazyCall
from libai_wb.data.datasets import fashion_mnist
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.models.swin import SwinTransformer

from .common.optim import optim
from .common.train import train

model = LazyCall(SwinTransformer)(
    img_size=28, patch_size=2, in_chans=1, num_classes=10, embed_dim=32, depths=(2, 2), num_heads=(2, 4), window_size=7,
    drop_path_rate=0.1)
dataloader = dict(
    train=LazyCall(TrainLoader)(dataset=LazyCall(fashion_mnist)(train=True)),
    test=LazyCall(EvalLoader)(dataset=LazyCall(fashion_mnist)(train=False)),
)
optim.params.no_weight_decay = True
optim.lr = 2e-3
train.update(global_batch_size=64, train_iter=2000, warmup_ratio=0.1)
