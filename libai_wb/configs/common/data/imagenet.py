"""ImageNet with the augmentation of LiBai's recipes: random crops, RandAugment, erasing, and mixup behind the batch.

Set `dataloader.train.dataset.root`; the validation set is looked for in the same place.
"""
from libai_wb.config import LazyCall
from libai_wb.data.augment import image_transform
from libai_wb.data.folders import imagenet
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.data.mixup import Mixup

dataloader = dict(
    train=LazyCall(TrainLoader)(
        dataset=LazyCall(imagenet)(
            root="path/to/imagenet", split="train",
            transform=LazyCall(image_transform)(
                size=224, interpolation="bicubic", auto_augment="rand-m9-mstd0.5-inc1", erasing=0.25,
                erasing_mode="pixel")),
        mixup_func=LazyCall(Mixup)(mixup_alpha=0.8, cutmix_alpha=1.0, prob=1.0, switch_prob=0.5, mode="batch",
                                   label_smoothing=0.1, num_classes=1000),
        num_workers=4),
    test=LazyCall(EvalLoader)(
        dataset=LazyCall(imagenet)(
            root="${dataloader.train.dataset.root}", split="val",
            transform=LazyCall(image_transform)(size=224, train=False, interpolation="bicubic", crop_pct=0.875)),
        num_workers=4),
)
