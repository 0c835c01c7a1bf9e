from libai.config import LazyCall
from .common.models.swinv2.swinv2_tiny_patch4_window8_256 import model
from .common.models.graph import graph
from .common.train import train
from .common.optim import optim
from .common.data.cifar100 import dataloader

from flowvision import transforms
from flowvision.data import Mixup
from flowvision.loss.cross_entropy import SoftTargetCrossEntropy
from flowvision.transforms import InterpolationMode
from flowvision.transforms.functional import str_to_interp_mode

MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
dataloader.train.mixup_func = LazyCall(Mixup)(
    mixup_alpha=0.8, cutmix_alpha=1.0, prob=1.0, switch_prob=0.5, mode="batch", num_classes=100)
dataloader.train.dataset[0].transform = LazyCall(transforms.Compose)(transforms=[
    LazyCall(transforms.RandomResizedCrop)(size=(256, 256), scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3),
                                           interpolation=str_to_interp_mode("bicubic")),
    LazyCall(transforms.RandomHorizontalFlip)(), LazyCall(transforms.ToTensor)(),
    LazyCall(transforms.Normalize)(mean=MEAN, std=STD)])
dataloader.test[0].dataset.transform = LazyCall(transforms.Compose)(transforms=[
    LazyCall(transforms.Resize)(size=256, interpolation=InterpolationMode.BICUBIC),
    LazyCall(transforms.CenterCrop)(size=256), LazyCall(transforms.ToTensor)(),
    LazyCall(transforms.Normalize)(mean=MEAN, std=STD)])
model.num_classes = 100
model.loss_func = LazyCall(SoftTargetCrossEntropy)()


def named(name, keywords): return any(k in name for k in keywords)


def set_weight_decay(model, skip_list=(), skip_keywords=()):
    "Groups made by a function of the config file: one-dimensional parameters, biases and some names are not decayed."
    decayed, spared = [], []
    for name, p in model.named_parameters():
        odd = p.ndim == 1 or name.endswith(".bias") or name in skip_list or named(name, skip_keywords)
        (spared if odd else decayed).append(p)
    return [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]


optim.lr, optim.eps, optim.weight_decay = 5e-4, 1e-8, 0.05
optim.params = LazyCall(set_weight_decay)(
    model=model, skip_list=("absolute_pos_embed"),
    skip_keywords=("cpb_mlp", "logit_scale", "relative_position_bias_table"))

train.train_micro_batch_size = train.test_micro_batch_size = 32
train.num_accumulation_steps = 8
train.train_epoch = 300
train.warmup_ratio = 20 / 300
train.evaluation.eval_period = 1562
train.log_period = 10
train.scheduler.warmup_factor = 5e-7
train.scheduler.alpha = 0.0
train.scheduler.warmup_method = "linear"
train.dist.data_parallel_size = 1
train.dist.pipeline_num_layers = sum(model.depths)
train.output_dir = "./output"
train.amp.enabled = False
train.activation_checkpoint.enabled = False
graph.enabled = False
