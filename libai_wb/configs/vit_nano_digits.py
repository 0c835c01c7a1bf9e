"""ViT-Nano (52 thousand parameters) on the 8×8 digits of scikit-learn: seconds on one core."""
from libai_wb.config import LazyCall
from libai_wb.data.datasets import digits
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.models.vit import VisionTransformer

from .common.optim import optim
from .common.train import train

model = LazyCall(VisionTransformer)(
    img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=32, depth=4, num_heads=4, mlp_ratio=4.0)
dataloader = dict(
    train=LazyCall(TrainLoader)(dataset=LazyCall(digits)(train=True)),
    test=LazyCall(EvalLoader)(dataset=LazyCall(digits)(train=False)),
)
optim.params.overrides = dict(pos_embed=dict(weight_decay=0.0), cls_token=dict(weight_decay=0.0))
optim.lr = 5e-3
train.update(global_batch_size=64, train_iter=400, warmup_ratio=0.1)
