"""Swin V2-Tiny on CIFAR-100 at 256 pixels, 300 epochs, as in LiBai."""
from .common.data.cifar100 import dataloader
from .common.models.swinv2 import swinv2_tiny_patch4_window8_256 as model
from .common.optim import optim
from .common.train import train

model.num_classes = 100
dataloader.train.dataset.transform.size = 256
dataloader.test.dataset.transform.update(size=256, crop_pct=1.0)
optim.update(lr=5e-4, eps=1e-8, weight_decay=0.05)
optim.params.update(clip_grad_max_norm=None, weight_decay_1d=0.0)
optim.params.no_weight_decay = True  # LiBai's skip_list is a string, so that parts of its one name count as names
train.update(global_batch_size=256, train_epoch=300, warmup_ratio=20 / 300, test_micro_batch_size=32, log_period=10)
train.scheduler.update(warmup_factor=5e-7, alpha=0.0)
train.evaluation.eval_period = 1562
