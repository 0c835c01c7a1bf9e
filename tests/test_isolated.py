"""`%%distributed --isolated`: a cell as a script under torchrun, what its ranks report, and that nothing is left.

Two ranks, gloo on the loopback device. A run takes seconds, since three processes import torch, so the tests are few.
"""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from kernels import words_of

from libai_wb.mesh.topology import ParallelLayout
from libai_wb.notebook.isolated import run_isolated
from libai_wb.notebook.results import as_error
from libai_wb.notebook.values import write_values

pytestmark = pytest.mark.timeout(120)
DP2 = ParallelLayout(dp=2)
LOADER = """
import torch, torch.distributed as dist, os, sys, time, signal
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, i): return i * scale
scale = 2
def rows(method, n=2):
    return torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=n, multiprocessing_context=method)
"""


def plain(text): return re.sub(r"\x1b\[[0-9;]*m", "", text)


def sessions(): return set(Path(tempfile.gettempdir()).glob("libai-wb-ranks-*"))


def processes(folder):
    "Processes that belong to a session folder, in whatever session or group they are."
    found = []
    for p in psutil.process_iter():
        try: mine = p.environ().get("LIBAI_WB_SESSION") == str(folder) or str(folder) in p.cmdline()
        except psutil.Error: continue
        if mine and p.status() != psutil.STATUS_ZOMBIE: found.append(p)
    return found


class Seen(list):
    "Events and when they came; notes the session folder, and calls `then` once when the text `sign` comes."
    def __init__(self, sign="", then=None):
        self.sign, self.then, self.times, self.before = sign, then, [], sessions()

    def __call__(self, event):
        self.append(event)
        self.times.append(time.monotonic())
        said = "".join(e.content.get("text", "") for e in self if e.rank == event.rank) # a line can come in pieces
        if self.then and self.sign in said:
            self.folders, then, self.then = sessions() - self.before, self.then, None
            then()


@pytest.fixture(autouse=True)
def nothing_left():
    "After a test there is no session folder and no process of one that was not there before."
    before = sessions()
    yield
    mine = [f for f in sessions() - before if json.loads((f/"state.json").read_text())["owner"] == os.getpid()]
    assert mine == []
    below = psutil.Process().children(recursive=True)
    assert [p for p in below if "notebook.script" in words_of(p)] == []


def test_a_script_with_loaders_values_and_much_output(tmp_path):
    path = write_values(dict(lr=.5), tmp_path)
    sockets, folders = set(), set()

    def look():
        folders.update(f for f in seen.folders if processes(f))
        for p in (p for f in folders for p in processes(f)):
            links = [c for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN or not c.raddr]
            sockets.update((c.laddr.ip if c.laddr else "", "RANK" in p.environ()) for c in links)

    seen = Seen("look now", look)
    results = run_isolated(LOADER + """
import inspect, pickle
print("look now", file=sys.stderr)
time.sleep(1)
t = torch.tensor(rank + lr); dist.all_reduce(t)
pickle.loads(pickle.dumps(Rows()))
assert __name__ == "__main__" and "i * scale" in inspect.getsource(Rows.__getitem__)
assert (world_size, str(device), mesh["dp"].size(), "x" in globals()) == (2, "cpu", 2, False)
if rank == 0: total = [int(sum(b.sum() for b in rows(method, 1))) for method in ("forkserver",)]
else: total = []
for i in range(20_000): print("line", i)
(t.item(), total)
""", DP2, seen, values=path)
    assert [r.status for r in results] == ["ok", "ok"], as_error(results)
    assert [r.value for r in results] == ["(2.0, [159600])", "(2.0, [])"]
    lines = "".join(f"line {i}\n" for i in range(20_000))
    for r in (0, 1):
        mine = [e for e in seen if e.rank == r]
        text = {k: "".join(e.content["text"] for e in mine if e.content.get("name") == k) for k in ("stdout", "stderr")}
        assert text == dict(stdout=lines, stderr="look now\n")
        assert (mine[-1].kind, mine[-1].content["data"]["text/plain"]) == ("execute_result", results[r].value)
    assert seen.times[-1] - seen.times[0] > 1  # the first output did not wait for the end
    assert sockets and sockets <= {("127.0.0.1", True), ("::1", True)}  # none of torchrun, none to the outside


