"""Sweeps: what runs at once, how they end and go on, and what their tables say.

Most notebooks here import no torch. Processes are found as descendants of the one that sweeps.
"""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from kernels import LOAD, nothing_left, until, words_of  # noqa: F401
from nbformat.v4 import new_code_cell, new_notebook

import libai_wb.notebook.capacity as capacity
from libai_wb.cli import main
from libai_wb.notebook import LossAlign
from libai_wb.notebook.ledger import Ledger
from libai_wb.notebook.sweeping import Sweep, sweep

pytestmark = pytest.mark.timeout(120)
EXPERIMENT = Path(__file__).parents[1]/"experiments"/"swin.ipynb"


def write_notebook(path, *cells, parameters='layout = "1"\nseed = 0'):
    cells = [new_code_cell(parameters, metadata=dict(tags=["parameters"])), *map(new_code_cell, cells)]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def command(notebook, *words, **options):
    "`libai-wb sweep` in a process of its own."
    line = [sys.executable, "-m", "libai_wb.cli", "sweep", str(notebook), *map(str, words)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def said(process, code):
    "What it has printed, and that it ended with this exit code."
    try: text = process.communicate(timeout=180)[0]
    finally: process.kill()
    assert process.returncode == code, text
    return text


def family(process): return psutil.Process(process.pid).children(recursive=True)


def all_gone(processes, seconds=5):
    "Whether all have ended; some are nobody's children any more."
    end = time.monotonic() + seconds
    living = lambda: [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    while living() and time.monotonic() < end: time.sleep(.05)
    return [words_of(p) for p in living()] == []


# What runs at once

TIMES = ("import json, time\nbegan = time.time(); time.sleep(1.5)\n"
         "open('times', 'w').write(json.dumps([began, time.time()]))")


def spans(folder):
    "(began, ended, ranks) of each point, by its own clock."
    points = Ledger(folder).points
    return [(*json.loads((folder/name/"times").read_text()), p["ranks"]) for name, p in points.items()]


def test_never_more_ranks_than_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(capacity, "usable_cores", lambda: 2)
    notebook = write_notebook(tmp_path/"a.ipynb", TIMES)
    result = sweep(notebook, dict(layout=["1", "dp2", "dp1"]), out=tmp_path/"out", progress=False)
    found = spans(tmp_path/"out")
    assert sorted(ranks for *_, ranks in found) == [1, 1, 2] and not result.failed
    at_once = [sum(ranks for began, ended, ranks in found if began <= moment < ended) for moment, *_ in found]
    assert max(at_once) == 2
    alone = sorted(span for *span, ranks in found if ranks == 1)
    assert alone[1][0] < alone[0][1]  # two of one rank have run side by side


def test_a_point_that_is_too_large_runs_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(capacity, "usable_cores", lambda: 1)
    notebook = write_notebook(tmp_path/"a.ipynb", "import os; print('threads', os.environ['OMP_NUM_THREADS'])")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    result = sweep(notebook, dict(layout=["dp2"]), out=tmp_path/"out", progress=False)
    assert result.states == {"layout=dp2": "finished"}
    assert "warning: layout=dp2 has 2 ranks and there is 1 usable core; it runs alone." in capsys.readouterr().out
    assert "threads 1" in (tmp_path/"out"/"layout=dp2.ipynb").read_text()


def test_each_point_has_gpus_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    work = f"{TIMES}\nimport os\nopen('gpu', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    notebook = write_notebook(tmp_path/"a.ipynb", work)
    sweep(notebook, dict(seed=[0, 1]), out=tmp_path/"out", progress=False)
    assert sorted((tmp_path/"out"/f"seed={i}"/"gpu").read_text() for i in (0, 1)) == ["4", "7"]


# Failures

def test_a_failure_is_told_while_others_go_on(tmp_path):
    "An error and a kernel that is killed; the exit code says so, and both are tried again."
    work = ("import os, signal\nif os.path.exists('../../mended'): seed = 9\nif seed == 0: raise ValueError('boom\\nmore')\n"
            "if seed == 1: os.kill(os.getpid(), signal.SIGKILL)")
    notebook, out = write_notebook(tmp_path/"a.ipynb", work), tmp_path/"out"
    words = ["--grid", "seed=0,1,2", "--out", out, "--json", tmp_path/"t.json"]
    text = said(command(notebook, *words), 1)
    assert "seed=0 failed: cell 3: ValueError: boom\n" in text and "1 finished, 2 failed" in text
    assert "seed=1 failed: nbclient.exceptions.DeadKernelError: Kernel died" in text
    rows = json.loads((tmp_path/"t.json").read_text())
    assert [(r["seed"], r["state"]) for r in rows] == [(0, "failed"), (1, "failed"), (2, "finished")]
    (tmp_path/"mended").touch()
    text = said(command(notebook, *words), 0)
    assert "1 of 3 points had finished already" in text and "3 points in" in text and "3 finished" in text


@pytest.mark.full
def test_time_limit(tmp_path):
    notebook, began = write_notebook(tmp_path/"a.ipynb", "import time\ntime.sleep(60)"), time.monotonic()
    result = sweep(notebook, dict(seed=[0]), out=tmp_path/"out", timeout=3, progress=False)
    assert result.table().error.tolist() == ["took longer than 3 s and was ended"]
    assert result.failed == ["seed=0"] and time.monotonic() - began < 30


# Endings

WAIT = "import os, time\nopen('began', 'w').write(str(os.getpid()))\n"


@pytest.mark.full
def test_kill_and_resume(tmp_path):
    "kill -9 of the sweep takes its kernels along; the same command then runs what is missing, and that only."
    stays = f"{WAIT}while seed == 1 and not os.path.exists('../../go'): time.sleep(.1)"
    notebook, out = write_notebook(tmp_path/"a.ipynb", stays), tmp_path/"out"
    words = ["--grid", "seed=0,1,2", "--out", out, "--jobs", 1]
    process = command(notebook, *words)
    until(lambda: (out/"seed=1"/"began").exists())
    there, first = family(process), (out/"seed=0.ipynb").read_bytes()
    assert len(there) >= 2
    with pytest.raises(ValueError, match=f"is being swept by process {process.pid} on .*; wait for it"):
        sweep(notebook, dict(seed=[3]), out=out)
    process.kill()
    process.communicate(timeout=10)
    assert all_gone(there)
    assert Sweep(out).states == {"seed=0": "finished", "seed=1": "interrupted", "seed=2": "not started"}
    (tmp_path/"go").touch()
    text = said(command(notebook, *words), 0)
    assert "1 of 3 points had finished already" in text and (out/"seed=0.ipynb").read_bytes() == first
    assert set(Sweep(out).states.values()) == {"finished"}


def test_interrupt_ends_kernels_and_their_ranks(tmp_path):
    ready = "%%distributed -n 2\nimport time\nopen(f'ready{rank}', 'w').close()\ntime.sleep(60)"
    notebook, out = write_notebook(tmp_path/"a.ipynb", LOAD, ready), tmp_path/"out"
    process = command(notebook, "--grid", "seed=0,1", "--ranks", 2, "--out", out)
    until(lambda: len(list((out/"seed=0").glob("ready*"))) == 2)
    there = family(process)
    assert sum("serve_rank" in words_of(p) for p in there) == 2
    process.send_signal(signal.SIGINT)
    assert "the same command goes on where it stopped" in said(process, 130)
    assert all_gone(there, 1)
    assert Sweep(out).states == {"seed=0": "interrupted", "seed=1": "not started"}
    assert not list(out.glob("*.part")) and "KeyboardInterrupt" in (out/"seed=0.ipynb").read_text()


def test_a_full_disk_ends_the_points_and_keeps_the_ledger(tmp_path, monkeypatch):
    notebook, out, kept = write_notebook(tmp_path/"a.ipynb", f"{WAIT}time.sleep(60 * seed)"), tmp_path/"out", Path.write_text
    def full(path, text, *rest):
        if path.suffix == ".part" and '"finished"' in text: raise OSError(28, "No space left on device")
        return kept(path, text, *rest)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"sweep.json cannot be written \(No space left on device\); make room") as e:
        sweep(notebook, dict(seed=[0, 1]), out=out, jobs=2, ranks=1, progress=False)
    assert "\n" not in str(e.value) and not list(out.glob("*.part"))
    assert set(Sweep(out).states) == {"seed=0", "seed=1"} and "finished" not in Sweep(out).states.values()
    kernel = out/"seed=1"/"began"
    assert not kernel.exists() or not psutil.pid_exists(int(kernel.read_text()))


# Mistakes, changes

@pytest.mark.parametrize("words, sentence", [
    (["--grid", "layuot=dp2"], "a.ipynb has no parameter 'layuot', did you mean 'layout'? It has layout, seed."),
    (["--grid", "seed"], "--grid 'seed' is not understood; write NAME=VALUE,VALUE"),
    (["--grid", "seed=1", "-p", "seed", "2"], "Parameter 'seed' is in the grid and fixed as well"),
    (["--grid", "seed=1", "--out", "/proc/here"], "/proc/here cannot be used (")])
def test_mistakes_are_one_sentence_and_start_nothing(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", str(write_notebook(tmp_path/"a.ipynb", "1")), *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.ipynb"]


def test_a_changed_notebook_needs_again(tmp_path):
    "Names with braces are no templates; a module beside the notebook can be imported."
    (tmp_path/"beside.py").write_text("answer = 42")
    notebook = write_notebook(tmp_path/"{a}.ipynb", "import beside\nprint('old', beside.answer)")
    out, grid = tmp_path/"{out}", dict(seed=[0])
    sweep(notebook, grid, out=out, progress=False)
    assert "old 42" in (out/"seed=0.ipynb").read_text()
    write_notebook(notebook, "print('new')")
    with pytest.raises(ValueError, match="The code of the notebook changed since 1 of 1 points"):
        sweep(notebook, grid, out=out, progress=False)
    (out/"seed=0"/"left").touch()
    sweep(notebook, grid, out=out, again=True, progress=False)
    assert "new" in (out/"seed=0.ipynb").read_text() and not (out/"seed=0"/"left").exists()


# Tables

def made_up(folder, points):
    "A sweep whose points have finished, each with a run of its own that has recorded a loss of .5."
    ledger = Ledger(folder)
    for name, parameters in points.items():
        run = folder/name/"run"
        run.mkdir(parents=True)
        (run/"config.yaml").touch()
        (run/"metrics.jsonl").write_text('{"step": 0, "loss": 0.5}\n')
        close = dict(started="2026-01-01T00:00:00+00:00", updates=1, loss=.5, metrics={})
        (run/"summary.json").write_text(json.dumps(dict(state="finished", **close)))
        ledger.points[name] = dict(state="finished", seconds=2., parameters=parameters)
    ledger.save()
    return Sweep(folder)


def test_a_parameter_may_have_the_name_of_a_column(tmp_path):
    "What was set and what was recorded are both there, also if a point of another grid has no such parameter."
    names = ("loss", "updates", "state", "seconds", "error", "notebook", "point")
    result = made_up(tmp_path/"out", {"a": {name: f"my {name}" for name in names}, "b": dict(seed=3)})
    table = result.table()
    assert table.loc["a", list(names)].tolist() == [f"my {name}" for name in names]
    assert table.loc["b", list(names)].isna().all() and table.loc["b", "seed"] == 3
    for name, want in dict(loss=.5, updates=1, state="finished", seconds=2., error="").items():
        assert table[f"run/{name}"].tolist() == [want, want]
    assert list(table.columns[-2:]) == ["run/error", "run/notebook"]
    assert table.reset_index()["run/point"].tolist() == ["a", "b"]
    for text in (repr(result), result._repr_html_()):
        assert all(f"my {name}" in text for name in names) and "run/error" not in text and "2 finished" in text


def test_an_ordinary_table_has_ordinary_names(tmp_path):
    table = made_up(tmp_path/"out", {"seed=0": dict(seed=0)}).table()
    assert table.index.name == "point" and table.loc["seed=0", "loss"] == .5
    assert list(table.columns) == ["seed", "state", "seconds", "updates", "loss", "error", "notebook"]


# Runs

@pytest.mark.full
@pytest.mark.timeout(200)
def test_layouts_of_a_recipe(tmp_path):
    "The experiment, from the shell: the same losses in both layouts, in one table and one plot."
    out = tmp_path/"out"
    said(command(EXPERIMENT, "--grid", "layout=1,tp2", "-p", "steps", 3, "--out", out, cwd=tmp_path), 0)
    result = Sweep(out)
    table = result.table()
    assert list(table.index) == ["layout=1", "layout=tp2"] and set(table.state) == {"finished"}
    assert {"updates", "loss", "Acc@1"} <= set(table.columns) and (table.updates == 3).all()
    assert table.loss.iloc[0] == pytest.approx(table.loss.iloc[1], rel=1e-4)
    align = result.plot(follow=0)
    assert isinstance(align, LossAlign) and list(align.curves.sources) == ["layout=1", "layout=tp2"]
    assert all(gap.difference.max() < 1e-4 for gap in align.curves.differences().values())
    assert all(os.path.exists(p) for p in table.notebook) and "Acc@1" in repr(result)
