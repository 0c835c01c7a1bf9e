"""Runs in several processes: any layout reads any weights, accuracy is exact, what is killed or full loses nothing."""
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
from kernels import words_of
from torch import nn

from libai_wb.config.call import LazyCall
from libai_wb.data.datasets import ArrayDataset, digits
from libai_wb.engine.build import load_recipe
from libai_wb.engine.checkpoint import checkpoints, latest, load_weights, save_weights
from libai_wb.engine.default import DefaultTrainer, Watch, train
from libai_wb.engine.hooks import CallbackHook
from libai_wb.engine.runs import Run
from libai_wb.mesh.launch import RankError, run_ranks
from libai_wb.mesh.topology import ParallelLayout

LAYOUTS = ["1", "dp2", "tp2", "pp2", "dp2tp2"]
ALL_LAYOUTS = [*LAYOUTS, "dp4", "tp4", "pp4", "dp2pp2", "tp2pp2", "dp2tp2pp2"]


def recipe(folder, updates=6, **train_keys):
    "Nano ViT for a few updates, runs below `folder`."
    cfg = load_recipe("vit_nano_digits")
    cfg.train.update(output_dir=str(folder), train_iter=updates, **train_keys)
    return cfg


def quietly(cfg, layout=None, **kw): return train(cfg, layout, progress=False, timeout=90, name="nano", **kw)


def count_hits(model, k=5):
    "Hits among the first and the first k over the digits held back, counted without the library's evaluator."
    data = digits(train=False)
    batch = data.fetch(range(len(data)))
    with torch.no_grad(): best = model(batch["images"]).topk(k).indices == batch["labels"][:, None]
    return best[:, 0].sum().item(), best.any(1).sum().item(), len(data)


def percent(model):
    one, five, rows = count_hits(model)
    return {"Acc@1": 100 * one / rows, "Acc@5": 100 * five / rows}


class Trap(ArrayDataset):
    "The digits, with something that happens to one rank at one batch."
    def __init__(self, how, rank=1, batch=4):
        super().__init__(*digits_as_arrays())
        self.how, self.rank, self.batch, self.fetched = how, rank, batch, 0

    def fetch(self, ids):
        self.fetched += len(ids) > 1
        if self.fetched == self.batch and os.environ.get("RANK") == str(self.rank):
            if self.how == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "raise": raise LookupError("sample 7 is not there")
            if self.how == "nan": return super().fetch(ids) | dict(images=torch.full((len(ids), 1, 8, 8), torch.nan))
        return super().fetch(ids)


def digits_as_arrays():
    data = digits()
    return data.images, data.labels


# Weights and accuracy

@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A run that has begun to tell digits apart."
    return quietly(recipe(tmp_path_factory.mktemp("trained"), 50), "dp2tp2")


def test_a_run_of_any_layout_gives_a_plain_model(trained):
    assert trained.summary["state"] == "finished" and trained.summary["layout"] == "dp2tp2"
    assert type(trained.model()).__name__ == "VisionTransformer" and not list(trained.path.glob("checkpoints/.*"))
    assert trained.metrics["Acc@1"].iloc[-1] == trained.summary["metrics"]["Acc@1"] > 0
    assert percent(trained.model()) == trained.summary["metrics"]


def _evaluate(rank, n, layout, cfg, path, rows):
    cfg.train.test_micro_batch_size = rows
    trainer = DefaultTrainer(cfg, layout, report=lambda report: None)
    load_weights(trainer.training.model, path)
    return trainer.evaluate()


def evaluated(trained, tmp_path, layout, rows):
    "What every rank of a layout says of the trained weights."
    world = ParallelLayout.parse(layout).world
    cfg = recipe(tmp_path)
    return run_ranks(_evaluate, world, layout, cfg, latest(trained.path/"checkpoints"), rows, timeout=90)


@pytest.mark.parametrize("layout, rows", [("1", 7), ("dp2", 256), ("tp2", 100), ("pp2", 256), ("dp2tp2", 50)])
def test_accuracy_is_the_same_in_every_layout(trained, tmp_path, layout, rows):
    "Batches that the 360 samples do not fill, tensor ranks that all have outputs, stages of which one has them."
    assert all(got == trained.summary["metrics"] for got in evaluated(trained, tmp_path, layout, rows))


@pytest.mark.full
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_accuracy_is_the_same_in_all_layouts(trained, tmp_path, layout):
    assert all(got == trained.summary["metrics"] for got in evaluated(trained, tmp_path, layout, 64))


