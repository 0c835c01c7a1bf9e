from omegaconf import DictConfig

from libai.config import LazyCall
from libai.models.utils import GraphBase

graph = DictConfig(dict(
    enabled=True,
    debug=-1,
    auto_parallel=dict(enabled=False, prune_parallel_cast_ops=False, mainstem_algo=True, sbp_collector=False),
    train_graph=LazyCall(GraphBase)(is_train=True),
    global_mode=dict(enabled=False),
    eval_graph=LazyCall(GraphBase)(is_train=False),
))
