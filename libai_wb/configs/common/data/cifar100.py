"""CIFAR-100 brought to the size of an ImageNet model: random crops and mirror images, and mixup behind the batch.

Set `dataloader.train.dataset.root`; what is not there is fetched.
"""
from libai_wb.config import LazyCall
from libai_wb.data.augment import image_transform
from libai_wb.data.folders import cifar100
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.data.mixup import Mixup

colours = dict(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))
dataloader = dict(
    train=LazyCall(TrainLoader)(
        dataset=LazyCall(cifar100)(
            root="path/to/cifar100", train=True, download=True,
            transform=LazyCall(image_transform)(size=224, interpolation="bicubic", **colours)),
        mixup_func=LazyCall(Mixup)(mixup_alpha=0.8, cutmix_alpha=1.0, prob=1.0, switch_prob=0.5, mode="batch",
                                   label_smoothing=0.1, num_classes=100),
        num_workers=4),
    test=LazyCall(EvalLoader)(
        dataset=LazyCall(cifar100)(
            root="${dataloader.train.dataset.root}", train=False, download=True,
            transform=LazyCall(image_transform)(
                size=224, train=False, interpolation="bicubic", crop_pct=0.875, **colours)),
        num_workers=4),
)
