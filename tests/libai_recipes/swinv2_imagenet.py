from libai.config import LazyCall
from .common.models.swinv2.swinv2_tiny_patch4_window8_256 import model
from .common.models.graph import graph
from .common.train import train
from .common.optim import optim
from .common.data.imagenet import dataloader

from flowvision import transforms
from flowvision.data import Mixup
from flowvision.data.auto_augment import rand_augment_transform
from flowvision.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from flowvision.data.random_erasing import RandomErasing
from flowvision.loss.cross_entropy import SoftTargetCrossEntropy
from flowvision.transforms import InterpolationMode
from flowvision.transforms.functional import str_to_interp_mode

dataloader.train.dataset[0].root = "/path/to/imagenet"
dataloader.test[0].dataset.root = "/path/to/imagenet"
dataloader.train.mixup_func = LazyCall(Mixup)(
    mixup_alpha=0.8, cutmix_alpha=1.0, prob=1.0, switch_prob=0.5, mode="batch", num_classes=1000)
finish = [LazyCall(transforms.ToTensor)(),
          LazyCall(transforms.Normalize)(mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)]
dataloader.train.dataset[0].transform = LazyCall(transforms.Compose)(transforms=[
    LazyCall(transforms.RandomResizedCrop)(size=256, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3),
                                           interpolation=InterpolationMode.BICUBIC),
    LazyCall(transforms.RandomHorizontalFlip)(p=0.5),
    LazyCall(rand_augment_transform)(config_str="rand-m9-mstd0.5-inc1", hparams=dict(
        translate_const=int(256 * 0.45), img_mean=tuple(min(255, round(255 * x)) for x in IMAGENET_DEFAULT_MEAN),
        interpolation=str_to_interp_mode("bicubic"))), *finish,
    LazyCall(RandomErasing)(probability=0.25, mode="pixel", max_count=1, num_splits=0, device="cpu")])
dataloader.test[0].dataset.transform = LazyCall(transforms.Compose)(transforms=[
    LazyCall(transforms.Resize)(size=256, interpolation=InterpolationMode.BICUBIC),
    LazyCall(transforms.CenterCrop)(size=256), *finish])
model.num_classes = 1000
model.loss_func = LazyCall(SoftTargetCrossEntropy)()


def set_weight_decay(model, skip_list=(), skip_keywords=()):
    "Groups made by a function of the config file."
    spares = [p.ndim == 1 or n.endswith(".bias") or n in skip_list or any(k in n for k in skip_keywords)
              for n, p in model.named_parameters()]
    split = lambda spare: [p for s, p in zip(spares, model.parameters()) if s == spare]
    return [{"params": split(False)}, {"params": split(True), "weight_decay": 0.0}]


optim.lr, optim.eps, optim.weight_decay = 1e-3, 1e-8, 0.05
optim.params = LazyCall(set_weight_decay)(
    model=model, skip_list=("absolute_pos_embed"),
    skip_keywords=("cpb_mlp", "logit_scale", "relative_position_bias_table"))

train.train_micro_batch_size = train.test_micro_batch_size = 128
train.train_epoch = 300
train.warmup_ratio = 20 / 300
train.eval_period = 1000
train.log_period = 1
train.scheduler.warmup_factor = 0.001
train.scheduler.alpha = 0.01
train.scheduler.warmup_method = "linear"
train.amp.enabled = True
graph.enabled = False
