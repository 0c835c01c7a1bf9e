"Datasets, augmentation and mixup by sample, the layout-invariant order of samples, and loaders."
from libai_wb.data.augment import ImageMode, image_transform
from libai_wb.data.catalog import DatasetReport, inspect_dataset
from libai_wb.data.cyclic import CyclicSampler, SingleRoundSampler
from libai_wb.data.datasets import (ArrayDataset, UnreadableSample, as_fields, check_fields, check_map_style, digits,
                                    fashion_mnist)
from libai_wb.data.folders import ImageTree, cifar10, cifar100, download_dataset, imagenet, mnist
from libai_wb.data.instance import Instance
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.data.mixup import Mixup
from libai_wb.data.ported import CIFAR10Dataset, CIFAR100Dataset, ImageNetDataset, MNISTDataset
from libai_wb.data.samplers import (TAILS, BatchRows, epoch_batches, epoch_order, eval_batches, fill_rows,
                                    global_batch_ids, position_of, rank_rows, steps_per_epoch)
from libai_wb.data.splits import split_dataset

__all__ = ["ArrayDataset", "BatchRows", "CIFAR100Dataset", "CIFAR10Dataset", "CyclicSampler", "DatasetReport",
           "EvalLoader", "ImageMode", "ImageNetDataset", "ImageTree", "Instance", "MNISTDataset", "Mixup",
           "SingleRoundSampler", "TAILS", "TrainLoader", "UnreadableSample", "as_fields", "check_fields",
           "check_map_style", "cifar10", "cifar100", "digits", "download_dataset", "epoch_batches", "epoch_order",
           "eval_batches", "fashion_mnist", "fill_rows", "global_batch_ids", "image_transform", "imagenet",
           "inspect_dataset", "mnist", "position_of", "rank_rows", "split_dataset", "steps_per_epoch"]
