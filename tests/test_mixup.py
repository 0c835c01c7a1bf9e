"Mixup and CutMix: timm's statistics, timm's pixels and labels for the same draw, and no trace of the layout."
import numpy as np
import pytest
import timm.data.mixup as timm_mixup
import torch
from scipy.stats import binomtest, ks_2samp

from libai_wb.data.mixup import Mixup, partner_slots
from libai_wb.data.seeding import keep_generators

SETTINGS = dict(mixup=dict(mixup_alpha=.8), cutmix=dict(mixup_alpha=0., cutmix_alpha=1.),
                both=dict(mixup_alpha=.8, cutmix_alpha=1.),
                seldom=dict(mixup_alpha=.3, cutmix_alpha=.5, prob=.6, switch_prob=.3),
                minmax=dict(mixup_alpha=.8, cutmix_minmax=(.2, .7)),
                uncorrected=dict(mixup_alpha=0., cutmix_alpha=1., correct_lam=False))
MODES = "batch", "pair", "elem"
SIZE = 20, 24


@pytest.fixture(autouse=True)
def kept():
    "timm draws from NumPy's global generator: seed it, and put it back."
    with keep_generators():
        np.random.seed(1)
        yield


def batch(slots, count, global_batch, size=SIZE, dtype=torch.float32, classes=10):
    "The rows of some slots, then the partners that are not among them; slots from `count` on are fillers."
    real = np.where(np.asarray(slots) < count, slots, -1)
    partners = partner_slots(real, count)
    need = [int(s) for s in slots] + [int(p) for p in partners if p >= 0 and p not in slots]
    where = {s: i for i, s in reversed(list(enumerate(need)))}
    whole = torch.rand(global_batch, 3, *size, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return dict(images=whole[need].clone(), labels=torch.tensor(need) % classes, ids=torch.from_numpy(real),
                slot=torch.from_numpy(real), step=torch.full((len(slots),), 7), weight=torch.ones(len(slots)),
                partner=torch.tensor([where[int(p)] if p >= 0 else i for i, p in enumerate(partners)]))


# Statistics

def ours(mixup, mode, n):
    "λ, cut and box of `n` draws, each made as often as its mode makes it."
    if mode != "batch": return mixup.draw(5, 0, n if mode == "elem" else 2 * n, SIZE)
    draws = [mixup.draw(5, step, 2, SIZE) for step in range(n)]
    return type(draws[0])(*(np.concatenate(part) for part in zip(*draws)))


def timms(mixup, mode, n):
    "The same of timm's, by its own functions."
    if mode == "batch": lam, cut = map(np.array, zip(*(mixup._params_per_batch() for _ in range(n))))
    else: lam, cut = mixup._params_per_elem(n)
    cut, box = cut & (lam != 1), np.zeros((n, 4), int)
    for i in np.flatnonzero(cut):
        box[i], lam[i] = timm_mixup.cutmix_bbox_and_lam((3, *SIZE), lam[i], mixup.cutmix_minmax, mixup.correct_lam)
    return lam, cut, box


def facts(lam, cut, box):
    "What the two are compared by."
    top, bottom, left, right = box[cut].T
    return dict(lam=lam[~cut & (lam != 1)], lam_cut=lam[cut], height=bottom - top, width=right - left,
                y=top + bottom, x=left + right, top=top, right=right, area=(bottom - top) * (right - left))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_statistics_are_timms(setting, mode, n=3000):
    mine = ours(Mixup(mode=mode, **SETTINGS[setting]), mode, n)
    theirs = timms(timm_mixup.Mixup(mode=mode, **SETTINGS[setting]), mode, n)
    for what, a, b in (("cut", mine.cut, theirs[1]), ("mixed", mine.lam != 1, theirs[0] != 1)):
        share = b.mean()
        if share in (0, 1): assert a.mean() == share, what
        else: assert abs(a.mean() - share) < 4 * np.sqrt(2 * share * (1 - share) / n), what
    a, b = facts(*mine), facts(*theirs)
    for what in a:
        assert (len(a[what]) == 0) == (len(b[what]) == 0), what
        if len(a[what]): assert ks_2samp(a[what], b[what]).pvalue > 1e-3, what


def test_the_statistics_test_can_fail(n=3000):
    for other in (dict(mixup_alpha=.4), dict(mixup_alpha=1.2)):
        a, b = (facts(*ours(Mixup(mode="elem", **s), "elem", n)) for s in (SETTINGS["mixup"], other))
        assert ks_2samp(a["lam"], b["lam"]).pvalue < 1e-6
    a = facts(*ours(Mixup(mode="elem", **SETTINGS["cutmix"]), "elem", n))
    b = facts(*ours(Mixup(mode="elem", **SETTINGS["minmax"]), "elem", n))
    assert all(ks_2samp(a[k], b[k]).pvalue < 1e-6 for k in ("height", "width", "area"))


@pytest.mark.parametrize("prob, switch", [(1., .5), (.6, .3)])
def test_shares_are_the_probabilities(prob, switch, n=3000):
    draw = Mixup(.8, 1., prob=prob, switch_prob=switch, mode="elem").draw(2, 0, n, SIZE)
    assert binomtest(int((draw.lam != 1).sum()), n, prob).pvalue > .001 or prob == 1
    assert binomtest(int(draw.cut.sum()), int((draw.lam != 1).sum()), switch).pvalue > .001


@pytest.mark.parametrize("mode", MODES)
def test_soft_targets_are_timms(mode, n=600):
    "The share of the own class, from the outside: two classes that always meet each other."
    kw = dict(mode=mode, num_classes=3, **SETTINGS["seldom"])
    calls, rows = (n, 2) if mode == "batch" else (1, 2 * n)
    mine, theirs, timms = [], [], timm_mixup.Mixup(**kw)
    for step in range(calls):
        b = batch(range(rows), rows, rows, size=(6, 6)) | dict(step=torch.full((rows,), step))
        b["labels"] = b["slot"] % 2
        mine.append(Mixup(**kw)(b, 3, rows)["labels"][::2, 0])
        y = (torch.arange(rows) >= rows // 2).long()
        theirs.append(timms(torch.rand(rows, 3, 6, 6), y)[1][:rows // 2, 0])
    mine, theirs = torch.cat(mine), torch.cat(theirs)
    assert len(mine) == len(theirs) == n and ks_2samp(mine, theirs).pvalue > 1e-3
    for y in (mine, theirs): assert .033 <= y.min() and y.max() <= .934


# The same draw, the same pixels

@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pixels_and_labels_are_timms(setting, mode, seed, monkeypatch, n=12):
    "timm mixes row i with row n - 1 - i, so it gets the rows in an order in which those are neighbours."
    kw = dict(mode=mode, num_classes=10, **SETTINGS[setting])
    mixup, theirs = Mixup(**kw), timm_mixup.Mixup(**kw)
    order = np.r_[0:n:2, n - 1:0:-2]
    lam, cut, box = mixup.draw(seed, 7, n, SIZE)
    at = dict(batch=[0], pair=order[:n // 2] // 2, elem=order)[mode]
    boxes = iter([(tuple(box[i]), lam[i]) for i in at if cut[i]])
    monkeypatch.setattr(timm_mixup, "cutmix_bbox_and_lam", lambda *args, **kw: next(boxes))
    monkeypatch.setattr(theirs, "_params_per_batch", lambda: (float(lam[0]), bool(cut[0])))
    monkeypatch.setattr(theirs, "_params_per_elem", lambda n: (lam[at].copy(), cut[at]))
    b = batch(range(n), n, n)
    images, labels = theirs(b["images"][order].clone(), b["labels"][order])
    out = mixup(b, seed, n)
    assert torch.equal(out["images"][order], images)
    assert torch.equal(out["labels"][order], labels)


# No trace of the layout

@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", ["both", "seldom", "minmax"])
@pytest.mark.parametrize("count", [24, 17])
def test_any_split_of_the_slots_gives_the_same_rows(setting, mode, count, n=24):
    mixup = Mixup(mode=mode, num_classes=10, **SETTINGS[setting])
    for seed in range(3):
        whole = mixup(batch(range(n), count, n), seed, n)
        for dp, micro in ((2, 1), (3, 1), (8, 1), (24, 1), (2, 4), (4, 3)):
            parts = [mixup(batch(list(slots), count, n), seed, n) for slots in np.split(np.arange(n), dp * micro)]
            for key in ("images", "labels"):
                assert torch.equal(torch.cat([p[key] for p in parts]), whole[key]), (dp, micro, key)


@pytest.mark.parametrize("mode", MODES)
def test_fillers_and_the_odd_row_stay_alone(mode):
    mixup = Mixup(.8, 1., mode=mode, num_classes=10)
    b = batch(range(8), 5, 8)
    out = mixup(b, 0, 8)
    assert torch.equal(out["images"][4:], b["images"][4:]) and not torch.equal(out["images"][:4], b["images"][:4])
    assert torch.equal(out["labels"][4:], mixup.soft_labels(b["labels"][4:]))
    assert out["labels"].sum(1).allclose(torch.ones(8))
    rows = out["images"][:4] - b["images"][:4]
    changed = batch(range(8), 5, 8)
    changed["images"][5:] = 9.  # what stands in a filler reaches nobody
    assert torch.equal(mixup(changed, 0, 8)["images"][:4] - b["images"][:4], rows)


@pytest.mark.parametrize("mode", MODES)
def test_float64_is_mixed_by_the_same_draw(mode):
    mixup = Mixup(.8, 1., mode=mode, num_classes=10)
    double = mixup(batch(range(8), 8, 8, dtype=torch.float64), 0, 8)
    b = batch(range(8), 8, 8, dtype=torch.float64)
    single = mixup(b | dict(images=b["images"].float()), 0, 8)
    torch.testing.assert_close(single["images"].double(), double["images"], rtol=1e-6, atol=1e-6)
    assert double["images"].dtype == torch.float64 and torch.equal(single["labels"], double["labels"])


def test_labels_that_are_distributions_already():
    mixup = Mixup(.8, 1., mode="elem", num_classes=10)
    b = batch(range(8), 8, 8)
    soft = b | dict(labels=torch.nn.functional.one_hot(b["labels"], 10).double())
    torch.testing.assert_close(mixup(soft, 0, 8)["labels"], mixup(b, 0, 8)["labels"], rtol=0, atol=1e-7)


def test_global_generators_are_not_touched():
    with keep_generators():
        before = np.random.get_state()[1].copy(), torch.get_rng_state()
        Mixup(.8, 1., mode="elem", num_classes=10)(batch(range(8), 8, 8), 0, 8)
        assert (np.random.get_state()[1] == before[0]).all() and torch.equal(torch.get_rng_state(), before[1])


def told(images, labels):
    "Share of the own picture and of the own label, for two rows that are all 0 and all 1, of classes 0 and 1."
    return images.mean((1, 2, 3)), labels[:, 1]


def test_stages_see_one_lambda():
    "R-01: the first stage keeps the pictures and the last the labels, each from its own process."
    images, y = torch.tensor([0., 1.]).view(2, 1, 1, 1).expand(2, 1, 8, 8), torch.tensor([0, 1])
    kw = dict(mixup_alpha=.8, num_classes=2, label_smoothing=0.)
    b = batch(range(2), 2, 2) | dict(images=images, labels=y)
    picture, label = told(Mixup(**kw)(b, 0, 2)["images"], Mixup(**kw)(b, 0, 2)["labels"])
    torch.testing.assert_close(picture, label)
    ranks = []
    for rank in range(2):  # LiBai's: each rank draws from a generator of its own
        np.random.seed(rank)
        ranks.append(timm_mixup.Mixup(**kw)(images.clone(), y))
    picture, label = told(ranks[0][0], ranks[1][1])
    assert (picture - label).abs().max() > .05


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_device_mixes_the_same(mode):
    mixup = Mixup(.8, 1., mode=mode, num_classes=10, device="device")
    for seed in range(4):
        b = batch(range(8), 7, 8)
        there = mixup({k: v.cuda() for k, v in b.items()}, seed, 8)
        for key, value in mixup(b, seed, 8).items(): assert torch.equal(there[key].cpu(), value), key
