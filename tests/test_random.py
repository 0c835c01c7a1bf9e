"""Everything random and ragged at once: mixup, cutmix, RandAugment, erasing, drops, a ragged batch. Layouts still follow."""
import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Subset

import libai_wb.layers.drop
from libai_wb.align.verification import verify
from libai_wb.config import LazyCall
from libai_wb.data.augment import image_transform
from libai_wb.data.datasets import digits
from libai_wb.data.mixup import Mixup
from libai_wb.data.samplers import rank_rows
from libai_wb.engine.build import build_training, load_recipe
from libai_wb.engine.default import train
from libai_wb.layers.drop import DropPath
from libai_wb.mesh.launch import group_rank, make_mesh, run_ranks
from libai_wb.mesh.rng import draw_key
from libai_wb.mesh.topology import ParallelLayout
from libai_wb.models.vit import VisionTransformer

from test_verify import LAYOUTS, pairwise_cover, with_options

GREY = dict(size=8, channels=1, mean=.305, std=.376)


class CheckpointedViT(VisionTransformer):
    "A ViT whose second block is computed again in backward; the state of no generator is kept for it."
    def _block(self, x, ids, step, key):
        if key != "1" or not self.training: return super()._block(x, ids, step, key)
        return checkpoint(self.blocks[key], x, ids, step, use_reentrant=False, preserve_rng_state=False)


def augmented_digits(samples, transform): return Subset(digits(train=True, transform=transform), range(samples))


def recipe(samples=200, workers=0, device="cpu"):
    "Nano ViT with every source of randomness; 200 samples leave 8 rows for update 3, and 1437 leave 29 for update 22."
    cfg = load_recipe("vit_nano_digits")
    cfg.train.num_accumulation_steps, cfg.train.train_iter, cfg.train.warmup_ratio = 2, 24, .25
    cfg.model.update(_target_=CheckpointedViT, drop_rate=.1, attn_drop_rate=.1, drop_path_rate=.2)
    transform = LazyCall(image_transform)(auto_augment="rand-m9-mstd0.5-inc1", erasing=.25, crop="pad", flip=0., **GREY)
    mixup = LazyCall(Mixup)(mixup_alpha=.8, cutmix_alpha=1., label_smoothing=.1, num_classes=10, device=device)
    cfg.dataloader.train.update(dataset=LazyCall(augmented_digits)(samples=samples, transform=transform), tail="short",
                                mixup_func=mixup, num_workers=workers)
    assert cfg.optim.params.clip_grad_max_norm == 1.0
    return cfg


def test_the_recipe_has_what_it_says():
    "A ragged batch inside the compared steps, soft labels, and every layer with its rate."
    training = build_training(recipe())
    batches = [training.loader.batch(i) for i in range(5)]
    assert [int(b["weight"].sum()) for b in batches] == [64, 64, 64, 8, 64]
    assert all(b["labels"].shape == (64, 10) for b in batches)
    rates = {n: m.p for n, m in training.model.named_modules() if getattr(m, "p", 0)}
    assert {.1, .2} <= {round(p, 6) for p in rates.values()} and any("attn_drop" in n for n in rates)
    assert int(build_training(recipe(1437)).loader.batch(22)["weight"].sum()) == 29


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_layouts_follow(dtype):
    answer = verify(recipe(), pairwise_cover(1)[dtype], steps=5, dtype=dtype, progress=False)
    assert answer.ok, f"\n{answer}"


def test_copies_of_a_sample_follow():
    "Repeated augmentation: three copies of a digit are three pictures with draws of their own, in every layout."
    cfg = recipe()
    cfg.dataloader.train.repeats = 3
    ids = build_training(cfg).loader.batch(0)["ids"]
    assert len(ids.unique()) == 64 and len((ids % 200).unique()) == 22
    answer = verify(cfg, ["dp2", "dp2tp2pp2"], steps=4, progress=False)
    assert answer.ok, f"\n{answer}"


def test_workers_and_the_device_change_nothing():
    "Two loader workers, and mixup after the batch has moved, against none and before."
    plain = build_training(recipe())
    want = [plain.step(batch) for _, batch in zip(range(5), plain.loader.iterate())]
    for cfg in (recipe(workers=2), recipe(device="device")):
        other = build_training(cfg)
        assert [other.step(batch) for _, batch in zip(range(5), other.loader.iterate())] == want
    answer = verify(recipe(workers=2), ["dp2pp2"], steps=5, progress=False)
    assert answer.ok, f"\n{answer}"


