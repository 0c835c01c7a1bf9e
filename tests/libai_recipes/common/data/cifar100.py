from omegaconf import OmegaConf
from flowvision import transforms
from flowvision.data.mixup import Mixup
from flowvision.transforms import InterpolationMode
from flowvision.transforms.functional import str_to_interp_mode

from libai.config import LazyCall
from libai.data.build import build_image_test_loader, build_image_train_loader
from libai.data.datasets import CIFAR100Dataset

MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
finish = [LazyCall(transforms.ToTensor)(), LazyCall(transforms.Normalize)(mean=MEAN, std=STD)]
train_aug = LazyCall(transforms.Compose)(transforms=[
    LazyCall(transforms.RandomResizedCrop)(size=(224, 224), scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3),
                                           interpolation=str_to_interp_mode("bicubic")),
    LazyCall(transforms.RandomHorizontalFlip)(), *finish])
test_aug = LazyCall(transforms.Compose)(transforms=[
    LazyCall(transforms.Resize)(size=256, interpolation=InterpolationMode.BICUBIC),
    LazyCall(transforms.CenterCrop)(size=224), *finish])

dataloader = OmegaConf.create()
dataloader.train = LazyCall(build_image_train_loader)(
    dataset=[LazyCall(CIFAR100Dataset)(root="./", train=True, download=True, transform=train_aug)], num_workers=4,
    mixup_func=LazyCall(Mixup)(mixup_alpha=0.8, cutmix_alpha=1.0, prob=1.0, switch_prob=0.5, mode="batch",
                               num_classes=100))
dataloader.test = [LazyCall(build_image_test_loader)(
    dataset=LazyCall(CIFAR100Dataset)(root="./", train=False, download=True, transform=test_aug), num_workers=4)]
