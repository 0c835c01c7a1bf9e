"Datasets, the layout-invariant order of samples, and loaders."
from libai_wb.data.datasets import ArrayDataset, check_fields, digits, fashion_mnist
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.data.samplers import (epoch_order, eval_batches, global_batch_ids, position_of, rank_rows,
                                    steps_per_epoch)

__all__ = ["ArrayDataset", "EvalLoader", "TrainLoader", "check_fields", "digits", "epoch_order", "eval_batches",
           "fashion_mnist", "global_batch_ids", "position_of", "rank_rows", "steps_per_epoch"]
