"""`%%distributed` in real kernels and under papermill: what a failing, stopped or killed rank does to the others.

Everything is gloo on the loopback device. Ranks are found as the children of the kernel that started them.
"""
import json
import os
import signal
import stat
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
import zmq
from jupyter_client.session import Session
from kernels import IMPORTS, LOAD, new_kernel, nothing_left, plain, ranks_of, wait_gone  # noqa: F401
from nbformat.v4 import new_code_cell, new_notebook
from papermill import execute_notebook
from papermill.exceptions import PapermillExecutionError

from libai_wb.notebook.rank import sweep_sessions
from libai_wb.notebook.results import DistributedError
from libai_wb.notebook.workers import Pool

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    "A kernel with two ranks that know x = 10 * rank."
    with new_kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        kernel.ok(f"%%distributed -n 2\n{IMPORTS}\nx = 10 * rank")
        yield kernel


def still_works(kernel):
    "The ranks know their variables and reach each other."
    answer = kernel.ok("%%distributed\ny = torch.tensor(float(x)); dist.all_reduce(y)\n(x, y.item())")
    assert sorted(answer.text.splitlines()) == ["[rank0] (0, 10.0)", "[rank1] (10, 10.0)"]


# Output

def test_state_is_kept_and_lines_bear_their_rank(kernel):
    still_works(kernel)
    answer = kernel.ok("%%distributed\nimport sys\nprint('a', end=''); print('b\\nc'); print('d', file=sys.stderr)")
    assert sorted(answer.text.splitlines()) == [f"[rank{r}] {line}" for r in (0, 1) for line in ("ab", "c", "d")]


def test_names_in_a_rank(kernel):
    answer = kernel.ok("%%distributed --ranks 1\n(rank, world_size, str(device), mesh.mesh_dim_names, "
                       "mesh['dp'].size(), os.environ['LOCAL_RANK'], 'MASTER_ADDR' in os.environ)")
    assert answer.text.strip() == "[rank1] (1, 2, 'cpu', ('pp', 'dp', 'tp'), 2, '1', False)"


def test_output_is_live(kernel):
    answer = kernel.ok("%%distributed --ranks 0\nfor i in range(4): print(i, flush=True); time.sleep(.4)")
    assert answer.times[-1] - answer.times[0] > .8


def test_figures_and_tables_arrive_with_their_rank(kernel):
    answer = kernel.ok("%%distributed\nimport matplotlib.pyplot as plt, pandas as pd\nplt.plot([1, 2]); plt.show()\n"
                       "pd.DataFrame(dict(a=[rank]))")
    kinds = sorted((r["metadata"]["rank"], "image/png" in r["data"], "text/html" in r["data"]) for r in answer.rich)
    assert kinds == [(0, False, True), (0, True, False), (1, False, True), (1, True, False)]
    assert "[rank1] <Figure size" in answer.text


def test_progress_bars_leave_a_line_each(kernel):
    answer = kernel.ok("%%distributed\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(1000)): pass")
    assert [line[:13] for line in sorted(answer.text.splitlines())] == ["[rank0] 100%|", "[rank1] 100%|"]


def test_classes_of_a_cell_pickle_and_show_their_source(kernel):
    kernel.ok("%%distributed\nclass Rows(torch.utils.data.Dataset):\n    def __len__(self): return 4\n"
              "    def __getitem__(self, i): return i")
    kernel.ok("%%distributed\nimport inspect, pickle\npickle.loads(pickle.dumps(Rows()))\n"
              "assert 'return i' in inspect.getsource(Rows.__getitem__)\n"
              "loader = torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context='fork')\n"
              "assert [int(i) for i in loader] == [0, 1, 2, 3]")


# Failure

def test_a_failing_rank_frees_one_that_waits(kernel):
    kernel.ok("%%distributed\ngroup = mesh.get_group('dp')")  # a variable that keeps the old group alive
    answer = kernel.run("%%distributed\nif rank == 1: raise ValueError('boom on one')\n"
                        "dist.all_reduce(torch.ones(1), group=group)")
    name, value, trace = answer.error
    assert answer.seconds < 5 and name == "DistributedError" and value.startswith("rank 1: ValueError: boom on one")
    lines = trace.splitlines()
    assert lines[0] == "rank 1: ValueError: boom on one; its traceback:"
    assert trace.count("Traceback (most recent call last)") == 1 and "if rank == 1: raise" in trace
    assert "rank 0: was waiting for another rank and was released" in lines and "Connection closed" not in trace
    still_works(kernel)