@pytest.mark.full
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_every_layout_makes_the_same_run(tmp_path, layout):
    one, run = quietly(recipe(tmp_path, 12)), quietly(recipe(tmp_path, 12), layout)
    torch.testing.assert_close(torch.tensor(run.metrics.loss), torch.tensor(one.metrics.loss), rtol=1e-4, atol=0)
    assert percent(run.model()) == run.summary["metrics"]
    assert sorted(run.model().state_dict()) == sorted(one.model().state_dict())


def test_metrics_are_complete_and_exact(tmp_path):
    "R-16, R-49: one row per update in any layout, floats as the step returned them, saving and evaluating by updates."
    cfg = recipe(tmp_path, 10, num_accumulation_steps=2)
    cfg.train.checkpointer.update(period=4, max_to_keep=2)
    cfg.train.evaluation.eval_period = 5
    run = quietly(cfg, "pp2")
    table, derived = run.metrics, run.config["_derived_"]
    assert table.step.tolist() == list(range(10)) and table.samples.tolist() == [64 * (i + 1) for i in range(10)]
    assert table["Acc@1"].dropna().index.tolist() == [4, 9]
    assert [p.name for p in checkpoints(run.path/"checkpoints")] == ["0000008", "0000010"]
    assert (derived.accumulation, derived.micro_batch, derived.updates, derived.world) == (2, 32, 10, 2)
    trainer = DefaultTrainer(cfg, report=Watch(progress=False))
    bare = [trainer.training.step(trainer.training.loader.batch(i)) for i in range(10)]
    one = quietly(cfg).metrics
    for key in ("loss", "grad_norm", "lr"): assert one[key].tolist() == [m[key] for m in bare]


def test_loader_workers_change_nothing_and_end(tmp_path):
    cfg = recipe(tmp_path, 5)
    plain = quietly(cfg).metrics.loss.tolist()
    cfg.dataloader.train.num_workers = 2
    before = set(psutil.Process().children(recursive=True))
    assert quietly(cfg).metrics.loss.tolist() == plain
    alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=3)[1]
    assert all("forkserver" in (line := words_of(p)) or "resource_tracker" in line for p in alive)


# Other ways in

def _train_here(rank, n, cfg):
    run = train(cfg, progress=False)
    return str(run.path), run.summary["state"], len(run.metrics)


def test_inside_a_group_train_uses_its_ranks(tmp_path):
    want = str(tmp_path/"VisionTransformer-dp2"), "finished", 6
    assert run_ranks(_train_here, 2, recipe(tmp_path), timeout=90) == [want, want]


def script(code, **kw):
    "A Python process that hears Ctrl-C, also where the tests run in the background of a shell, which ignores it."
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    hears = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.Popen([sys.executable, "-c", hears + textwrap.dedent(code)], **pipes, **kw)


def finish(cmd, cwd):
    "A command's output, once it has succeeded."
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(cmd, cwd=cwd, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torchrun_gives_the_ranks(tmp_path):
    """Two ranks of torch elastic make one folder; only rank 0 speaks.

    No thread of gloo is left: one that drops its last tensor while Python ends aborts the rank."""
    (tmp_path/"go.py").write_text(textwrap.dedent("""
        from pathlib import Path
        from libai_wb.engine.default import train
        run = train("vit_nano_digits", overrides=["train.train_iter=4"], progress=False)
        assert len(run.metrics) == 4
        threads = [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]
        assert not [name for name in threads if "gloo" in name], threads
    """))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "go.py"]
    said = finish(torchrun, tmp_path)
    assert [p.name for p in (tmp_path/"outputs").iterdir()] == ["vit_nano_digits-dp2"]
    assert said.count("run outputs/vit_nano_digits-dp2") == 1
    run = Run(tmp_path/"outputs"/"vit_nano_digits-dp2")
    assert run.summary["state"] == "finished" and percent(run.model()) == run.summary["metrics"]


