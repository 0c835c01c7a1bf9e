"""Detached runs outlive whoever started them, are found by their folder, and say how they ended."""
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from kernels import new_kernel, until

from libai_wb.cli import main
from libai_wb.engine import default
from libai_wb.engine.default import train
from libai_wb.engine.runs import Run
from libai_wb.engine.summary import write_summary
from libai_wb.engine.table import list_runs

pytestmark = pytest.mark.timeout(180)
NANO = "vit_nano_digits"
ENDLESS = ["train.train_iter=100000", "train.evaluation.enabled=false", "optim.lr=1e-5"]


def session(run):
    "The processes of a detached run."
    if not run.summary.get("detached"): return []
    sid, found = run.summary["process"]["pid"], []
    for p in psutil.process_iter(["status"]):
        try: mine = os.getsid(p.pid) == sid and p.info["status"] != psutil.STATUS_ZOMBIE
        except OSError: continue
        if mine: found.append(p)
    return found


@pytest.fixture(autouse=True)
def nothing_goes_on(tmp_path):
    "A test that fails leaves no run that goes on for ever, and a run that has ended is reaped by whoever started it."
    yield
    for path in tmp_path.rglob("summary.json"):
        for p in session(Run(path.parent)): p.kill()
    def zombies():
        return [p for p in psutil.process_iter(["status", "ppid"])
                if p.info["ppid"] == os.getpid() and p.info["status"] == psutil.STATUS_ZOMBIE]
    until(lambda: not zombies(), 5)


@pytest.fixture
def command(tmp_path):
    "The console script, in a folder of the test."
    def call(*words, code=0):
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([Path(sys.executable).with_name("libai-wb"), *map(str, words)], cwd=tmp_path,
                              capture_output=True, text=True, timeout=120, env=env)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr
    return call


def test_a_run_outlives_the_kernel_that_started_it(tmp_path):
    "Its model was written in a cell; the kernel and its process group are killed while the ranks train."
    with new_kernel(tmp_path) as kernel:
        kernel.ok("from torch import nn\nfrom libai_wb import load_recipe, train\nfrom libai_wb.config import LazyCall\n"
                  "class Flat(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
                  "        self.head = nn.Linear(64, 10)\n"
                  "    def forward(self, images): return self.head(images.flatten(1))\n"
                  "cfg = load_recipe('vit_nano_digits', ['train.train_iter=1000'])\ncfg.model = LazyCall(Flat)()\n"
                  "run = train(cfg, 'dp2', detach=True)")
        run = Run(tmp_path/"outputs"/"Flat-dp2")
        until(lambda: run.state == "running", 60)
        os.killpg(os.getpgid(kernel.pid), signal.SIGKILL)
        assert run.state == "running"
    assert run.wait(timeout=60, progress=False).state == "finished" and len(run.metrics) == 1000
    assert type(run.model()).__name__ == "Flat"
    until(lambda: session(run) == [], 10)


@pytest.mark.full
def test_a_run_outlives_the_login_shell(tmp_path):
    "The terminal hangs up, which ends what a shell has started."
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        libai = str(Path(sys.executable).with_name("libai-wb"))
        os.execlp("bash", "bash", "-c", f"'{libai}' train {NANO} --detach --out run train.train_iter=60 > said; sleep 60")
    try:
        until(lambda: (tmp_path/"run"/"metrics.jsonl").exists() and Run(tmp_path/"run").summary.get("process"), 60)
    finally:
        os.close(terminal)  # the hang-up
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    run = Run(tmp_path/"run").wait(timeout=60, progress=False)
    assert run.state == "finished" and run.summary["updates"] == 60 == run.summary["total"]
    assert "goes on by itself in process" in (tmp_path/"said").read_text()


def test_ps_is_right_after_every_end(tmp_path, command):
    "Finished, failed, killed and stopped, from other processes than those that started the runs."
    def start(name, layout, *more): return train(NANO, layout, tmp_path/name, [*ENDLESS, *more], progress=False, detach=True)
    stopped, killed = start("stopped", "1"), start("killed", "dp2")
    finished = start("finished", "1", "train.train_iter=4")
    failed = train("vit_micro_fashion_mnist", "1", tmp_path/"failed", ["+dataloader.train.dataset.root=/nowhere"],
                   progress=False, detach=True)  # which only the run can see
    until(lambda: stopped.state == killed.state == "running", 60)
    assert command("ps", ".").count("running") >= 2
    os.kill(killed.summary["process"]["pid"], signal.SIGKILL)
    assert killed.wait(20, progress=False).state == "killed"
    assert "stopped, " in command("stop", "stopped") and session(stopped) == []
    until(lambda: session(killed) == [], 10)
    for run in (failed, finished): run.wait(60, progress=False)
    table = list_runs(tmp_path)
    states = {Path(path).name: row.state for path, row in table.iterrows()}
    assert states == {name: name for name in ("finished", "failed", "killed", "stopped")}
    assert "/nowhere" in table.loc[str(failed.path), "error"] and "/nowhere" in failed.tail(1)[0] and table.loc[str(killed.path), "updates"] > 0
    listed = command("ps", ".")
    assert all(f" {name} " in listed for name in states) and "4/4" in listed and "/nowhere" in listed
    assert "is not running, it is killed" in command("stop", "killed", code=2)
    assert "update 4 of 4" in command("tail", "finished")
    with pytest.raises(ValueError, match="holds a run already"): train(NANO, out=finished.path, detach=True)


def test_a_mistake_is_told_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="Global batch 64 is not"): train(NANO, "dp3", tmp_path/"a", detach=True)
    assert list(tmp_path.iterdir()) == []


def test_ps_shows_all_runs_whatever_one_of_them_looks_like(tmp_path, capsys):
    "No process is named, settings are called as columns are, and one summary is empty."
    for name in ("first", "second", "empty"):
        (tmp_path/name).mkdir()
        (tmp_path/name/"config.yaml").write_text(f"device: {name}\nrun: {name}\n")
        (tmp_path/name/"metrics.jsonl").write_text('{"step": 0, "loss": 0.5}\n')
        end = dict(state="finished", started="2026-01-01T00:00:00+00:00", updates=1, loss=.5, metrics={})
        (tmp_path/name/"summary.json").write_text(json.dumps(end) * (name != "empty"))
    assert main(["ps", str(tmp_path), "--json", str(tmp_path/"runs.json")]) in (0, None)
    said, damaged = capsys.readouterr().out, tmp_path/"empty"
    assert said.count("finished") == 2 and f"{damaged} unreadable: {damaged}/summary.json is not the summary" in said
    rows = json.loads((tmp_path/"runs.json").read_text())
    assert sorted(row["config.device"] for row in rows) == ["empty", "first", "second"]
    assert sorted(row["run"] for row in rows) == sorted(str(tmp_path/row["config.run"]) for row in rows)
    (damaged/"summary.json").write_text(json.dumps(end))


def test_the_folder_in_the_hint_is_quoted(tmp_path, monkeypatch, capsys):
    start = lambda folder, *rest, **facts: write_summary(folder, state="starting", started="", process=dict(pid=7))
    monkeypatch.setattr(default, "launch", start)
    train(NANO, "1", tmp_path/"my runs", progress=False, detach=True)
    assert f"`libai-wb stop '{tmp_path}/my runs'` ends it" in capsys.readouterr().out
