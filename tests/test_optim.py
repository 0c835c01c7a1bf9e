"""Optimizers, parameter groups, schedules: one table in every layout, and trust ratios of whole weights."""
import math
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from libai_wb.align.verification import verify
from libai_wb.config import LazyCall
from libai_wb.engine.build import build_training, load_recipe
from libai_wb.mesh.collectives import local
from libai_wb.mesh.launch import make_mesh, run_ranks
from libai_wb.mesh.parallelize import _toy, keep_stage, logical, parallelize
from libai_wb.mesh.topology import ParallelLayout
from libai_wb.models.vit import VisionTransformer
from libai_wb.optim import lamb
from libai_wb.optim.build import get_default_optimizer_params, group_names
from libai_wb.optim.lamb import Lamb, logical_norms
from libai_wb.optim.lars import Lars
from libai_wb.optim.layer_decay import layer_decay_params, layer_ids
from libai_wb.scheduler import WarmupCosineAnnealingLR

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def recipe(optimizer=None, params=None, **settings):
    "Nano ViT with clipping, warm-up and accumulation, with another optimizer or other groups."
    cfg = load_recipe("vit_nano_digits")
    cfg.train.num_accumulation_steps, cfg.train.train_iter, cfg.train.warmup_ratio = 2, 8, .25
    if optimizer: cfg.optim = LazyCall(optimizer)(params=cfg.optim.params, **settings)
    if params: cfg.optim.params = params
    return cfg


def with_lamb(): return recipe(Lamb, lr=.02, weight_decay=.05)
def with_lars(): return recipe(Lars, lr=2., momentum=.9, weight_decay=.01, trust_coeff=.02, nesterov=True)


def with_layer_decay():
    cfg = recipe(params=LazyCall(layer_decay_params)(weight_decay=.05, layer_decay=.65, clip_grad_max_norm=1.0))
    cfg.train.scheduler = LazyCall(WarmupCosineAnnealingLR)(warmup_factor=0., eta_min=1e-4, shift=True)
    return cfg


def with_lamb_by_layer():
    cfg = with_layer_decay()
    cfg.optim = LazyCall(Lamb)(params=cfg.optim.params, lr=.02)
    return cfg


LAYOUTS = ["dp2+acc2", "tp2+acc2", "pp2+acc2"]


@pytest.mark.parametrize("make,dtype", [(with_lamb, "float64"), (with_lars, "float64"), (with_layer_decay, "float64"),
                                        (with_lamb_by_layer, "float32")])
def test_layouts_follow(make, dtype):
    answer = verify(make(), LAYOUTS, steps=4, dtype=dtype, progress=False)
    assert answer.ok, f"\n{answer}"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("make", [with_lamb, with_lars, with_layer_decay])
def test_layouts_follow_in_float32(make):
    answer = verify(make(), LAYOUTS, steps=4, dtype="float32", progress=False)
    assert answer.ok, f"\n{answer}"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("make", [with_lamb, with_lars, with_lamb_by_layer])
def test_eight_ranks_follow(make):
    answer = verify(make(), ["tp4", "dp2tp2pp2+acc2", "dp2pp4+acc4"], steps=8, progress=False)
    assert answer.ok, f"\n{answer}"


def norms_of_shards(training):
    "Trust ratios from what a rank holds."
    lamb._cuts = lambda p: []


def test_norms_of_shards_are_found():
    answer = verify(with_lamb(), ["tp2"], steps=2, patch="test_optim:norms_of_shards", progress=False)
    assert not answer.ok and "leaves at step 1, loss" in answer.results[0].verdict, f"\n{answer}"


def test_clipping_reaches_the_trainer():
    "Clipping stands with the groups, as in LiBai, whichever function makes them."
    for make in (with_lamb, with_layer_decay): assert build_training(make()).step.clip == 1.


# Trust ratios

