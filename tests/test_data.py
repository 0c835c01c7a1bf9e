"Data: the pinned order, invariance to the layout, real files, workers and checkpoints of parameter groups."
import gzip
import itertools
import os
import shutil
from hashlib import blake2b

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torchvision.datasets import FashionMNIST

from libai_wb.data.cyclic import CyclicSampler, SingleRoundSampler
from libai_wb.data.datasets import FASHION_FOLDER, ArrayDataset, digits, fashion_mnist, read_idx
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.data.samplers import (TAILS, epoch_batches, epoch_order, eval_batches, fill_rows, global_batch_ids,
                                    position_of, rank_rows, steps_per_epoch)
from libai_wb.mesh.launch import run_ranks
from libai_wb.optim.build import get_default_optimizer_params
from libai_wb.scheduler import WarmupCosineLR

needs_fashion = pytest.mark.skipif(not (FASHION_FOLDER / "train-images-idx3-ubyte.gz").exists(),
                                   reason="Debian package dataset-fashion-mnist is not installed")

GOLDEN = {  # (N, G, seed, epoch) -> the global batches of the epoch; never change these
    (10, 4, 0, 0): [[7, 6, 4, 9], [0, 5, 8, 1]],
    (10, 4, 0, 1): [[8, 5, 6, 3], [2, 4, 7, 0]],
    (23, 6, 1234, 2): [[14, 4, 20, 18, 22, 5], [0, 21, 7, 16, 12, 17], [11, 9, 6, 19, 1, 13]],
    (16, 16, 5, 0): [[15, 12, 14, 11, 10, 5, 7, 0, 3, 4, 6, 2, 1, 13, 9, 8]],
}


