"""ViT-Base on ImageNet, 300 epochs, as in LiBai."""
from .common.data.imagenet import dataloader
from .common.models.vit import vit_base_patch16_224 as model
from .common.optim import optim
from .common.train import train

model.norm_eps = 1e-5  # of LiBai's layer norms; timm and the models of common/models/vit.py have 1e-6
optim.update(lr=1e-3, eps=1e-8, weight_decay=0.05)  # 5e-4 for a batch of 512
optim.params.update(clip_grad_max_norm=None, overrides=dict(pos_embed=dict(weight_decay=0.0),
                                                            cls_token=dict(weight_decay=0.0)))
train.update(global_batch_size=1024, train_epoch=300, warmup_ratio=5 / 300, test_micro_batch_size=128, log_period=1)
train.scheduler.update(warmup_factor=0.001, alpha=0.01)
train.evaluation.eval_period = 1000