def test_draws_and_order_restart_at_any_step():
    "R-07: from the weights and moments after 3 updates, updates 3 and 4 are those of the run in one go, on any mesh."
    whole, resumed = build_training(recipe()), build_training(recipe())
    for i in range(3): whole.step(whole.loader.batch(i))
    resumed.model.load_state_dict(whole.model.state_dict())
    resumed.step.optimizer.load_state_dict(copy.deepcopy(whole.step.optimizer.state_dict()))  # torch shares its tensors
    resumed.step.scheduler.load_state_dict(whole.step.scheduler.state_dict())
    resumed.step.update = 3
    for _, batch in zip(range(2), resumed.loader.iterate(3)):
        assert resumed.step(batch) == whole.step(whole.loader.batch(resumed.step.update - 1))
    for k, p in whole.model.state_dict().items(): assert torch.equal(p, resumed.model.state_dict()[k])


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype,acc,workers", [("float64", 2, 0), ("float64", 2, 2), ("float64", 4, 0), ("float64", 8, 0),
                                               ("float32", 2, 0), ("float32", 4, 0)])
def test_layouts_follow_for_24_steps(dtype, acc, workers, record_property):
    layouts = [with_options(text, False, acc) for text in LAYOUTS]
    answer = verify(recipe(1437, workers), layouts, steps=24, dtype=dtype, progress=False)
    for result in answer.results: record_property(result.layout, f"margin {result.margin:.2g} {result.worst}")
    assert answer.ok, f"\n{answer}"


# --- controls: each is planted in the candidates as patch="test_random:NAME", and must be found ---

def rank(): return (group_rank() or (0, 1))[0]


class NumpyShift:
    "A plain-Python transform that shifts the picture by numpy's global generator."
    def __init__(self, inner): self.inner = inner

    def __call__(self, image):
        return torch.roll(self.inner(image), np.random.randint(-2, 3, 2).tolist(), (1, 2))


def shifted_recipe(workers):
    cfg = recipe(workers=workers)
    inner = LazyCall(image_transform)(crop=None, flip=0., **GREY)
    cfg.dataloader.train.dataset.transform = LazyCall(NumpyShift)(inner=inner)
    return cfg


def worker_seeded_crop(training):
    "numpy is left to whatever state a worker process has (E1)."
    training.loader.generators = ()


def drop_path_per_tp_rank(training):
    "Drop-path draws by rank (R-02)."
    for path, m in training.model.named_modules():
        if isinstance(m, DropPath): m.key = draw_key(rank(), path)


def sampled_by_global_rank(training):
    "Rows are dealt out over all ranks, also over those that share a replica (B16)."
    loader, world = training.loader, training.layout.world
    loader.dp, loader.dp_rank, loader.rows = world, rank(), rank_rows(training.plan.global_batch, world, rank())


def mean_of_means(training):
    "Each replica divides by its own count, then replicas are averaged (A2)."
    step, dp = training.step, training.layout.dp
    prepare = type(step).prepare
    def local_mean(batch):
        batch, count = prepare(step, batch)
        weight = step.batch["weight"]
        return batch | dict(weight=weight / max(weight.sum().item(), 1) / dp), count
    step.prepare = local_mean


def epoch_stands_still(training):
    "One rank shuffles the first epoch again and again."
    if rank() != training.layout.world - 1: return
    loader, batch = training.loader, training.loader.batch
    loader.batch = lambda step: batch(step % loader.steps_per_epoch)


@pytest.mark.parametrize("fault,layout,steps,where", [
    ("libai_wb.align.faults:numpy_mixup", "pp2", 2, "leaves at step 0, batch of images: pp ranks 0 and 1 have different images"),
    ("test_random:drop_path_per_tp_rank", "tp2", 2, "leaves at step 0, loss"),
    ("test_random:sampled_by_global_rank", "dp2tp2", 2, "leaves at step 0, samples"),
    ("test_random:mean_of_means", "dp2", 5, "leaves at step 3, loss: off by"),
    ("test_random:epoch_stands_still", "dp2", 6, "leaves at step 4, samples: the run trained on other samples"),
])
def test_controls_are_found(fault, layout, steps, where):
    answer = verify(recipe(), [layout], steps=steps, patch=fault, progress=False)
    assert not answer.ok and answer.results[0].verdict.startswith(where), answer