def test_dtensors_outlive_a_failure(kernel):
    kernel.ok("%%distributed\nfrom torch.distributed.tensor import Replicate, Shard, distribute_tensor\n"
              "weight = distribute_tensor(torch.arange(4.), mesh['dp'], [Shard(0)])")
    assert kernel.run("%%distributed\nif rank == 0: 1/0\ndist.barrier()").error
    kernel.ok("%%distributed\nassert weight.redistribute(placements=[Replicate()]).to_local().tolist() == [0, 1, 2, 3]")


def test_a_failure_on_all_ranks_is_told_once_and_keeps_the_group(kernel):
    kernel.ok("%%distributed\nmine = dist.new_group([0, 1])")
    name, value, trace = kernel.run("%%distributed\nnope").error
    assert value == "rank 0: NameError: name 'nope' is not defined (rank 1: the same NameError)"
    assert trace.count("Traceback") == 1 and trace.endswith("The ranks keep their variables.")
    kernel.ok("%%distributed\nt = torch.ones(1); dist.all_reduce(t, group=mine); assert t == 2")


def test_expect_error(kernel):
    answer = kernel.ok("%%distributed --expect-error\nif rank == 1: raise KeyError('on purpose')\ndist.barrier()")
    assert plain(answer.text).startswith("rank 1: KeyError: 'on purpose'; its traceback:\n")
    name, value, _ = kernel.run("%%distributed --expect-error\n1").error
    assert name == "DistributedError" and value.startswith("no rank raised, and the cell says --expect-error")
    still_works(kernel)


def test_time_limit(kernel):
    answer = kernel.run("%%distributed --timeout 1\nif rank == 1: dist.barrier()\ntime.sleep(60)")
    assert answer.seconds < 6 and "was stopped after 1 s" in answer.error[1]
    still_works(kernel)


@pytest.mark.parametrize("code", [
    pytest.param("while True: print('x' * 100)", id="printing"),
    pytest.param("dist.recv(torch.ones(1), src=1 - rank)", id="all waiting"),
    pytest.param("time.sleep(60) if rank else dist.barrier()", id="one waiting")])
def test_interrupt_reaches_all_ranks(kernel, code):
    answer = kernel.run(f"%%distributed\n{code}", interrupt_after=1)
    assert answer.seconds < 6 and answer.error[1] == "rank 0: was stopped; rank 1: was stopped"
    assert len(answer.text) < 1.1e6
    assert answer.error[2].startswith("KeyboardInterrupt")
    still_works(kernel)


@pytest.mark.parametrize("line, sentence", [
    ("-n 1000", "1000 ranks were asked for, which is more than 4 per core on"),
    ("-n 2 --layout tp4", "the layout has dp 1 × tp 4 × pp 1 = 4 ranks; leave -n out"),
    ("--tiemout 3", "unrecognized arguments: --tiemout 3"),
    ("--ranks 0,7", "Rank 7 was asked for and the ranks are 0 to 1")])
def test_a_mistake_in_the_first_line_is_one_sentence(kernel, line, sentence):
    name, value, trace = kernel.run(f"%%distributed {line}\nx").error
    assert name == "LaunchError" and sentence in value and trace == f"LaunchError: {value}" and "\n" not in value


# Security

def test_only_the_owner_can_reach_a_rank(kernel):
    ranks = ranks_of(kernel.pid)
    folder = Path(ranks[0].environ()["LIBAI_WB_SESSION"])
    assert len(ranks) == 2 and folder.stat().st_mode & 0o777 == 0o700
    connections = sorted(folder.glob("rank*.json"))
    keys = [json.loads(c.read_text())["key"] for c in connections]
    assert [stat.S_IMODE(c.stat().st_mode) for c in connections] == [0o600] * 2 and len(set(keys)) == 2
    for process in ranks:
        assert os.getpgid(process.pid) == os.getsid(process.pid) == process.pid
        listening = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert set(listening) <= {"127.0.0.1", "::1"}
        assert not any(key in " ".join(process.cmdline()) + str(process.environ()) for key in keys)


def test_a_wrong_key_is_ignored(kernel):
    folder = Path(ranks_of(kernel.pid)[0].environ()["LIBAI_WB_SESSION"])
    context = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"ipc://{folder}/rank0-ipc-1")
        stranger, proof = Session(key=b"guessed"), folder/"proof"
        stranger.send(socket, "execute_request", dict(code=f"open({str(proof)!r}, 'w')", silent=True))
        assert not socket.poll(1000) and not proof.exists()
    context.term()
    still_works(kernel)


# Endings

