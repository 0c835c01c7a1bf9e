"""ViT-Micro (0.5 million parameters) on Fashion-MNIST: about three minutes on two CPU cores."""
from libai_wb.config import LazyCall
from libai_wb.data.datasets import fashion_mnist
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.models.vit import VisionTransformer

from .common.optim import optim
from .common.train import train

model = LazyCall(VisionTransformer)(
    img_size=28, patch_size=7, in_chans=1, num_classes=10, embed_dim=96, depth=4, num_heads=4, mlp_ratio=4.0)
dataloader = dict(
    train=LazyCall(TrainLoader)(dataset=LazyCall(fashion_mnist)(train=True)),
    test=LazyCall(EvalLoader)(dataset=LazyCall(fashion_mnist)(train=False)),
)
optim.params.overrides = dict(pos_embed=dict(weight_decay=0.0), cls_token=dict(weight_decay=0.0))
train.update(global_batch_size=64, train_iter=5000, warmup_ratio=0.1)