def test_a_crop_seeded_by_the_worker_is_found():
    cfg = shifted_recipe(workers=2)
    assert verify(cfg, ["dp2"], steps=2, progress=False).ok
    answer = verify(cfg, ["dp2"], steps=2, patch="test_random:worker_seeded_crop", progress=False)
    assert answer.results[0].verdict.startswith("leaves at step 0, batch of images: sample "), answer


# --- per_shard: equal where replicated, different where sharded ---

def masks(rank, world, layout, mode):
    "What one rank draws in two updates: (stage, replica, part), and for each draw its key, first part and numbers."
    lay, drawn = ParallelLayout.parse(layout), []
    def look(key, ids, step, shape, first=-1, exact=True):
        u = named_uniform(key, ids, step, shape, first, exact)
        if not u.is_meta: drawn.append((int(key), first, ids.tolist(), u.clone()))  # a pipeline asks for shapes on meta
        return u
    named_uniform, libai_wb.layers.drop.named_uniform = libai_wb.layers.drop.named_uniform, look
    try:
        cfg = recipe()
        cfg.model._target_, cfg.train.random.mode = VisionTransformer, mode
        training = build_training(cfg, layout, make_mesh(lay))
        for i in range(2): training.step(training.loader.batch(i))
    finally: libai_wb.layers.drop.named_uniform = named_uniform
    return lay.coords(rank), drawn


def agree(a, b): return [torch.equal(x[3], y[3]) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("layout", ["dp2tp2", "dp2tp2pp2"])
@pytest.mark.parametrize("mode", ["per_shard", "exact"])
def test_contracts(layout, mode):
    "R-02, R-04, R-05: tp ranks draw alike what they hold alike; everything else differs."
    lay = ParallelLayout.parse(layout)
    ranks = dict(run_ranks(masks, lay.world, layout, mode))
    for at, drawn in ranks.items():
        assert any(u.ndim == 4 for *_, u in drawn)
        for a, b in itertools.combinations(drawn, 2):  # layers, micro-batches and steps are all independent
            if a[3].shape == b[3].shape and a[3][0].numel() > 1: assert not torch.equal(a[3], b[3])
        for d, same in zip(drawn, agree(drawn, ranks[at._replace(tp=1 - at.tp)])):
            assert same != (d[1] >= 0 and d[3].ndim == 4)  # attention's heads are sharded, all else is replicated over tp
        assert not any(s for d, s in zip(drawn, agree(drawn, ranks[at._replace(dp=1 - at.dp)])) if d[3][0].numel() > 1)
    keys = [{d[0] for d in drawn} for at, drawn in ranks.items() if (at.dp, at.tp) == (0, 0)]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(keys, 2))  # each stage has layers of its own


def test_exact_draws_are_those_of_one_process():
    [(_, whole)] = run_ranks(masks, 1, "1", "exact")
    logical = {}
    for key, first, ids, u in whole:
        for i, row in zip(ids, u): logical.setdefault((key, i), []).append(row)
    for _, drawn in run_ranks(masks, 4, "dp2tp2", "exact"):
        for key, first, ids, u in drawn:
            for i, row in zip(ids, u):
                if i < 0: continue
                wholes = [w if first < 0 else w[first:first + len(row)] for w in logical[key, i]]
                assert any(torch.equal(row, w) for w in wholes)


def test_per_shard_has_no_verdict_but_trains(tmp_path):
    cfg = recipe()
    cfg.train.random.mode, cfg.train.train_iter, cfg.train.evaluation.enabled = "per_shard", 3, False
    answer = verify(cfg, ["dp2tp2"], steps=2, progress=False)
    assert not answer.ok and "not comparable" in str(answer) and answer.results[0].verdict.startswith("not comparable")
    run = train(cfg, layout="dp2tp2", out=tmp_path / "run", progress=False)
    assert len(run.metrics) == 3 and run.metrics.loss.map(math.isfinite).all()
    assert "random mode per_shard" in (run.path / "log" / "rank0.txt").read_text()


def test_check_mode_in_a_run(tmp_path):
    "A clean run passes with its batches checked; the log has the checksums of the first batch, the same on all ranks."
    cfg = recipe()
    cfg.train.check_mode, cfg.train.train_iter, cfg.train.evaluation.enabled = 2, 3, False
    run = train(cfg, layout="tp2", out=tmp_path / "run", progress=False)
    lines = {next(line.partition("first batch: ")[2] for line in log.read_text().splitlines() if "first batch: " in line)
             for log in (run.path / "log").glob("*.txt")}
    assert len(lines) == 1 and "labels" in lines.pop()
