"""What a run is doing, seen from outside: made-up folders, a real run on two ranks, a terminal, a kernel, papermill."""
import builtins
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from kernels import new_kernel, until
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook
from papermill import execute_notebook
from test_detached import ENDLESS, NANO, nothing_goes_on, session  # noqa: F401

from libai_wb import watch
from libai_wb.engine.default import train
from libai_wb.engine.events import MetricsWriter
from libai_wb.engine.runs import Run
from libai_wb.engine.status import read_pulses, run_status
from libai_wb.engine.summary import recorded, this_process, write_summary

pytestmark = pytest.mark.timeout(180)
LIBAI = str(Path(sys.executable).with_name("libai-wb"))
ENV = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


def toy(folder, updates=4, error=None):
    "A run folder that no training has made."
    folder.mkdir()
    (folder/"config.yaml").write_text("a: 1\n")
    try:
        with recorded(folder, layout="1", world=1, device="cpu", total=updates):
            writer = MetricsWriter(folder/"metrics.jsonl")
            for i in range(updates):
                writer.write(step=i, loss=2. / (i + 1), lr=.1, samples=64. * (i + 1), seconds=i / 8)
            writer.close()
            if error: raise error
    except ValueError: pass
    return folder


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    "Two detached runs, one on two ranks, that go on until somebody ends them; started together, which takes less time."
    folder = tmp_path_factory.mktemp("runs")
    runs = [train(NANO, layout, folder/layout, ENDLESS, progress=False, detach=True) for layout in ("1", "dp2")]
    yield runs
    for run in runs:
        for p in session(run): p.kill()


def trains(run):
    "Wait until all ranks train."
    until(lambda: run_status(run).done > 3 and len(read_pulses(run.path)) == run.summary["world"], 60)
    return run


def on_terminal(*words, until_text=None, interrupt=False, columns=100):
    "Run the command on a terminal of its own; what it has written and its exit code."
    pid, terminal = pty.fork()
    if pid == 0: os.execvpe(LIBAI, [LIBAI, *map(str, words)], ENV | dict(COLUMNS=str(columns), LINES="40"))
    seen, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        if not select.select([terminal], [], [], .5)[0]: continue
        try: part = os.read(terminal, 65536)
        except OSError: break  # the other side is closed
        seen += part
        if interrupt and until_text.encode() in seen:
            os.write(terminal, b"\x03")
            interrupt = False
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    return seen.decode(), code