def _norms(rank, n):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))
    whole, ways = [draw(7, 5), draw(2, 2, 3)], (Shard(0), Shard(1), Replicate())
    cut = [distribute_tensor(w, mesh, [a, b], src_data_rank=None) for w in whole for a in ways for b in ways]
    want = [w.norm().item() for w in whole for _ in range(9)]
    return [abs(a / b - 1) for a, b in zip(logical_norms(cut, [local(c) for c in cut]).tolist(), want, strict=True)]


def test_norms_are_logical_for_any_placement():
    "Cut over both axes, the same dimension twice, or whole on one; also where a rank holds nothing of the second cut."
    for rank in run_ranks(_norms, 4): assert len(rank) == 18 and max(rank) < 1e-14


def _train(model, optimizer, steps):
    for i in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        (model(x) - x[:, :2]).square().sum().backward()
        optimizer.step()


def _chain(make, mesh=None):
    with torch.device("meta"): model = _toy().double()
    model = parallelize(model, mesh, seed=2)
    groups = [dict(params=[p for p in model.parameters() if (p.ndim > 1) == big], lr_scale=.5 + big,
                   weight_decay=.1 * big) for big in (True, False)]
    return model, make(groups, lr=.05)


def _half(rank, n, make):
    "Three updates under tp; logical weights, and the flattened state of the optimizer."
    model, optimizer = _chain(make, make_mesh(ParallelLayout(tp=n)))
    _train(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    full = lambda d: {k: logical(v).detach() if torch.is_tensor(v) else v for k, v in d.items()}
    return full(dict(model.named_parameters())), full(state)


@pytest.mark.parametrize("make", [Lamb, partial(Lars, momentum=.9, trust_coeff=.1)])
def test_state_moves_to_another_layout(make):
    "Three updates on two tensor-parallel ranks and three on one process are six."
    want, optimizer = _chain(make)
    _train(want, optimizer, range(6))
    weights, state = run_ranks(_half, 2, make)[0]
    model, optimizer = _chain(make)
    model.load_state_dict(weights)
    for group in optimizer.param_groups: group["weight_decay"] = group["lr_scale"] = -1.
    set_optimizer_state_dict(model, optimizer, state, options=FLAT)
    assert [(g["weight_decay"], g["lr_scale"]) for g in optimizer.param_groups] == [(.1, 1.5), (0., .5)]
    _train(model, optimizer, range(3, 6))
    for p, q in zip(model.parameters(), want.parameters()): torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


# Groups

def _settings(model, groups):
    "The settings of each parameter by name."
    pairs = zip(groups, group_names(model, groups))
    return {n: {k: v for k, v in g.items() if k != "params"} for g, names in pairs for n in names}


def _vit(): return VisionTransformer(8, 4, 1, 10, embed_dim=8, depth=12, num_heads=2)


@pytest.mark.parametrize("decay", [.65, .75])
def test_layer_decay_on_every_stage(decay):
    "R-45: on each of four stages a group's rate is base · decay^k at the first update, after the warm-up, at the end."
    base, low, warm, end, seen = 2e-3, 1e-6, 5, 20, {}
    for stage in range(4):
        model = _vit()
        keep_stage(model, stage, 4)
        groups = layer_decay_params(model, layer_decay=decay)
        schedule = WarmupCosineAnnealingLR(torch.optim.AdamW(groups, lr=base), end, 0., warm, eta_min=low, shift=True)
        for group, names, *rates in zip(groups, group_names(model, groups), *map(schedule.lr_at, (0, warm, end))):
            seen |= dict.fromkeys(names, (rates, group["weight_decay"]))
        for step, want in ((0, 0.), (warm, base), (end, low)):
            schedule.load_state_dict(dict(last_epoch=step, _step_count=step + 1))
            assert schedule.unscaled_lr() == pytest.approx(want, rel=1e-12)
    whole, ids = _vit(), layer_ids(_vit())
    assert seen.keys() == ids.keys()
    embedding = "cls_token", "pos_embed", "patch_embed"
    for name, p in whole.named_parameters():
        block = name.split(".")[1] if name.startswith("blocks.") else None
        layer = int(block) + 1 if block else 0 if name.split(".")[0] in embedding else 13
        rates, weight_decay = seen[name]
        assert ids[name] == layer
        assert rates == pytest.approx([lr * decay ** (13 - layer) for lr in (0., base, low)], rel=1e-12)
        assert weight_decay == (0. if p.ndim == 1 or name in ("cls_token", "pos_embed") else .05)


@pytest.mark.parametrize("name", ["swin_nano_digits", "swinv2_nano_digits"])
def test_layers_of_a_swin_are_counted_through(name):
    "Blocks over all stages; the merging in front of a stage moves with the last block of the stage before."
    model = build_training(load_recipe(name)).model
    ids, depths = layer_ids(model), list(load_recipe(name).model.depths)
    for stage, count in enumerate(depths):
        for block in range(count):
            mine = {v for k, v in ids.items() if k.startswith(f"layers.{stage}.blocks.{block}.")}
            assert mine == {sum(depths[:stage]) + block + 1}
        merging = {v for k, v in ids.items() if k.startswith(f"layers.{stage}.downsample.")}
        assert merging == ({sum(depths[:stage])} if stage else set())
    assert {v for k, v in ids.items() if k.startswith("patch_embed.")} == {0}
    assert {v for k, v in ids.items() if k.split(".")[0] in ("norm", "head")} == {sum(depths) + 1}


def test_the_log_has_the_rate_without_its_scale():
    training, lrs = build_training(with_layer_decay()), []
    for i in range(4): lrs.append(training.step(training.loader.batch(i))["lr"])
    want = [0., 2.5e-3, 5e-3] + [1e-4 + (5e-3 - 1e-4) * .5 * (1 + math.cos(math.pi / 6))]
    assert lrs == pytest.approx(want, rel=1e-12)
    groups = training.step.optimizer.param_groups
    assert len({g["lr_scale"] for g in groups}) == 6 and len({g["lr"] for g in groups}) == 6


def test_groups_are_the_same_under_every_cut():
    "A stage asks the whole model whether a name is right, a tensor-parallel rank counts logical dimensions."
    rules = dict(weight_decay=.1, weight_decay_1d=.2, modules=dict(Conv2d=dict(lr=1.)), no_weight_decay=True,
                 overrides={"blocks.1": dict(weight_decay=.3), "blocks.*.attn.proj": dict(lr=2.),
                            "head.weight": dict(lr=3.)})
    whole = _vit()
    want = _settings(whole, get_default_optimizer_params(whole, **rules))
    assert want["blocks.1.norm1.weight"] == dict(weight_decay=.3) and want["pos_embed"] == dict(weight_decay=0.)
    assert want["blocks.1.attn.proj.bias"] == dict(weight_decay=.3, lr=2.)
    assert want["blocks.11.norm1.weight"] == dict(weight_decay=.2)
    assert want["patch_embed.proj.weight"] == dict(weight_decay=.1, lr=1.) and want["head.weight"]["lr"] == 3.
    for stage in range(3):
        model = _vit()
        keep_stage(model, stage, 3)
        own = _settings(model, get_default_optimizer_params(model, **rules))
        assert own == {n: want[n] for n, _ in model.named_parameters()}
        with pytest.raises(ValueError, match="overrides..blocks.12.. matches no name of a parameter in Vision"):
            get_default_optimizer_params(model, overrides={"blocks.12": dict(lr=1.)})
    for own in run_ranks(_groups_under_tp, 2, rules): assert own == want


def _groups_under_tp(rank, n, rules):
    model = parallelize(_vit(), make_mesh(ParallelLayout(tp=n)))
    return _settings(model, get_default_optimizer_params(model, **rules))


def test_a_misspelt_name_ends_training_before_it_starts():
    cfg = recipe()
    cfg.optim.params.overrides = dict(pos_embeds=dict(weight_decay=0.))
    with pytest.raises(ValueError, match="did you mean 'pos_embed'"): build_training(cfg)
