"""Swin-Tiny on CIFAR-100 at 224 pixels, 300 epochs, as in LiBai."""
from .common.data.cifar100 import dataloader
from .common.models.swin import swin_tiny_patch4_window7_224 as model
from .common.optim import optim
from .common.train import train

model.num_classes = 100
optim.update(lr=5e-4, eps=1e-8, weight_decay=0.05)
optim.params.clip_grad_max_norm = None
optim.params.no_weight_decay = True  # the bias tables; LiBai decays them, Swin's authors do not
train.update(global_batch_size=256, train_epoch=300, warmup_ratio=20 / 300, test_micro_batch_size=32)
train.scheduler.update(warmup_factor=5e-7, alpha=0.0)
train.evaluation.eval_period = 200