def piped(*words):
    "Start the command with its output in a pipe."
    return subprocess.Popen([LIBAI, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=ENV)


def test_looking_at_runs_needs_no_torch(tmp_path):
    "These commands are typed often, and torch alone takes seconds to start."
    toy(tmp_path/"good"), toy(tmp_path/"bad", error=ValueError("no fifth update"))
    code = ("import json, sys\nfrom libai_wb.cli import main\n"
            "codes = [main(words) for words in json.loads(sys.argv[1])]\n"
            "print(json.dumps([codes, sorted({'torch', 'timm', 'ipywidgets', 'matplotlib'} & {*sys.modules})]))")
    calls = [["ps", "."], ["tail", "good"], ["watch", "good"], ["watch", "--once", "bad"], ["stop", "good"],
             ["watch", "no"]]
    done = subprocess.run([sys.executable, "-c", code, json.dumps(calls)], cwd=tmp_path, env=ENV, timeout=60,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    assert json.loads(last) == [[0, 0, 0, 1, 2, 2], []]
    assert any("bad failed: no fifth update" in line for line in said)
    assert done.stderr.splitlines() == ["libai-wb: good is not running, it is finished.",
        "libai-wb: no does not exist and is no run; give the folder that train(...) reported, for example "
        "outputs/vit_nano_digits-1."]


def test_a_run_is_watched_on_a_terminal_and_in_a_pipe(tmp_path):
    "Both see it move, and both end with it; the terminal redraws in place."
    run = train(NANO, "dp2", tmp_path/"run", ["train.train_iter=60"], progress=False, detach=True)
    pipe = piped("watch", run.path, "--every", .2)
    seen, code = on_terminal("watch", run.path, "--every", .2)
    said = pipe.communicate(timeout=60)[0].splitlines()
    assert run.wait(20, progress=False).state == "finished"
    panels = [re.sub(r"\x1b\[\d+A$", "", panel.rstrip()) for panel in seen.replace("\r", "").split("\x1b[J")[1:]]
    assert code == pipe.returncode == 0 and len(panels) > 2
    first, last = panels[0].splitlines(), panels[-1].splitlines()
    assert "starting for" in first[1] and "layout dp2 on cpu, detached" in first[1]
    assert "finished after" in last[1] and "60 of 60 updates, 100 %" in last[2] and "Acc@1" in panels[-1]
    assert re.search(r"throughput +[\d,]+ samples/s", panels[-1])
    ups = [int(n) for n in re.findall(r"\x1b\[(\d+)A", seen)]
    heights = [len(panel.splitlines()) for panel in panels]
    assert ups == heights[:-1] and all(len(line) < 100 for panel in panels for line in panel.splitlines())
    ranks = [line.split()[:3] for line in last if re.match(r"[01] ", line)]
    assert ranks == [["0", "done", "60"], ["1", "done", "60"]]
    assert len(said) > 1 and all("\x1b" not in line for line in said)
    assert re.match(r"\d\d:\d\d:\d\d starting, 0 updates", said[0])
    assert "finished, 60 of 60 updates, 100 %, loss" in said[-1]
    times = [p["time"] for p in read_pulses(run.path).values()]
    assert max(times) - min(times) < 5 and not list((run.path/"log").glob("*.part"))


def test_a_rank_that_is_killed_is_named(endless):
    run = trains(endless[1])
    pipe = piped("watch", run.path, "--every", .1)
    os.kill(read_pulses(run.path)[1]["pid"], signal.SIGKILL)
    said = pipe.communicate(timeout=60)[0].splitlines()
    assert pipe.returncode == 1 and "failed, " in said[-1] and "Rank 1 of 2 was ended by SIGKILL" in said[-1]
    assert run_status(run).ranks[1].state == "gone"
    until(lambda: session(run) == [], 10)


def test_ctrl_c_leaves_the_run_alone_and_the_button_ends_it(endless):
    run = trains(endless[0])
    seen, code = on_terminal("watch", run.path, until_text="samples/s", interrupt=True)
    assert code == 130 and "The run goes on" in seen and "Traceback" not in seen and run.state == "running"
    status = run_status(run)
    assert [r.state for r in status.ranks] == ["running"] and status.eta > 0 and status.rate > 0
    for r in status.ranks:
        assert 0 < r.resident < psutil.virtual_memory().total and r.pid in {p.pid for p in session(run)}
    pipe, board = piped("watch", run.path), watch(run, every=.1)
    board._repr_mimebundle_()
    head = board.panel.parts["head"]
    first = head.value
    until(lambda: head.value != first, 20)
    board.panel.press()
    assert board.panel.button.description == "Press again to stop the run" and run.state == "running"
    time.sleep(.4)
    board.panel.press()
    until(lambda: "the run is stopped" in board.panel.message.value, 30)
    board.thread.join(10)
    assert not board.thread.is_alive() and "stopped after" in head.value and board.panel.button.disabled
    said = pipe.communicate(timeout=30)[0]
    assert pipe.returncode == 1 and "stopped, " in said.splitlines()[-1]
    until(lambda: session(run) == [], 10)
    board.close()


def test_training_goes_on_where_no_sign_of_life_can_be_left(tmp_path):
    "As on a full disk: every attempt to write the file fails."
    (tmp_path/"run"/"log"/"rank0.json").mkdir(parents=True)
    run = train(NANO, out=tmp_path/"run", overrides=["train.train_iter=3"], progress=False)
    assert run.state == "finished" and run_status(run).ranks[0].state == "unknown" and len(run.metrics) == 3


def test_a_folder_of_an_older_run(tmp_path):
    "No process, no world, no total, no log: what there is, is shown."
    path = toy(tmp_path/"old")
    kept = ("state", "started", "seconds", "updates", "loss", "metrics")
    summary = {k: v for k, v in json.loads((path/"summary.json").read_text()).items() if k in kept}
    (path/"summary.json").write_text(json.dumps(summary))
    status = run_status(path)
    assert (status.state, status.done, status.total, status.eta, status.lines) == ("finished", 4, None, None, [])
    assert [r.state for r in status.ranks] == ["unknown"]
    text = repr(watch(path))
    assert "finished after" in text and "loss           0.5" in text and "None" not in text
    assert "4 updates" in watch(path)._repr_html_() and "None" not in watch(path)._repr_html_()


def test_without_widgets_a_table_remains(tmp_path, monkeypatch):
    real = builtins.__import__
    def refuse(name, *args, **kw):
        if name.partition(".")[0] == "ipywidgets": raise ImportError(name)
        return real(name, *args, **kw)
    monkeypatch.setattr(builtins, "__import__", refuse)
    write_summary(toy(tmp_path/"run"), state="running", process=this_process())
    bundle = watch(tmp_path/"run")._repr_mimebundle_()
    assert sorted(bundle) == ["text/html", "text/plain"] and "4 of 4 updates, 100 %" in bundle["text/html"]
    assert "<svg" in bundle["text/html"] and "512 samples/s" in bundle["text/html"]


def messages_of_a_cell(client, code, meanwhile=lambda: None):
    "What the kernel sends until a cell is done."
    cell, found = client.execute(code), []
    meanwhile()
    while True:
        message = client.get_iopub_msg(timeout=30)
        found.append(message)
        ours = message["parent_header"].get("msg_id") == cell
        if ours and message["msg_type"] == "status" and message["content"]["execution_state"] == "idle": return found


def press(client, comm):
    "What JupyterLab sends when somebody presses a button: a message for a thread that the kernel keeps for widgets."
    client.control_channel.send(client.session.msg("create_subshell_request"))
    message = client.session.msg("comm_msg", dict(comm_id=comm, data=dict(method="custom", content=dict(event="click"))))
    message["header"]["subshell_id"] = client.get_control_msg(timeout=10)["content"]["subshell_id"]
    client.shell_channel.send(message)


def test_it_moves_and_hears_while_a_cell_computes(tmp_path):
    "The thread of the dashboard sends what has changed to the browser; it ends with the run and nothing is raised."
    path = toy(tmp_path/"run")
    summary = json.loads((path/"summary.json").read_text())
    with new_kernel(tmp_path) as kernel:
        who = json.loads(kernel.ok("import json\nfrom libai_wb.engine.summary import this_process\n"
                                   "print(json.dumps(this_process()))").text)
        (path/"summary.json").write_text(json.dumps(summary | dict(state="running", process=who, total=99)))
        kernel.ok("import sys, threading, time\nfrom libai_wb import watch\nboard = watch('run', every=.2)\nboard")
        assert kernel.ok("print('torch' in sys.modules)").text.strip() == "False"
        writing = ("import pathlib\nfor i in range(4, 9):\n    time.sleep(.3)\n"
                   "    with open('run/metrics.jsonl', 'a') as f: f.write(json.dumps(dict(step=i, loss=1.)) + chr(10))")
        button = kernel.ok("print(board.panel.button.comm.comm_id)").text.strip()
        sent = messages_of_a_cell(kernel.client, writing, lambda: press(kernel.client, button))
        states = [m["content"]["data"]["state"] for m in sent if m["msg_type"] == "comm_msg" and "state" in m["content"]["data"]]
        assert [n for n in range(5, 9) if any(f"{n} of 99 updates" in state.get("value", "") for state in states)]
        assert any(state.get("description") == "Press again to stop the run" for state in states)
        (path/"summary.json").write_text(json.dumps(summary))
        kernel.ok("board.thread.join(10)")
        assert kernel.ok("print(board.thread.is_alive(), '✔' in board.panel.parts['head'].value)").text == "False True\n"
        assert kernel.run("board.close()").text == ""


def test_it_remains_after_papermill_and_in_html(tmp_path):
    toy(tmp_path/"run")
    cells = ["from libai_wb import watch", f"watch({str(tmp_path/'run')!r})"]
    nbformat.write(new_notebook(cells=[new_code_cell(c) for c in cells]), tmp_path/"in.ipynb")
    execute_notebook(tmp_path/"in.ipynb", tmp_path/"out.ipynb", kernel_name="python3", language="python",
                     progress_bar=False)
    data = nbformat.read(tmp_path/"out.ipynb", 4).cells[-1].outputs[0].data
    assert "4 of 4 updates, 100 %" in data["text/html"] and "512 samples/s" in data["text/plain"]
    page = HTMLExporter().from_filename(tmp_path/"out.ipynb")[0]
    assert "4 of 4 updates, 100 %" in page and 'role="progressbar"' in page