def test_a_killed_rank_closes_the_session_until_restart(kernel):
    victim = next(p for p in ranks_of(kernel.pid) if p.environ()["RANK"] == "1")
    timer = threading.Timer(1, victim.kill)
    timer.start()
    answer = kernel.run("%%distributed\nif rank == 0: dist.barrier()\ntime.sleep(30)")
    assert answer.seconds < 6 and answer.error[1].startswith("rank 1: died (SIGKILL, maybe out of memory)")
    assert "rank 0: was waiting for another rank and was released" in answer.error[2]
    again = kernel.run("%%distributed\nx").error[1]
    assert again == "rank 1 died (SIGKILL, maybe out of memory) and its variables are gone; run `%dist restart`."
    table = [line.split() for line in kernel.ok("%dist").text.splitlines()]
    assert table[0] == ["rank", "pid", "device", "state", "memory", "last", "line"]
    assert table[1][:4] == ["0", table[1][1], "cpu", "idle"] and table[2][:5] == ["1", str(victim.pid), "cpu", "died", "(SIGKILL,"]
    kernel.ok("%dist restart")
    kernel.ok("%%distributed\nassert 'x' not in globals()")


def test_another_layout_starts_other_ranks_and_stop_ends_them(kernel):
    old = ranks_of(kernel.pid)
    answer = kernel.ok("%%distributed -n 2 --layout tp2\n(mesh['tp'].size(), mesh['dp'].size())")
    assert "The 2 ranks of layout dp2 end" in answer.text and "[rank1] (2, 1)" in answer.text
    wait_gone(old, 1)
    new, folder = ranks_of(kernel.pid), Path(ranks_of(kernel.pid)[0].environ()["LIBAI_WB_SESSION"])
    kernel.ok("%dist stop")
    wait_gone(new, 1)
    assert not folder.exists() and kernel.ok("%dist").text.startswith("No ranks are running")


def test_no_rank_outlives_its_kernel(tmp_path):
    # One rank waits for the other, which holds the GIL.
    hold = "dist.barrier() if rank == 0 else __import__('re').match(r'(a+)+$', 'a' * 60 + 'b')"
    with new_kernel(tmp_path) as kernel:
        kernel.client.execute(f"%%distributed -n 2\n{IMPORTS}\nopen(f'ready{{rank}}', 'w').close()\n{hold}")
        until = time.monotonic() + 30
        while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < until: time.sleep(.1)
        ranks = ranks_of(kernel.pid)
        assert len(ranks) == 2
        folder = Path(ranks[0].environ()["LIBAI_WB_SESSION"])
        os.kill(kernel.pid, signal.SIGKILL)
        wait_gone(ranks)
    until = time.monotonic() + 5
    while folder.exists() and time.monotonic() < until: time.sleep(.05)
    assert not folder.exists() and folder.name not in sweep_sessions()


def test_interrupt_while_ranks_start(tmp_path):
    with new_kernel(tmp_path) as kernel:
        answer = kernel.run("%%distributed -n 2\n1", interrupt_after=.4)
        assert answer.seconds < 8 and answer.error and "KeyboardInterrupt" in answer.error[2]
        assert ranks_of(kernel.pid) == []


def test_ranks_that_ignore_an_interrupt():
    with Pool(2) as pool:
        results = pool.run("import signal, time\nif rank: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
                           "time.sleep(12)", timeout=.5)
        assert [r.status for r in results] == ["stopped", "busy"]
        with pytest.raises(DistributedError, match="rank 1 is still running the code before this"): pool.run("1")
        ranks, began = ranks_of(os.getpid()), time.monotonic()
        pool.stop()
        assert time.monotonic() - began < 8
        wait_gone(ranks, 1)


# Papermill

def notebook(path, *cells):
    nbformat.write(new_notebook(cells=[new_code_cell(c) for c in cells]), path)
    return path


def test_papermill(tmp_path):
    source = notebook(tmp_path/"a.ipynb", LOAD, f"%%distributed -n 2\n{IMPORTS}\nx = torch.ones(1) + rank",
                      "%%distributed\ndist.all_reduce(x); print('sum', x.item())",
                      "%%distributed --expect-error\nif rank == 1: raise ValueError('shown')\ndist.barrier()",
                      "%%distributed\nif rank == 1: raise ValueError('stops here')\ndist.barrier()", "print('never')")
    with pytest.raises(PapermillExecutionError, match="stops here"):
        execute_notebook(source, tmp_path/"out.ipynb", cwd=tmp_path, kernel_name="python3", progress_bar=False)
    written = nbformat.read(tmp_path/"out.ipynb", 4).cells
    cells = [c for c in written if "papermill-error" not in str(c.metadata.get("tags"))]
    texts = [plain("".join(o.get("text", "") for o in c.outputs)) for c in cells]
    assert sorted(texts[2].splitlines()) == ["[rank0] sum 3.0", "[rank1] sum 3.0"]
    assert "rank 1: ValueError: shown" in texts[3] and texts[5] == ""
    assert [o.ename for o in cells[4].outputs if o.output_type == "error"] == ["DistributedError"]
