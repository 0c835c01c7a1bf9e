"""Swin-Tiny on ImageNet, 300 epochs, as in LiBai."""
from .common.data.imagenet import dataloader
from .common.models.swin import swin_tiny_patch4_window7_224 as model
from .common.optim import optim
from .common.train import train

optim.update(lr=1e-3, eps=1e-8, weight_decay=0.05)
optim.params.clip_grad_max_norm = None
optim.params.no_weight_decay = True  # the bias tables; LiBai decays them, Swin's authors do not
train.update(global_batch_size=1024, train_epoch=300, warmup_ratio=20 / 300, test_micro_batch_size=128, log_period=1)
train.scheduler.update(warmup_factor=0.001, alpha=0.01)
train.evaluation.eval_period = 1000  # LiBai's file writes train.eval_period, which nothing reads
