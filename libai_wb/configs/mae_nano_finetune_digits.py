"""The encoder of mae_nano_digits as a classifier of the digits, fine-tuned as MAE's ViTs are: seconds on one core."""
from libai_wb.config import LazyCall
from libai_wb.data.datasets import digits
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.data.mixup import Mixup
from libai_wb.models.vit import VisionTransformer
from libai_wb.optim.layer_decay import layer_decay_params

from .common.optim import optim
from .common.train import train

model = LazyCall(VisionTransformer)(
    img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=32, depth=4, num_heads=4, mlp_ratio=4.0,
    drop_path_rate=0.1, global_pool="avg", head_std=2e-5)
dataloader = dict(
    train=LazyCall(TrainLoader)(dataset=LazyCall(digits)(train=True), mixup_func=LazyCall(Mixup)(
        mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)),
    test=LazyCall(EvalLoader)(dataset=LazyCall(digits)(train=False)),
)
optim.params = LazyCall(layer_decay_params)(weight_decay=0.05, layer_decay=0.75, clip_grad_max_norm=None)
optim.lr = 1e-2
train.update(global_batch_size=64, train_iter=400, warmup_ratio=0.05)
train.scheduler.update(alpha=0.0, shift=True)
