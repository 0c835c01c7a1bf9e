"""Fine-tune a masked autoencoder's ViT-Base on ImageNet, 100 epochs: set train.load_weight to a run or a file."""
from libai_wb.config import LazyCall
from libai_wb.optim.layer_decay import layer_decay_params
from libai_wb.scheduler import WarmupCosineAnnealingLR

from .common.data.imagenet import dataloader
from .common.models.vit import vit_base_patch16_224 as model
from .common.optim import optim
from .common.train import train

model.update(global_pool="avg", drop_path_rate=0.1, head_std=2e-5)
optim.update(lr=5e-4 * 1024 / 256, weight_decay=0.05)
optim.params = LazyCall(layer_decay_params)(layer_decay=0.65, weight_decay=0.05)
train.update(global_batch_size=1024, train_epoch=100, warmup_ratio=5 / 100, test_micro_batch_size=32)
train.scheduler = LazyCall(WarmupCosineAnnealingLR)(warmup_factor=0.0, eta_min=1e-6, shift=True)