def test_the_command_finds_a_model_in_the_file_beside_you(tmp_path):
    "The console script looks into the working directory, as `python -m` does, and says so elsewhere."
    (tmp_path/"besides.py").write_text(textwrap.dedent("""
        from torch import nn
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.head = nn.Linear(64, 10)
            def forward(self, images): return self.head(images.flatten(1))
    """))
    (tmp_path/"mine.py").write_text(textwrap.dedent("""
        from besides import Net
        from libai_wb.config import LazyCall
        from libai_wb.engine.build import load_recipe
        base = load_recipe("vit_nano_digits")
        model, train, optim, dataloader = LazyCall(Net)(), base.train, base.optim, base.dataloader
    """))
    command = str(Path(sys.executable).with_name("libai-wb"))
    finish([command, "train", "mine.py", "--layout", "dp2", "train.train_iter=2"], tmp_path)
    assert "Acc@1" in finish([command, "eval", "outputs/mine-dp2"], tmp_path)
    (elsewhere := tmp_path/"elsewhere").mkdir()
    done = subprocess.run([command, "eval", "../outputs/mine-dp2"], cwd=elsewhere, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 2 and "'besides'; check the spelling" in done.stderr and done.stderr.count("\n") == 1
    assert "run in the folder of its file" in done.stderr


def test_a_saved_config_repeats_the_run_from_elsewhere(tmp_path, monkeypatch):
    "R-74: loaded in another working directory, by path, the config gives the same losses."
    run = quietly(recipe(tmp_path), "dp2")
    monkeypatch.chdir(tmp_path)
    again = train("nano-dp2/config.yaml", progress=False, timeout=90)
    assert again.path.name == "nano-dp2-2" and again.metrics.loss.tolist() == run.metrics.loss.tolist()
    assert again.config == run.config


def test_your_config_stays_yours(tmp_path):
    cfg = recipe(tmp_path, 2)
    before = str(cfg)
    run = train(cfg, overrides=["train.seed=4"], progress=False)
    cfg.train.seed = 5
    assert run.config.train.seed == 4 and before == str(recipe(tmp_path, 2))


def test_a_misspelt_key_is_said(tmp_path, capsys):
    cfg = recipe(tmp_path, 2)
    cfg.train.trian_iter = 3
    quietly(cfg)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "trian_iter" in line] == [
        "Nothing reads the config key 'train.trian_iter' (value 3), did you mean 'train.train_iter'?"]
    assert "no layout was given, so 1: 1 CPU process" in lines
    assert any(line.startswith("global batch 64 = micro-batch 64") for line in lines)


# What goes wrong

def trapped(tmp_path, how, **kw):
    "A run of two ranks that falls into a trap, and the error."
    cfg = recipe(tmp_path, 20)
    cfg.dataloader.train.dataset = LazyCall(Trap)(how=how, **kw)
    cfg.train.checkpointer.period = 2
    with pytest.raises(RankError) as e: quietly(cfg, "dp2")
    return Run(tmp_path/"nano-dp2"), e.value


def test_a_rank_that_raises(tmp_path):
    run, error = trapped(tmp_path, "raise")
    assert error.rank == 1 and "LookupError: sample 7 is not there" in str(error)
    assert "in fetch" in error.traceback
    assert run.summary["state"] == "failed: Rank 1 of 2 failed: LookupError: sample 7 is not there"
    assert len(run.metrics) == run.summary["updates"] == 3 and latest(run.path/"checkpoints").name == "0000002"
    assert "sample 7 is not there" in (run.path/"log"/"rank1.txt").read_text()


def test_a_rank_that_is_killed(tmp_path):
    start = time.monotonic()
    run, error = trapped(tmp_path, "kill")
    assert error.rank == 1 and "was ended by SIGKILL" in run.summary["state"] and time.monotonic() - start < 30
    assert len(run.metrics) == 3 and percent(run.model()).keys() == {"Acc@1", "Acc@5"}


def test_a_loss_that_is_no_number(tmp_path):
    "The run ends on every rank with the update and the samples; the weights before it are kept."
    run, error = trapped(tmp_path, "nan", batch=5)
    assert "FloatingPointError: Loss is nan at update 4 (sample ids on this replica: [" in run.summary["state"]
    assert len(run.metrics) == 4 and run.metrics.loss.notna().all()
    assert latest(run.path/"checkpoints").name == "0000004"
    for rank in (0, 1): assert "Loss is nan at update 4" in (run.path/"log"/f"rank{rank}.txt").read_text()


def test_an_interrupt(tmp_path):
    "Ctrl-C in the caller ends the ranks, says so in the summary and is still a KeyboardInterrupt."
    child = script("""
        from libai_wb.engine.default import train
        train("vit_nano_digits", "dp2", overrides=["train.train_iter=100000"], progress=False)
    """, cwd=tmp_path)
    try:
        metrics = tmp_path/"outputs"/"vit_nano_digits-dp2"/"metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size > 1000, child)
        family = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    finally: child.kill()
    assert err.rstrip().endswith("KeyboardInterrupt") and child.returncode != 0
    assert Run(metrics.parent).summary["state"] == "interrupted"
    assert not psutil.wait_procs(family, timeout=10)[1]


def wait_for(what, child, seconds=60, pause=.05):
    "Wait until something is true while a process lives."
    end = time.monotonic() + seconds
    while not what():
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < end
        time.sleep(pause)


def big_model():
    "160 MB."
    return nn.ParameterDict({f"w{i}": nn.Parameter(torch.full((1_000_000,), float(i))) for i in range(40)})


