"""Masked autoencoder, ViT-Base, on ImageNet without its labels, 800 epochs."""
from libai_wb.config import LazyCall
from libai_wb.evaluation import ReconstructionEvaluator

from .common.data.imagenet import dataloader
from .common.models.mae import mae_vit_base_patch16 as model  # block eps 1e-6 and fixed positions; LiBai has neither
from .common.optim import optim
from .common.train import train

dataloader.train.dataset.transform.update(scale=(0.2, 1.0), auto_augment=None, erasing=0.0)
dataloader.train.mixup_func = None
optim.update(lr=1.5e-4 * 4096 / 256, betas=(0.9, 0.95), weight_decay=0.05)
optim.params.update(clip_grad_max_norm=None, weight_decay_1d=0.0)
train.update(global_batch_size=4096, train_epoch=800, warmup_ratio=40 / 800, test_micro_batch_size=64)
train.scheduler.update(warmup_factor=0.0, alpha=0.0, shift=True)  # LiBai's graph forgets the shift and rises at the end
train.evaluation.evaluator = LazyCall(ReconstructionEvaluator)()