@pytest.mark.parametrize("n, g, seed, epoch", GOLDEN)
def test_golden_order(n, g, seed, epoch):
    steps = range(epoch * (n // g), (epoch + 1) * (n // g))
    assert [global_batch_ids(n, g, s, seed)[0].tolist() for s in steps] == GOLDEN[n, g, seed, epoch]


GOLDEN_TAILS = {  # (N, G, seed, epoch, tail) -> the last global batch of the epoch; never change these
    (10, 4, 0, 0, "short"): [2, 3],
    (10, 4, 0, 0, "wrap"): [2, 3, 7, 6],
    (10, 4, 0, 1, "wrap"): [9, 1, 8, 5],
    (3, 8, 2, 1, "short"): [0, 2, 1],
    (3, 8, 2, 1, "wrap"): [0, 2, 1, 0, 2, 1, 0, 2],
}


@pytest.mark.parametrize("n, g, seed, epoch, tail", GOLDEN_TAILS)
def test_golden_tails(n, g, seed, epoch, tail):
    want = GOLDEN_TAILS[n, g, seed, epoch, tail]
    assert epoch_batches(n, g, seed, epoch, tail=tail)[-1].tolist() == want
    last = (epoch + 1) * steps_per_epoch(n, g, tail) - 1
    assert global_batch_ids(n, g, last, seed, tail=tail)[0].tolist() == want


GOLDEN_CYCLIC = {  # (N, mb, dp, seed, first micro-batch) -> three micro-batches of each rank; never change these
    (23, 3, 2, 4, 0): [[[3, 11, 1], [5, 14, 8], [13, 2, 21]], [[10, 15, 4], [17, 19, 0], [7, 9, 6]]],
    (10, 2, 2, 0, 1): [[[0, 5], [8, 5], [2, 4]], [[8, 1], [6, 3], [7, 0]]],
}


@pytest.mark.parametrize("n, mb, dp, seed, first", GOLDEN_CYCLIC)
def test_golden_cyclic_order(n, mb, dp, seed, first):
    samplers = [CyclicSampler(range(n), mb, True, first * mb * dp, r, dp, seed) for r in range(dp)]
    assert [list(itertools.islice(s, 3)) for s in samplers] == GOLDEN_CYCLIC[n, mb, dp, seed, first]


def test_order_needs_nothing_but_philox_and_a_sort():
    "R-47: another program finds the order from the seed's hash, a raw Philox stream and a stable sort."
    name = "order\x1f#5\x1f#2".encode()
    seed = int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> 1
    raw = np.random.Philox(seed).random_raw(257).tolist()
    assert epoch_order(257, 5, 2).tolist() == sorted(range(257), key=raw.__getitem__)


LAYOUTS = [(n, g, dp, acc) for n, g, dp, acc in itertools.product((24, 25, 97), (8, 12, 24), (1, 2, 3, 4), (1, 2, 3, 4))
           if g % dp == 0 and g // dp % acc == 0]


@pytest.mark.parametrize("n, g", sorted({(n, g) for n, g, *_ in LAYOUTS}))
def test_layout_does_not_change_the_batches(n, g):
    "R-40, R-64: every layout takes the same rows in the same updates, disjoint and from any update on."
    layouts = [(dp, acc) for m, h, dp, acc in LAYOUTS if (m, h) == (n, g)]
    assert len(layouts) >= 5
    for step in (0, 1, n // g, 3 * (n // g) + 1):
        ids, epoch = global_batch_ids(n, g, step, seed=7)
        assert epoch == step // (n // g) and len(set(ids.tolist())) == g
        for dp, acc in layouts:
            parts = [np.split(ids[rank_rows(g, dp, r)], acc) for r in range(dp)]
            assert np.array_equal(np.concatenate([m for p in parts for m in p]), ids)
            assert all(parts[p.dp_rank][p.micro][p.row] == ids[q]
                       for q in range(g) for p in [position_of(q, g, dp, acc)])


@pytest.mark.parametrize("n, g", [(24, 8), (25, 8), (97, 12), (7, 7)])
def test_an_epoch_takes_each_sample_at_most_once(n, g):
    per_epoch = steps_per_epoch(n, g)
    for epoch in range(3):
        ids = np.concatenate([global_batch_ids(n, g, epoch * per_epoch + b, 0)[0] for b in range(per_epoch)])
        assert len(set(ids.tolist())) == len(ids) == n // g * g
    dropped = [set(range(n)) - set(epoch_order(n, 0, e)[:per_epoch * g].tolist()) for e in range(9)]
    assert n % g == 0 or len(set.union(*dropped)) > n % g  # not always the same samples are left out


SIZES = [(n, g) for n in (1, 5, 24, 25, 97) for g in (4, 12, 24)]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("n, g", SIZES)
def test_tails(n, g, tail):
    "R-64, R-69: rows of a rank are constant, real rows exact, and each sample comes as often as its tail says."
    if tail == "drop" and n < g: return
    steps = steps_per_epoch(n, g, tail)
    whole = [(global_batch_ids(n, g, s, 3, tail=tail)) for s in range(3 * steps)]
    assert [e for _, e in whole] == sorted(list(range(3)) * steps)
    for epoch in range(3):
        batches = [ids for ids, e in whole if e == epoch]
        assert all(np.array_equal(a, b) for a, b in zip(batches, epoch_batches(n, g, 3, epoch, tail=tail), strict=True))
        seen = np.bincount(np.concatenate(batches), minlength=n)
        if tail == "drop": assert seen.sum() == n // g * g and seen.max() <= 1
        if tail == "short": assert (seen == 1).all() and [len(b) for b in batches[:-1]] == [g] * (steps - 1)
        if tail == "wrap": assert seen.sum() == steps * g and seen.max() - seen.min() <= 1
    for dp, acc in [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)]:
        for ids, _ in whole:
            ranks = [fill_rows(ids, g, dp, r) for r in range(dp)]
            assert {x.shape for r in ranks for x in r} == {(g // dp,)}
            micro = [[np.split(x, acc) for x in r] for r in ranks]
            rows, real, weight = (np.concatenate([m for r in micro for m in r[k]]) for k in range(3))
            assert np.array_equal(real[weight > 0], ids) and weight.sum() == len(ids)
            assert (real[weight == 0] == -1).all() and (rows[weight == 0] == ids[-1]).all()
            assert np.array_equal(rows[weight > 0], ids)


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("n, mb, dp, acc", [(24, 2, 3, 2), (25, 3, 2, 2), (97, 4, 4, 1), (97, 2, 1, 8), (999, 4, 2, 1)])
def test_cyclic_sampler(n, mb, dp, acc, bucketed):
    "R-64: ranks are disjoint, count alike, repeat nothing in an epoch and start anywhere."
    def samplers(consumed): return [CyclicSampler(range(n), mb, True, consumed, r, dp, 5, acc, bucketed)
                                    for r in range(dp)]
    together = mb * dp * (1 if bucketed else acc)
    per_epoch = n // together * together // (mb * dp)
    ranks = [list(itertools.islice(s, 3 * per_epoch + 2)) for s in samplers(0)]
    assert {len(b) for r in ranks for b in r} == {mb}
    epochs = [[i for r in ranks for b in r[e * per_epoch:(e + 1) * per_epoch] for i in b] for e in range(3)]
    assert all(len(set(e)) == len(e) == n // together * together for e in epochs) and epochs[0] != epochs[1]
    for first in range(0, 3 * per_epoch, max(1, per_epoch // 7)):
        resumed = [list(itertools.islice(s, 2)) for s in samplers(first * mb * dp)]
        assert resumed == [r[first:first + 2] for r in ranks]


def test_cyclic_sampler_follows_the_global_order():
    "The default order is the trainer's own, whatever dp and accumulation are."
    for dp, acc in [(1, 1), (2, 1), (2, 2), (4, 3)]:
        ranks = [itertools.islice(CyclicSampler(range(97), 24 // dp // acc, True, 0, r, dp, 1, acc), 9 * acc)
                 for r in range(dp)]
        rows = np.array([list(r) for r in ranks]).reshape(dp, 9, -1)
        assert all(np.array_equal(rows[:, s].reshape(-1), global_batch_ids(97, 24, s, 1)[0]) for s in range(9))


@pytest.mark.parametrize("bucketed", [False, True])
def test_single_round_in_a_dataloader(bucketed):
    "A batch sampler of PyTorch's loader: once over everything, no sample twice."
    data = [(torch.tensor([float(i)]), i) for i in range(13)]
    seen = [y.tolist() for r in range(3) for _, y in torch.utils.data.DataLoader(
        data, batch_sampler=SingleRoundSampler(data, 2, True, r, 3, bucketed=bucketed))]
    assert sorted(i for b in seen for i in b) == list(range(13)) and max(map(len, seen)) == 2


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n, batch", [(7, 2), (9, 1), (10, 4), (11, 3), (13, 2), (16, 4)])
def test_evaluation_counts_each_sample_once(n, batch, dp):
    "U6, E9: LiBai's padding is wrong for N=9 and 10 on 4 ranks and N=13 on 8."
    ranks = [list(eval_batches(n, batch, dp, r)) for r in range(dp)]
    assert {len(r) for r in ranks} == {-(-n // (batch * dp))}
    flat = [row for r in ranks for b in r for row in zip(*(x.tolist() for x in b))]
    assert sorted(i for _, i, w in flat if w) == list(range(n))
    assert all(row == i if w else i == -1 for row, i, w in flat)


def test_loader_is_the_same_for_ranks_resume_and_workers():
    "U1, U2, E11: the batch depends on the update alone, with two worker processes too."
    data = digits()
    whole = TrainLoader(data, 64, seed=3)
    stream = TrainLoader(data, 64, seed=3, num_workers=2).iterate(start=20)
    before = torch.get_rng_state()
    for step in range(20, 25):  # over the end of an epoch of 22 updates
        want, got = whole.batch(step), next(stream)
        halves = [TrainLoader(data, 64, dp=2, dp_rank=r, seed=3).batch(step) for r in range(2)]
        for k in ("images", "labels", "ids", "weight"):
            assert torch.equal(got[k], want[k]) and torch.equal(torch.cat([h[k] for h in halves]), want[k])
        assert torch.equal(want["labels"], torch.from_numpy(data.labels)[want["ids"]])
    assert torch.equal(before, torch.get_rng_state())


def test_evaluation_loader_with_workers():
    data = digits(train=False)
    seen = [b for r in range(2) for b in EvalLoader(data, 50, dp=2, dp_rank=r, num_workers=r)]
    assert {tuple(b["images"].shape) for b in seen} == {(50, 1, 8, 8)} and len(seen) == 8
    ids = torch.cat([b["ids"] for b in seen])
    assert sorted(ids[ids >= 0].tolist()) == list(range(360)) and int((ids == -1).sum()) == 40


def _rank_with_workers(rank, world):
    loader = TrainLoader(digits(), 64, dp=world, dp_rank=rank, num_workers=1)
    stream = loader.iterate(5)
    return all(torch.equal(next(stream)["images"], loader.batch(s)["images"]) for s in (5, 6, 7))


def test_ranks_may_have_workers():
    assert run_ranks(_rank_with_workers, 2, timeout=100) == [True, True]


class _Deadly:
    "A dataset whose worker dies."
    def __len__(self): return 8
    def __getitem__(self, i):
        if torch.utils.data.get_worker_info(): os._exit(1)
        return dict(images=torch.zeros(1), labels=0)


def test_a_dead_worker_is_noticed():
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(TrainLoader(_Deadly(), 4, num_workers=1).iterate())


@needs_fashion
@pytest.mark.parametrize("train", [True, False])
def test_fashion_mnist_equals_torchvision(tmp_path, train):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for f in FASHION_FOLDER.glob("*.gz"):
        with gzip.open(f) as src, open(raw / f.stem, "wb") as dst: shutil.copyfileobj(src, dst)
    theirs, ours = FashionMNIST(tmp_path, train=train), fashion_mnist(train=train)
    assert len(ours) == len(theirs) == (60_000 if train else 10_000)
    assert np.array_equal(ours.images[:, 0], theirs.data.numpy())
    assert np.array_equal(ours.labels, theirs.targets.numpy())
    unpacked = fashion_mnist(tmp_path, train=train)
    assert np.array_equal(unpacked.images, ours.images)
    x = ours.fetch(range(0, len(ours), 7))["images"]
    assert x.shape[1:] == (1, 28, 28) and abs(x.mean()) < .01 and abs(x.std() - 1) < .01


@needs_fashion
def test_a_truncated_file_is_named(tmp_path):
    for f in FASHION_FOLDER.glob("t10k-*.gz"): shutil.copy(f, tmp_path)
    bad = tmp_path / "t10k-images-idx3-ubyte.gz"
    bad.write_bytes(bad.read_bytes()[:1_000_000])
    with pytest.raises(ValueError, match=f"{bad.name} is not a complete gzip file"):
        fashion_mnist(tmp_path, train=False)


def test_images_and_labels_of_different_sets_are_refused(tmp_path):
    def idx(name, shape): (tmp_path / name).write_bytes(
        b"\0\0\x08" + bytes([len(shape)]) + np.array(shape, ">u4").tobytes() + bytes(int(np.prod(shape))))
    idx("train-images-idx3-ubyte", (4, 28, 28))
    idx("train-labels-idx1-ubyte", (3,))
    assert read_idx(tmp_path / "train-images-idx3-ubyte").shape == (4, 28, 28)
    with pytest.raises(ValueError, match="4 images come with 3 labels"): fashion_mnist(tmp_path)


def test_one_dataset_serves_training_and_evaluation():
    "R-61: the dataset knows of neither."
    data = ArrayDataset(np.zeros((10, 1, 2, 2)), np.arange(10))
    assert TrainLoader(data, 4).steps_per_epoch == 2 and len(EvalLoader(data, 4)) == 3


def _stage(names):
    "A part of a model after one step, as a pipeline stage holds it."
    torch.manual_seed(0)
    model = nn.ModuleDict({n: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for n in names})
    groups = get_default_optimizer_params(model, weight_decay_norm=0., weight_decay_bias=0.)
    optimizer = torch.optim.AdamW(groups, lr=.1, weight_decay=.3)
    scheduler = WarmupCosineLR(optimizer, 10, .1, 3)
    for n, p in model.named_parameters(): p.grad = torch.full_like(p, float(len(n)))
    optimizer.step(), scheduler.step()
    return model, optimizer


def test_groups_of_two_stages_load_into_one():
    "What a pipeline's stages save, flattened, is what one process needs, rates and decays included."
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = {}
    for names in ("ab", "cd"): saved |= get_optimizer_state_dict(*_stage(names), options=options)
    model, optimizer = _stage("abcd")
    want = get_optimizer_state_dict(model, optimizer, options=options)
    assert saved.keys() == want.keys()
    for group in optimizer.param_groups: group["lr"] = group["weight_decay"] = -1.
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0., .3]
    for k, v in get_optimizer_state_dict(model, optimizer, options=options).items():
        assert torch.equal(v, want[k]) if torch.is_tensor(v) else v == want[k], k