def test_killed_while_it_writes(tmp_path):
    "The process is killed in the middle of a checkpoint: the one before is there, whole, and the newest."
    child = script(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_runs import big_model, save_weights
        for update in range(1, 100): save_weights(big_model(), {str(tmp_path)!r}, update, max_to_keep=1)
    """)
    try:
        second = tmp_path/".0000002.part"
        wait_for(lambda: any(f.stat().st_size > 10**6 for f in second.glob("*.distcp")), child, pause=.001)
        child.kill()
        child.wait(10)
    finally: child.kill()
    assert second.exists() and latest(tmp_path).name == "0000001"
    model = load_weights(big_model().requires_grad_(False), latest(tmp_path))
    assert all(torch.equal(p, torch.full_like(p, int(k[1:]))) for k, p in model.items())
    save_weights(model, tmp_path, 2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["0000001", "0000002"]


def _save_twice(rank, n, folder, limit):
    "Save, and again while the files of one rank may not grow beyond `limit` bytes; what every rank is told."
    model = DefaultTrainer(recipe(folder), "tp2", report=lambda report: None).training.model
    save_weights(model, folder, 1)
    for p in model.parameters(): p.data.zero_()
    if rank == 1: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try: save_weights(model, folder, 2, max_to_keep=1)
    except OSError as e: return str(e)


def test_a_write_that_fails_half_way(tmp_path):
    "The system refuses one rank's file: every rank is told where and why, and the checkpoint before stays."
    for told in run_ranks(_save_twice, 2, tmp_path, 50_000, timeout=90):
        assert told.startswith(f"Checkpoint of update 2 could not be written to {tmp_path} (")
        assert "MB are free there; " in told and "earlier checkpoints are untouched" in told and "\n" not in told
    assert [p.name for p in checkpoints(tmp_path)] == ["0000001"] and not list(tmp_path.glob(".*"))
    model = DefaultTrainer(recipe(tmp_path), report=lambda report: None).training.model
    want = {k: t.clone() for k, t in model.state_dict().items()}
    for k, t in load_weights(model, latest(tmp_path)).state_dict().items(): assert torch.equal(t, want[k])


def _may_mount():
    "Whether this user may mount a file system of his own."
    if not shutil.which("unshare"): return False
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(mount, capture_output=True, timeout=20).returncode == 0


def test_a_full_disk(tmp_path):
    "A run on a disk of 1 MB fails with a sentence, and the checkpoints before it load."
    if not _may_mount(): pytest.skip("no file system can be mounted here")
    (tmp_path/"disk").mkdir()
    (tmp_path/"go.py").write_text(textwrap.dedent("""
        import json
        from libai_wb.engine.checkpoint import checkpoints
        from libai_wb.engine.default import train
        from libai_wb.engine.runs import Run
        keys = ["train.train_iter=40", "train.checkpointer.period=1", "train.checkpointer.max_to_keep=null",
                "train.evaluation.enabled=false"]
        try: train("vit_nano_digits", out="disk/run", overrides=keys, progress=False, timeout=90)
        except Exception as e: error = str(e)
        run = Run("disk/run")
        found, there = checkpoints("disk/run/checkpoints"), len(list((run.path/"checkpoints").iterdir()))
        run.model()
        print(json.dumps([error.splitlines()[0], run.summary["state"], len(run.metrics), len(found), there]))
    """))
    mounted = "mount -t tmpfs -o size=1m none disk && exec \"$0\" go.py"
    said = finish(["unshare", "-rm", "sh", "-c", mounted, sys.executable], tmp_path)
    error, state, updates, complete, there = json.loads(said.splitlines()[-1])
    assert "could not be written to disk/run/checkpoints (0 MB are free there" in error and error in state
    assert complete == there == updates - 1 > 0


def test_hooks_of_your_own(tmp_path):
    "R-76: a trainer derived from the default one, its hooks in order, and the way out after an error."
    log = []

    class Mine(DefaultTrainer):
        def build_hooks(self):
            def stop(t):
                if t.iter == 3: raise RuntimeError("enough")
            way_out = CallbackHook(after_step=stop, after_train=lambda t: log.append((t.iter, t.done)))
            return [*super().build_hooks(), way_out]

    trainer = Mine(recipe(tmp_path), report=Watch(progress=False))
    assert [type(h).__name__ for h in trainer.hooks] == [
        "MetricsHook", "CheckpointHook", "EvalHook", "ProgressHook", "DivergenceHook", "ProgressHook", "PulseHook",
        "CallbackHook"]
    with pytest.raises(RuntimeError, match="enough"): trainer.train()
    run = Run(trainer.folder)
    assert log == [(3, False)] and len(run.metrics) == 4 and run.summary["state"] == "failed: enough"
    assert not (run.path/"checkpoints").exists() and "Acc@1" not in run.metrics
