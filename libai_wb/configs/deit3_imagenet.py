"""DeiT III, ViT-Small, on ImageNet, 800 epochs: 3-Augment, each class by itself, LAMB, layer scale."""
from libai_wb.config import LazyCall
from libai_wb.optim.build import get_default_optimizer_params
from libai_wb.optim.lamb import Lamb
from libai_wb.scheduler import WarmupCosineAnnealingLR

from .common.data.imagenet import dataloader
from .common.models.vit import vit_small_patch16_224 as model
from .common.train import train

# ViT-Base: common/models/vit.py's vit_base_patch16_224 at img_size 192, drop_path_rate 0.2, optim.lr 3e-3
model.update(drop_path_rate=0.05, init_values=1e-4, loss_func="bce_present")
dataloader.train.dataset.transform.update(auto_augment="3a", color_jitter=0.3, erasing=0.0)
dataloader.train.mixup_func.label_smoothing = 0.0
dataloader.train.repeats = 3  # --repeated-aug
dataloader.test.dataset.transform.crop_pct = 1.0
optim = LazyCall(Lamb)(
    params=LazyCall(get_default_optimizer_params)(
        weight_decay_1d=0.0, no_weight_decay=True, clip_grad_max_norm=1.0),  # the clipping that apex' fused LAMB does
    lr=4e-3, weight_decay=0.05, betas=(0.9, 0.999), eps=1e-8)  # main.py's --opt-eps, not the 1e-6 of apex' FusedLAMB
train.update(global_batch_size=2048, train_epoch=800, warmup_ratio=5 / 800, test_micro_batch_size=128)
train.scheduler = LazyCall(WarmupCosineAnnealingLR)(warmup_factor=1e-6 / 4e-3, eta_min=1e-5)