def test_a_failing_rank_is_named_and_ends_the_others_and_their_workers():
    seen = Seen("failing", lambda: None)
    results = run_isolated(LOADER + """
loader = iter(rows("fork"))
print("rank", rank, "has", len(next(loader)))
if rank == 1:
    print("failing")
    raise ValueError("boom on one")
dist.barrier()
""", DP2, seen)
    assert time.monotonic() - seen.times[-1] < 5
    assert [(r.status, r.ename, r.evalue) for r in results][1] == ("error", "ValueError", "boom on one")
    lines = as_error(results).lines
    trace = plain("\n".join(lines))
    assert lines[0] == "rank 1: ValueError: boom on one; its traceback:"
    assert lines[-1] in ("rank 0: was stopped", "rank 0: was waiting for another rank and was released")
    assert "Cell, line 14" in trace and "---> 14     raise ValueError" in trace
    assert "notebook/script.py" not in trace and "torchrun" not in trace + "".join(r.text for r in results)


def test_a_killed_rank_loses_no_output():
    results = run_isolated("import os, signal, torch.distributed as dist\nprint('whole'); print('half', end='')\n"
                           "if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()", DP2)
    assert (results[0].status, results[0].evalue) == ("died", "died (SIGKILL, maybe out of memory)")
    assert results[0].text == "whole\nhalf" and results[0].traceback == ["whole", "half"]
    assert as_error(results).lines[0] == "rank 0: died (SIGKILL, maybe out of memory); its last output:"


def test_a_time_limit_also_ends_a_rank_that_hears_no_signal():
    seen = Seen()
    results = run_isolated("import signal, time\nprint('here')\nsignals = [signal.SIGINT, signal.SIGTERM]\n"
                           "if rank: signal.pthread_sigmask(signal.SIG_BLOCK, signals)\ntime.sleep(60)", DP2, seen,
                           timeout=.5)
    assert time.monotonic() - seen.times[0] < 9
    assert [(r.status, r.evalue, r.text) for r in results] == [("stopped", "was stopped after 0.5 s", "here\n")] * 2


def test_an_interrupt_lets_ranks_tidy_up(tmp_path):
    seen = Seen("1 sleeps", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="rank 0: was stopped; rank 1: was stopped"):
        run_isolated("import time, torch.distributed as dist\ntry:\n    dist.barrier()\n"
                     "    print(rank, 'sleeps')\n    time.sleep(60)\n"
                     f"finally: time.sleep(.5); open(f'{tmp_path}/tidy{{rank}}', 'w').close()", DP2, seen)
    assert time.monotonic() - seen.times[-1] < 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tidy0", "tidy1"]


def test_an_interrupt_while_torchrun_starts():
    timer, began = threading.Timer(.5, os.kill, (os.getpid(), signal.SIGINT)), time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt, match="rank 0: was stopped before it had begun"): run_isolated("1", DP2)
    assert time.monotonic() - began < 5


OWNER = """
import sys
from libai_wb.mesh.topology import ParallelLayout
from libai_wb.notebook.isolated import run_isolated
cell = sys.stdin.read()
run_isolated(cell, ParallelLayout(dp=2), lambda event: print(event.content["text"], flush=True))
"""
STAYS = """
loader = iter(rows("fork"))
next(loader)
print("loaded" + str(rank) + " " + os.environ["LIBAI_WB_SESSION"])
time.sleep(90)
"""


def test_nothing_survives_a_killed_notebook():
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", OWNER], **pipes) as owner:
        owner.stdin.write(LOADER + STAYS)
        owner.stdin.close()
        timer = threading.Timer(60, owner.kill)
        timer.start()
        lines = []
        while len(lines) < 2 and (line := owner.stdout.readline()): lines += [line] * line.startswith("loaded")
        timer.cancel()
        folder = Path(lines[0].split()[1])
        there = processes(folder)
        assert len(there) >= 7  # torchrun, two ranks, two workers each
        owner.kill()
        _, alive = psutil.wait_procs(there, timeout=5)
        assert alive == [] and not folder.exists() and processes(folder) == []
