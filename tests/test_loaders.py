"Loaders: random transforms, mixup, ragged and unreadable samples are alike for any layout, worker, order and resume."
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from libai_wb.data.datasets import UnreadableSample
from libai_wb.data.instance import Instance
from libai_wb.data.loaders import EvalLoader, TrainLoader
from libai_wb.data.mixup import Mixup
from libai_wb.data.samplers import steps_per_epoch

N, TAILS = 23, ("drop", "short", "wrap")


class Noisy:
    "Pictures with noise from three global generators; those in `torn` cannot be read."
    def __init__(self, n=N, torn=(), error=OSError): self.n, self.torn, self.error = n, set(torn), error
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i in self.torn: raise self.error(f"sample {i} is torn")
        noise = torch.rand(1, 3, 3) + np.random.rand() + random.random()
        return dict(images=noise + 10 * i, labels=i % 5)


def mixup(mode="elem", **kw): return Mixup(.8, 1., mode=mode, num_classes=5, **kw)


def states(): return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def equal(a, b): return list(a) == list(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def joined(loaders, step):
    "The batches of all ranks as one."
    parts = [loader.batch(step) for loader in loaders]
    return {k: torch.cat([p[k] for p in parts]) for k in parts[0]}


def ranks_of(dp, data=None, g=12, **kw):
    return [TrainLoader(Noisy() if data is None else data, g, dp=dp, dp_rank=r, seed=3, **kw) for r in range(dp)]


@pytest.mark.parametrize("mode", [None, "batch", "pair", "elem"])
@pytest.mark.parametrize("tail", TAILS)
def test_ranks_are_one_process(tail, mode):
    "dp 4 and 12 leave an odd number of rows per rank, whose partners are fetched from elsewhere."
    mix = dict(mixup_func=mixup(mode)) if mode else {}
    one, = ranks_of(1, tail=tail, **mix)
    steps = steps_per_epoch(N, 12, tail)
    for step in (0, steps - 1, steps):
        want = one.batch(step)
        for dp in (2, 3, 4, 12): assert equal(joined(ranks_of(dp, tail=tail, **mix), step), want), (dp, step)
        assert want["step"].tolist() == [step] * 12
        assert want["weight"].sum() == (11 if tail == "short" and step == steps - 1 else 12)
        assert ((want["ids"] < 0) == (want["weight"] == 0)).all()


def test_any_order_of_asking_and_company():
    "A batch is a function of the update, whatever was asked for before and whatever the generators were."
    loader, = ranks_of(1, mixup_func=mixup())
    want = {s: ranks_of(1, mixup_func=mixup())[0].batch(s) for s in range(5)}
    for step in (3, 0, 4, 4, 1, 2):
        torch.manual_seed(step), np.random.seed(step), random.seed(step)
        before = states()
        assert equal(loader.batch(step), want[step]) and states() == before
    alone = TrainLoader(Noisy(), 1, seed=3)
    alone = {int(b["ids"]): b["images"][0] for b in map(alone.batch, range(N))}
    shown = ranks_of(1)[0].batch(0)
    for row, i in enumerate(shown["ids"].tolist()): assert torch.equal(alone[i], shown["images"][row])


def test_pictures_differ_between_epochs_seeds_and_samples():
    loaders = [TrainLoader(Noisy(), N, seed=seed, shuffle=False) for seed in (0, 1)]
    images = torch.stack([loader.batch(step)["images"] for loader in loaders for step in (0, 1)])
    noise = images[:, :, 0, 0, 0] - 10 * torch.arange(N)
    assert len(set(noise.flatten().tolist())) == 4 * N


@pytest.mark.parametrize("device", ["cpu", "device"])
@pytest.mark.parametrize("tail", ["short", "wrap"])
def test_resume_and_workers(tail, device):
    "U1, U2, R-07: two workers and any start give the batches that one process makes from the first update on."
    kw = dict(tail=tail, mixup_func=mixup("pair", device=device))
    whole = [b for _, b in zip(range(5), ranks_of(1, **kw)[0].iterate(0))]
    here, ahead = (ranks_of(1, num_workers=w, **kw)[0].iterate(1) for w in (0, 2))
    before = states()
    for want, a, b in zip(whole[1:], here, ahead): assert equal(a, want) and equal(b, want)
    assert states() == before


def test_mixup_on_the_device_is_the_same():
    "R-70: after collate or after the move."
    now, late = (ranks_of(4, mixup_func=mixup(device=d)) for d in ("cpu", "device"))
    for a, b in zip(now, late):
        raw = b.batch(1)
        assert len(raw["images"]) == 4 and len(raw["ids"]) == 3 and raw["labels"].ndim == 1
        assert equal(b.finish(raw), a.batch(1)) and equal(a.finish(a.batch(1)), a.batch(1))


@pytest.mark.filterwarnings("ignore:Sample")
@pytest.mark.parametrize("error", [OSError, UnreadableSample])
@pytest.mark.parametrize("mode", [None, "elem"])
def test_skipped_samples(mode, error):
    "A skipped row counts nothing and its partner is not mixed, whatever dp is."
    kw = dict(on_error="skip", tail="short") | (dict(mixup_func=mixup(mode, label_smoothing=0.)) if mode else {})
    torn = Noisy(torn=(1, 8, 9), error=error)
    kept, lost = ranks_of(1, **kw)[0], ranks_of(1, torn, **kw)[0]
    seen = []
    for step in (0, 1):
        want, got = kept.batch(step), lost.batch(step)
        for dp in (2, 4, 12): assert equal(joined(ranks_of(dp, torn, **kw), step), got)
        gone = torch.isin(want["ids"], torch.tensor([1, 8, 9]))
        assert torch.equal(got["weight"], want["weight"] * ~gone) and (got["ids"][gone] == -1).all()
        partner = torch.arange(12) ^ 1
        same = (want["weight"] > 0) & ~(gone | gone[partner] if mode else gone)
        assert torch.equal(got["images"][same], want["images"][same])
        if mode:
            alone = gone[partner] & ~gone & (want["weight"] > 0)
            assert torch.equal(got["labels"][alone].argmax(1), got["ids"][alone] % 5) and alone.any()
            assert (got["labels"][alone].max(1).values == 1).all()
        seen += got["ids"].tolist()
    assert sorted(i for i in seen if i >= 0) == sorted(set(range(N)) - {1, 8, 9})
    assert sorted(lost.skipped) == [1, 8, 9] and "is torn" in lost.skipped[8]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_skipped_sample_is_said_once(num_workers):
    loader = TrainLoader(Noisy(12, (5,)), 6, on_error="skip", num_workers=num_workers)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in zip(range(6), loader.iterate()): pass
    assert [str(w.message).partition(":")[0] for w in said] == ["Sample 5 is skipped"]


@pytest.mark.filterwarnings("ignore:Sample")
@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_evaluation_sees_each_sample_once(dp):
    "The pictures do not depend on dp or batch; a rank may hold fillers alone; what was skipped is not counted."
    want = torch.cat([b["images"] for b in EvalLoader(Noisy(17), 17)])
    for torn in ((), (0, 16)):
        loaders = [EvalLoader(Noisy(17, torn), 8 // dp, dp, r, on_error="skip") for r in range(dp)]
        batches = [b for loader in loaders for b in loader]
        assert len({len(loader) for loader in loaders}) == 1
        assert {tuple(b["images"].shape) for b in batches} == {(8 // dp, 1, 3, 3)}
        for b in batches:
            real = b["weight"] > 0
            assert torch.equal(b["images"][real], want[b["ids"][real]]) and (b["ids"][~real] == -1).all()
        assert sorted(i for b in batches for i in b["ids"].tolist() if i >= 0) == sorted(set(range(17)) - set(torn))
        assert set(torn) == {i for loader in loaders for i in loader.skipped}


def test_evaluation_workers_stay():
    "The same worker processes serve every round."
    loader = EvalLoader(Noisy(), 8, num_workers=2)
    first = list(loader)
    pids = [w.pid for w in loader._ahead._iterator._workers]
    assert all(equal(a, b) for a, b in zip(loader, first, strict=True))
    assert [w.pid for w in loader._ahead._iterator._workers] == pids
    assert all(equal(a, b) for a, b in zip(EvalLoader(Noisy(), 8), first, strict=True))


def test_stop_names_the_sample_and_check_names_the_transform():
    with pytest.raises(UnreadableSample, match=r"Sample 3 cannot be read \(OSError: sample 3 is torn\)"):
        TrainLoader(Noisy(6, (3,)), 6).batch(0)
    with pytest.raises(UnreadableSample, match="6 samples in a row cannot be read, the first of them: sample 0"):
        loader = TrainLoader(Noisy(6, range(6), UnreadableSample), 6, on_error="skip", shuffle=False)
        loader.generators = ()
        loader.batch(0)

    class Seldom(Noisy):
        "Draws from numpy for one sample that set-up does not look at."
        def __getitem__(self, i):
            return dict(images=torch.rand(1), labels=np.random.randint(5) if i == 4 else 0)
    assert TrainLoader(Seldom(), N, check=0).generators == ("torch",)
    with pytest.raises(ValueError, match="Sample 4 draws from the global generator of numpy in Seldom"):
        TrainLoader(Seldom(), N, check=1).batch(0)


def test_a_sample_in_a_batch_twice_is_read_once():
    class Counted(Noisy):
        reads = []
        def __getitem__(self, i):
            self.reads.append(i)
            return super().__getitem__(i)
    data = Counted(5)
    loader = TrainLoader(data, 12, tail="wrap", shuffle=False)
    assert loader.generators and loader.steps_per_epoch == 1
    data.reads.clear()
    batch = loader.batch(0)
    assert sorted(data.reads) == list(range(5))
    assert batch["ids"].tolist() == [i % 5 for i in range(12)] and batch["weight"].sum() == 12
    assert torch.equal(batch["images"][:2], batch["images"][10:])


@pytest.mark.parametrize("form", [tuple, list, dict, Instance])
def test_samples_in_any_form(form):
    "A pair, a dict and LiBai's `Instance` make the same batch, also below PyTorch's `Subset`."
    class Data(Noisy):
        def __getitem__(self, i):
            item = super().__getitem__(i) | dict(labels=torch.tensor(i % 5))
            return form(**item) if form in (dict, Instance) else form(item.values())
    want = TrainLoader(Noisy(), 4).batch(0)
    assert equal(TrainLoader(Data(), 4).batch(0), want)
    assert equal(TrainLoader(Subset(Data(), range(N)), 4).batch(0), want)


def test_pinned_memory_is_asked_for_only_where_there_is_cuda():
    loader = TrainLoader(Noisy(), 4, pin_memory=True)
    assert next(loader.iterate())["images"].is_pinned() == torch.cuda.is_available()
