"""Faults that a review planted: each was silent, or ended without a verdict, when it was found."""
import math
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from libai_wb.align.verification import verify
from libai_wb.engine.build import build_training, load_recipe
from libai_wb.engine.step import TrainStep
from libai_wb.mesh.launch import RankError, make_mesh, run_ranks
from libai_wb.mesh.parallelize import logical, parallelize
from libai_wb.mesh.topology import ParallelLayout, Unit

STEPS = 4


# --- what verify must find; each function is planted in the candidates as patch="test_faults:NAME" ---

def on_step(fault):
    "A patch, which takes the `Training`, from a fault of its step."
    return lambda training: fault(training.step)


def is_replica_1(step): return step.mesh is not None and step.mesh["dp"].size() > 1 and step.mesh.get_local_rank("dp") == 1


def at_the_end(step, change):
    "Call `change` after the last compared update."
    step.observers.append(lambda phase, s: change() if phase == "updated" and s.update == STEPS else None)


@on_step
def drifted_copy(step):
    "One replica's head is off by a millionth at the end: far inside the float32 noise band."
    weight = dict(step.model.named_parameters())["head.weight"]
    if is_replica_1(step): at_the_end(step, lambda: weight.data.mul_(1 + 1e-6))


@on_step
def redundant_replicas(step):
    "Every replica trains the whole global batch: right numbers, and data parallelism did nothing."
    whole, call = build_training(load_recipe("vit_nano_digits")).loader, type(step).__call__
    step.__class__ = type("Redundant", (type(step),), {"__call__": lambda self, batch: call(self, whole.batch(self.update))})


@on_step
def tripled_lr_metric(step):
    lr = step.lr
    step.lr = lambda: 3 * lr()


@on_step
def extra_state(step):
    "The optimizer keeps a state that the reference does not know."
    def add():
        for p in step.params: step.optimizer.state[p]["exp_avg_slow"] = torch.zeros_like(p)
    at_the_end(step, add)


@on_step
def counter_off(step):
    "Adam's step count, which its bias correction uses, is off by one."
    at_the_end(step, lambda: [s["step"].add_(1) for s in step.optimizer.state.values()])


@on_step
def nan_gradient(step):
    step.observers.append(lambda phase, s: s.params[-1].grad.fill_(math.nan) if phase == "reduced" and s.update == 2 else None)


@on_step
def fails_under_tp(step):
    if step.mesh is not None and step.mesh["tp"].size() > 1: raise RuntimeError("tensor parallelism is out of order")


@pytest.mark.parametrize("fault,layout,dtype,verdict", [
    ("drifted_copy", "dp2", "float32", f"leaves at step {STEPS}, parameter of head.weight: dp copies disagree"),
    ("redundant_replicas", "dp2", "float64", "leaves at step 0, samples: the run trained on other samples"),
    ("tripled_lr_metric", "tp2", "float64", "leaves at step 0, lr: off by 2.0e+00"),
    ("extra_state", "dp2", "float64", f"leaves at step {STEPS}, exp_avg_slow of cls_token: only one of the runs has it"),
    ("counter_off", "dp2", "float64", f"leaves at step {STEPS}, step of cls_token: off by"),
    ("nan_gradient", "dp2", "float64", "failed: Rank"),
])
def test_verify_finds(fault, layout, dtype, verdict):
    answer = verify("vit_nano_digits", [layout], STEPS, dtype, patch=f"test_faults:{fault}", progress=False)
    assert not answer.ok and answer.results[0].verdict.startswith(verdict), answer


def test_a_candidate_that_fails_does_not_take_the_others_with_it():
    answer = verify("vit_nano_digits", ["dp2", "tp2"], 2, patch="test_faults:fails_under_tp", progress=False)
    assert [r.ok for r in answer.results] == [True, False]
    assert "tensor parallelism is out of order" in answer.results[1].verdict
    assert '"margin": null' in answer.to_json()


