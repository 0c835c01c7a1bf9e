"""Training settings that every recipe starts from; a key that is not here is not read."""
from libai_wb.config import LazyCall
from libai_wb.evaluation import ClsEvaluator
from libai_wb.scheduler import WarmupCosineLR

train = dict(
    output_dir="outputs",
    load_weight="",  # a run, a checkpoint or a file of weights to start from; it may be another library's
    load_strict=True,  # refuse weights that do not fit; false loads what fits
    seed=0,
    random=dict(mode="exact"),  # "per_shard" draws per rank: quicker on many, and layouts then agree on average only
    check_mode=0,  # first updates in which ranks compare their batches and samples are fetched twice
    layout=None,  # for example "dp2tp2"; the command line's --layout comes first
    dist=dict(data_parallel_size=None, tensor_parallel_size=1, pipeline_parallel_size=1, custom_pipeline_stage_id=None),
    global_batch_size=None,  # samples per update: set this
    train_micro_batch_size=None,  # derived from the global batch unless set
    num_accumulation_steps=None,  # micro-batches per update, derived unless set
    test_micro_batch_size=256,
    train_iter=0,  # updates; with train_epoch the larger of the two counts
    train_epoch=0,
    warmup_ratio=0.0,
    scheduler=LazyCall(WarmupCosineLR)(warmup_factor=0.001, alpha=0.01, warmup_method="linear"),
    log_period=20,
    divergence=dict(window=100, patience=3),  # warn when the loss rises for so many windows of updates; null: never
    evaluation=dict(enabled=True, evaluator=LazyCall(ClsEvaluator)(topk=(1, 5)), eval_period=0, eval_iter=None),
    checkpointer=dict(period=0, max_to_keep=1),  # period 0: weights at the end only
)
