"""Fine-tune MAE-Nano's encoder on 1,000 labels of Fashion-MNIST: set train.load_weight to a run of mae_nano_fashion_mnist."""
from libai_wb.config import LazyCall
from libai_wb.data.datasets import fashion_mnist
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.data.mixup import Mixup
from libai_wb.data.splits import split_dataset
from libai_wb.models.vit import VisionTransformer
from libai_wb.optim.layer_decay import layer_decay_params

from .common.optim import optim
from .common.train import train

model = LazyCall(VisionTransformer)(
    img_size=28, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=4, num_heads=4, mlp_ratio=4.0,
    global_pool="avg", drop_path_rate=0.1)
_some = LazyCall(split_dataset)(dataset=LazyCall(fashion_mnist)(train=True), parts=1000, part=1)
dataloader = dict(
    train=LazyCall(TrainLoader)(
        dataset=_some, mixup_func=LazyCall(Mixup)(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)),
    test=LazyCall(EvalLoader)(dataset=LazyCall(fashion_mnist)(train=False)),
)
optim.lr = 4e-3
optim.params = LazyCall(layer_decay_params)(layer_decay=0.65, weight_decay=0.05)
train.update(global_batch_size=64, train_iter=800, warmup_ratio=0.1)
train.scheduler.update(alpha=0.0, shift=True)