def test_a_frozen_parameter_and_a_fixed_micro_batch_are_no_obstacle():
    cfg = load_recipe("vit_nano_digits")
    cfg.model._target_ = Frozen
    assert verify(cfg, ["dp2", "tp2"], 2, progress=False).ok
    cfg = load_recipe("vit_nano_digits")
    cfg.train.train_micro_batch_size = 16
    assert verify(cfg, ["dp2"], 2, dtype="float32", progress=False).ok


class Frozen(nn.Module):
    "A ViT whose positions do not train."
    def __new__(cls, **kw):
        from libai_wb.models.vit import VisionTransformer
        model = VisionTransformer(**kw)
        model.pos_embed.requires_grad_(False)
        return model


# --- what training must get right, or refuse ---

class Spare(nn.Module):
    "A classifier with a layer that takes no part in forward."
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x): return self.used(x)


class Twice(nn.Module):
    "One layer behind two checkpoints."
    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.head, self.reentrant = nn.Linear(3, 3), nn.Linear(3, 2), reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for _ in range(2): x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class Turned(nn.Module):
    "Units that hand over a view that does not lie in one piece."
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(3, 3) for i in range(4)})

    def units(self):
        return [Unit(k, lambda x, ids, step, f=f: f(x).transpose(1, 2), (f"layers.{k}",)) for k, f in self.layers.items()]

    def loss(self, output, batch): return output.square().flatten(1).sum(1)


def train(rank, world, layout, make, args, shape=(3,)):
    "Four AdamW steps from the same weights; losses, norms and weights."
    lay = ParallelLayout.parse(layout)
    torch.manual_seed(0)
    mesh = make_mesh(lay)
    model = parallelize(make(*args).double(), mesh)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=.1), mesh, acc=lay.pp, clip=1.)
    batch = dict(images=torch.linspace(-1, 1, 8 * math.prod(shape)).view(8, *shape), labels=torch.arange(8) % 2)
    rows = {k: v.chunk(lay.dp)[lay.coords(rank).dp].clone() for k, v in batch.items()}
    metrics = [step(rows) for _ in range(4)]
    return [m["loss"] for m in metrics], [m["grad_norm"] for m in metrics], {k: logical(p).detach() for k, p in model.named_parameters()}


def assert_same(layout, make, *args, shape=(3,)):
    [(losses, norms, weights)] = run_ranks(train, 1, "1", make, args, shape)
    for got in run_ranks(train, 2, layout, make, args, shape):
        torch.testing.assert_close(got[:2], (losses, norms), rtol=1e-11, atol=0)
        for k, w in got[2].items(): torch.testing.assert_close(w, weights[k], rtol=1e-10, atol=1e-12)


def test_a_parameter_without_a_gradient_is_left_alone_under_dp(): assert_same("dp2", Spare)


def test_a_layer_behind_two_checkpoints(): assert_same("dp2", Twice, False)


def test_a_gradient_that_arrives_twice_is_refused():
    with pytest.raises(RankError, match="got its gradient twice in one backward"): run_ranks(train, 2, "dp2", Twice, (True,))


def test_a_stage_may_hand_over_a_view(): assert_same("pp2", Turned, shape=(3, 3))


# --- what starting ranks must survive ---

def die_with_a_child(rank, world):
    "Rank 1 is killed while a child of its own still holds the pipe."
    if rank == 1:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(8)"], close_fds=False)
        os.kill(os.getpid(), 9)
    torch.distributed.all_reduce(torch.ones(1))


def test_a_killed_rank_is_noticed_although_its_child_lives():
    start = time.monotonic()
    with pytest.raises(RankError, match="Rank 1 of 2 was ended by SIGKILL"): run_ranks(die_with_a_child, 2, timeout=30)
    assert time.monotonic() - start < 15


def read_variable(rank, world): return os.environ.get("LIBAI_WB_TEST")


def test_ranks_see_todays_environment(monkeypatch):
    monkeypatch.setenv("LIBAI_WB_TEST", "here")
    assert run_ranks(read_variable, 1) == ["here"]
    monkeypatch.delenv("LIBAI_WB_TEST")
    assert run_ranks(read_variable, 1) == [None]
