"""Complaints that users of other launchers file (numbers of the specification): the launcher must not earn them.

Two ranks in one kernel, gloo on the loopback device. Complaints 8, 9, 11 and the unit tests of a failure are in
test_notebook.py, what ends processes is in test_endings.py.
"""
import json
import os
import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import ipykernel
import nbformat
import psutil
import pytest
import zmq
from jupyter_client.session import Session
from kernels import IMPORTS, LOAD, Answer, new_kernel, nothing_left, plain, ranks_of  # noqa: F401
from nbformat.v4 import new_code_cell, new_notebook
from papermill import execute_notebook
from papermill.exceptions import PapermillExecutionError

from libai_wb.notebook.workers import Pool

pytestmark = pytest.mark.timeout(120)
MESS = """import threading, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
lock, held = threading.Lock(), threading.Event()
def hold():
    with lock: held.set() or threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()"""
ROWS = """class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        if i == self.bad: raise ValueError("row 3 is bad")
        return i
    bad = None
def loader(method): return torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context=method)"""


class Shared:
    "The kernel that all tests share; one that a test has spoiled is replaced."
    def __init__(self, folder): self.folder, self.stack = folder, ExitStack()

    def start(self):
        "A kernel in a mess, with two ranks that know x = 10 * rank."
        with patch.dict(os.environ):
            os.environ.pop("PYTEST_CURRENT_TEST", None) # with it ipykernel does not watch the file descriptors
            kernel = self.stack.enter_context(new_kernel(self.folder))
        kernel.folder = self.folder
        kernel.ok(MESS)
        kernel.ok(f"%%distributed -n 2\n{IMPORTS}\nx = 10 * rank")
        return kernel

    def sound(self, kernel):
        "Whether the ranks are there, know their variables and are heard."
        try: return lines(kernel.run("%%distributed\nx", timeout=15)) == ["[rank0] 0", "[rank1] 10"]
        except (TimeoutError, AssertionError): return False


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    shared = Shared(tmp_path_factory.mktemp("complaints"))
    with shared.stack:
        shared.kernel = shared.start()
        yield shared


@pytest.fixture
def kernel(shared):
    "A kernel with two ranks that know x = 10 * rank."
    yield shared.kernel
    if shared.sound(shared.kernel): return
    shared.stack.close()
    shared.kernel = shared.start()


def lines(answer): return sorted(plain(answer.text).splitlines())


def check_ranks(kernel, seconds=10):
    "The ranks know their variables, reach each other and are heard, at once."
    answer = kernel.run("%%distributed\ny = torch.tensor(float(x)); dist.all_reduce(y)\n(x, y.item())")
    assert answer.error is None and lines(answer) == ["[rank0] (0, 10.0)", "[rank1] (10, 10.0)"]
    assert answer.seconds < seconds


def session_of(kernel): return Path(ranks_of(kernel.pid)[0].environ()["LIBAI_WB_SESSION"])


def interrupt(pid, *pauses):
    "Press stop after each of these pauses, in another thread."
    def press():
        for pause in pauses:
            time.sleep(pause)
            os.kill(pid, 2)
    thread = threading.Thread(target=press)
    thread.start()
    return thread


def left_alone(kernel, code):
    "Run a cell that asks something; whoever sits there presses stop in place of an answer."
    answer, began = Answer(), time.monotonic()
    def stdin(message):
        answer.asked.append(message["content"]["prompt"])
        interrupt(kernel.pid, .5)
    kernel.client.execute_interactive(code, output_hook=answer.take, timeout=60, allow_stdin=True, stdin_hook=stdin)
    answer.seconds = time.monotonic() - began
    return answer


# Starting and values

def test_ranks_are_new_processes(kernel):
    "1: no rank is a fork of the kernel, which has threads, a held lock and a process group of its own."
    assert all("serve_rank" in p.cmdline()[2] for p in ranks_of(kernel.pid)) and len(ranks_of(kernel.pid)) == 2
    assert kernel.ok("(dist.get_world_size(), lock.locked())").value == "(1, True)"
    check_ranks(kernel)


def test_a_class_and_a_lambda_live_on_and_weights_come_back_bit_for_bit(kernel):
    "3: what a cell defines is there in the next one, can be saved, and a state dict comes to the notebook."
    kernel.ok("%%distributed\nclass Net(torch.nn.Module):\n    def __init__(self, width=3):\n"
              "        super().__init__()\n"
              "        self.layer, self.half = torch.nn.Linear(width, 2), torch.nn.Linear(2, 2).bfloat16()\n"
              "double = lambda v: 2 * v")
    kernel.ok("%%distributed\ntorch.manual_seed(rank); net = Net(double(4)); state = net.state_dict()\n"
              "net.layer.weight.data[0, 0] = float('nan')\n"
              "torch.save(net, f'net{rank}.pt'); torch.save(state, f'state{rank}.pt')\n"
              "assert torch.load(f'net{rank}.pt', weights_only=False).layer.weight.shape == (2, 8)")
    kernel.ok("both = %dist pull state\none = %dist pull state --ranks 1")
    kernel.ok("bits = lambda t: t.contiguous().view(torch.uint8)\nfor r, got in both.items():\n"
              "    true = torch.load(f'state{r}.pt')\n    assert list(got) == list(true)\n"
              "    for k in true: assert got[k].dtype == true[k].dtype and torch.equal(bits(got[k]), bits(true[k]))\n"
              "assert list(both) == [0, 1] and torch.equal(bits(one['layer.weight']), bits(both[1]['layer.weight']))")


def test_push(kernel):
    "A cell gets variables of the notebook, and the notebook's own stay as they are."
    kernel.ok("import threading\nlr, sizes, table, lock2 = .5, [1, 2], {'a': torch.ones(2)}, threading.Lock()")
    answer = kernel.ok("%%distributed --push lr,sizes,table\nlr += rank; sizes.append(rank); table['a'] += 1\n"
                       "(lr, sizes, table)")
    assert lines(answer)[1] == "[rank1] (1.5, [1, 2, 1], {'a': tensor([2., 2.])})"
    assert kernel.ok("(lr, sizes, table)").value == "(0.5, [1, 2], {'a': tensor([1., 1.])})"
    said = kernel.run("%%distributed --push lock2\n1").error[1]
    assert "`lock2` is of type _thread.lock, which cannot travel" in said


def test_a_name_that_only_the_notebook_knows(kernel):
    kernel.ok("warmup = 3\ndef helper(): pass")
    assert kernel.run("%%distributed\nwarmup").error[2].endswith("add `--push warmup`.")
    assert "%%distributed --local" in kernel.run("%%distributed\nhelper()").error[2]


def test_a_cell_for_the_notebook_and_the_ranks(kernel):
    "`--local`: a class is there on both sides, with its source; a mistake is told with the line of the cell."
    kernel.ok("%%distributed --local\nimport inspect, torch\nclass Tiny(torch.nn.Module):\n    width = 7\n"
              "    def forward(self, x): return x * self.width")
    use = "assert Tiny()(torch.ones(1)) == 7 and 'self.width' in inspect.getsource(Tiny.forward); Tiny.__module__"
    assert kernel.ok(use).value == "'__main__'"
    assert lines(kernel.ok(f"%%distributed\n{use}")) == ["[rank0] '__main__'", "[rank1] '__main__'"]
    name, _, trace = kernel.run("%%distributed --local\nhere = 1\nhere / 0").error
    assert name == "ZeroDivisionError" and re.search(r"-> 2 here / 0", trace)


def test_a_mistake_in_a_local_cell_hides_no_line_of_it(kernel):
    name, _, trace = kernel.run("%%distributed --local\nhere = 1\nif True print(1)").error
    assert name == "CellSyntaxError" and "line 2\n    if True print(1)" in plain(trace)
    assert "SyntaxError: " in plain(trace) and "libai_wb/notebook" not in trace
    name, said, _ = kernel.run("%%distributed --local\nimport asyncio\nawait asyncio.sleep(0)").error
    assert name == "LaunchError" and said.startswith("A cell that awaits cannot run here and on the ranks")
    name, _, trace = kernel.run("%%distributed --local\nhere = 1\nhere / 0").error
    assert name == "ZeroDivisionError" and "line 2" in trace and "libai_wb/notebook" not in trace


def test_plain_cells_on_the_ranks(kernel):
    "`%dist auto on`: plain cells are marked and go to the ranks, `%%local` and other magics do not."
    kernel.ok("x = 'mine'")
    try:
        kernel.ok("%dist auto on")
        assert lines(kernel.ok("x + 1")) == ["[on 2 ranks]", "[rank0] 1", "[rank1] 11"]
        assert kernel.ok("%%local\nx").value == "'mine'"
        both = kernel.ok("%%distributed --local\nboth = x; print(both)") # once here, once on each rank
        assert lines(both) == ["[on 2 ranks]", "[rank0] 0", "[rank1] 10", "mine"]
        assert kernel.ok("%%local\nboth").value == "'mine'"
        assert kernel.ok("%dist tail 0").text == ""
        assert kernel.run("raise ValueError(rank)").error[1].startswith(("rank 0: ValueError: 0", "rank 1: ValueError: 1"))
        assert "ready" not in kernel.ok("%dist").text
    finally: kernel.ok("%dist auto off")
    assert kernel.ok("x").value == "'mine'"


def test_a_process_group_in_a_plain_cell(kernel):
    "13: whoever makes a process group in the notebook is told what to do, before it hangs."
    kernel.ok("dist.destroy_process_group()")
    answer = kernel.run("import datetime\n"
                        "dist.init_process_group('gloo', init_method='file://' + __import__('os').getcwd() + "
                        "'/store', rank=0, world_size=2, timeout=datetime.timedelta(seconds=.5))")
    assert "init_process_group in a plain cell waits for other processes" in answer.text and answer.error


# Output

def test_output_comes_while_a_cell_runs_and_before_its_error(kernel):
    "7: lines come one by one, and the last one before a failure is there."
    answer = kernel.run("%%rank 1\nfor i in range(5): print('step', i); time.sleep(.2)\nprint('last', end='')\n"
                        "raise ValueError('end')")
    assert lines(answer) == ["[rank1] last", *(f"[rank1] step {i}" for i in range(5))] and "end" in answer.error[1]
    assert answer.times[-1] - answer.times[0] > .5 and len(answer.times) > 2


def test_values_are_in_the_order_of_the_ranks(kernel):
    "10: the last rank is done first; `--view rank0` shows one rank, and the error of another."
    said = kernel.ok("%%distributed\ntime.sleep(.3 * (1 - rank)); rank").text
    assert said.split() == ["[rank0]", "0", "[rank1]", "1"]
    assert lines(kernel.ok("%%distributed --view rank0\nprint('a'); rank")) == ["[rank0] 0", "[rank0] a"]
    assert kernel.run("%%distributed --view rank0\nif rank: 1/0").error[1].startswith("rank 1: ZeroDivisionError")


def test_a_late_thread_does_not_write_into_the_next_cell(kernel):
    "14: what a thread prints after its cell has ended is in the log, and in no later cell."
    kernel.ok("%%distributed\nimport threading\ndef late():\n    time.sleep(.4); print('late line', flush=True)\n"
              "threading.Thread(target=late).start()\nprint('early')")
    answer = kernel.ok("%%distributed\ntime.sleep(1); print('this cell')")
    late = [line for line in lines(kernel.ok("%dist tail 3")) if "late" in line]
    assert late == [f"[rank{r}] late line" for r in (0, 1)]
    assert lines(answer) == ["[rank0] this cell", "[rank1] this cell"]


def test_a_thread_writes_into_its_own_cell(kernel):
    "14: two cells in turn, each with a thread that prints while the cell runs."
    code = "%%distributed\nimport threading\nt = threading.Thread(target=lambda: print('from {0}'))\n" \
           "t.start(); t.join(); time.sleep(.3)"
    for name in ("one", "two"): assert lines(kernel.ok(code.format(name))) == [f"[rank{r}] from {name}" for r in (0, 1)]


def test_bars_are_redrawn_at_most_four_times_a_second(kernel):
    "16: somebody watches two ranks' bars of 600 updates."
    answer = kernel.run("%%distributed\nfrom tqdm.auto import tqdm\n"
                        "for _ in tqdm(range(600), desc=f'b{rank}', mininterval=0): time.sleep(.003)", typed=[])
    assert 2 <= len(answer.updates) <= 4 * answer.seconds + 2 and answer.messages < 60
    assert [line[:14] for line in lines(answer)] == ["[rank0] b0: 10", "[rank1] b1: 10"]
    assert answer.updates[-1]["data"]["text/plain"] == ""


def test_notebook_bars_in_a_rank_end_at_the_end(kernel):
    "16: tqdm.notebook, asked for by name, is a text bar too; its widget would stay at 0 %."
    answer = kernel.ok("%%distributed\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(50)): pass")
    assert [line[:13] for line in lines(answer)] == ["[rank0] 100%|", "[rank1] 100%|"]


def test_much_output_is_cut_and_kept(kernel):
    "17: two ranks print 20,000 lines each; the cell stays small and the logs have all."
    answer = kernel.ok("%%distributed\nfor i in range(20_000): print('much', i)")
    assert answer.text.count("\n") < 2100 and "%dist tail" in answer.text and "[rank0] much 19999" in answer.text
    for r in (0, 1):
        said = re.findall(r"^much (\d+)$", (session_of(kernel)/f"rank{r}.log").read_text(), re.MULTILINE)
        assert said == [str(i) for i in range(20_000)]


def test_a_very_long_line(kernel):
    "17: a line of five million characters, in pieces, is cut as well."
    answer = kernel.ok("%%distributed\nimport sys\nfor _ in range(50): sys.stdout.write('y' * 100_000)\n"
                       "print(); print('end')")
    assert len(answer.text) < 1.5e6 and "[rank1] end" in answer.text
    assert len(kernel.ok("%dist tail 2").text) < 1e6


def test_a_very_long_message_of_an_error(kernel):
    "17: an exception that prints five million characters does not fill the notebook."
    answer = kernel.run("%%distributed\nraise ValueError('x' * 5_000_000)")
    assert sum(map(len, answer.error)) < 1.5e6
    check_ranks(kernel)


def test_odd_text(kernel):
    "Letters of all kinds, control characters and half a letter; nothing else is said, and the rank is still heard."
    answer = kernel.ok("%%distributed\nprint('äß漢字 \\U0001F600 \\x00\\x07')\nimport sys; sys.stdout.flush()\n"
                       "print('half \\ud800')")
    said = [line for line in lines(answer) if "half" not in line]
    assert said == [f"[rank{r}] äß漢字 \U0001F600 \0\a" for r in (0, 1)]
    check_ranks(kernel)


def test_output_that_python_does_not_see(kernel):
    "Text of C code, of child processes and of forks arrives."
    answer = kernel.ok("%%rank 0\nos.write(1, b'raw\\n'); os.system('echo shell; echo error >&2'); time.sleep(.5)")
    assert lines(answer) == ["[rank0] error", "[rank0] raw", "[rank0] shell"]
    answer = kernel.ok("%%rank 0\nif os.fork() == 0: print('fork', flush=True); os._exit(0)\nos.wait(); time.sleep(.5)")
    assert lines(answer) == ["[rank0] fork"]


def test_help_of_a_name_on_a_rank(kernel):
    "`name?` shows the help: IPython sends it beside the output."
    answer = kernel.ok("%%rank 0\ndef documented():\n    'What it does.'\ndocumented?")
    assert "What it does." in answer.text + str(answer.rich)


# Cells of every kind

def test_a_syntax_error(kernel):
    name, value, trace = kernel.run("%%distributed\nx = 1\nif True print(x)").error
    assert value.startswith("rank 0: SyntaxError") and "(rank 1: the same SyntaxError)" in value
    assert trace.count("if True print(x)") == 1 and "line 3" in trace and "Traceback" not in trace
    check_ranks(kernel)


def test_other_magics_and_await_in_a_cell(kernel):
    assert kernel.ok("%%distributed\n%%time\nkept = rank").text.count("Wall time") == 2
    assert lines(kernel.ok("%%distributed\n\n%%capture said\nprint(1)")) == []
    answer = kernel.ok("%%distributed\nimport asyncio\nawait asyncio.sleep(.01)\n"
                       "value = await asyncio.sleep(.01, kept)\n(value, said.stdout)")
    assert lines(answer) == ["[rank0] (0, '1\\n')", "[rank1] (1, '1\\n')"]


def test_a_cell_that_leaves_for_a_folder_that_vanishes(kernel):
    kernel.ok("%%distributed\nimport tempfile\nhome = os.getcwd(); os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())")
    assert "---> 2 1/0" in kernel.run("%%distributed\n1/0").error[2]
    kernel.ok("lr = 1")
    kernel.ok("%%distributed --push lr\nlr")
    check_ranks(kernel)
    kernel.ok("%%distributed\nos.chdir(home)")


@pytest.mark.parametrize("line, sentence", [
    ("%dist tail --ranks 9", "9"), ("%dist stack --ranks 9", "9"), ("%dist pull x --ranks 9", "9"),
    ("%dist push 'x", "quotation"), ("%dist pull nothing", "nothing"), ("%%distributed --timeout -1\n1", "timeout"),
    ("%%distributed --timeout 0\n1", "timeout"), ("%%distributed --timeout nan\n1", "timeout")])
def test_a_mistake_in_a_command_is_one_sentence(kernel, line, sentence):
    name, value, trace = kernel.run(line).error or ("", "", "")
    assert name == "LaunchError" and sentence in value and trace == f"LaunchError: {value}" and "\n" not in value
    check_ranks(kernel)


# Data workers

def test_an_exception_in_a_data_worker_shows_where(kernel):
    "4: a forked worker fails; its own traceback is there."
    kernel.ok(f"%%distributed\n{ROWS}\nlen(list(loader('fork')))")
    name, value, trace = kernel.run("%%distributed\nif rank == 1: Rows.bad = 3; list(loader('fork'))\n"
                                    "dist.barrier()").error
    assert value.startswith("rank 1: ValueError: Caught ValueError in DataLoader worker process")
    assert "row 3 is bad" in trace and 'raise ValueError("row 3 is bad")' in trace


def test_a_data_worker_leaves_groups_of_its_rank_alone(kernel):
    "4: in a forked worker the threads of a process group do not exist; collecting a dropped group there waits for ever."
    kernel.ok(f"%%distributed\n{ROWS}\nimport gc\ngc.disable()\n"
              "dropped = [dist.new_group()]; dropped.append(dropped)\ndist.barrier(dropped[0])\n"
              "dist.destroy_process_group(dropped[0]); del dropped")
    answer = kernel.run("%%distributed\ntry: print(len(list(torch.utils.data.DataLoader(Rows(), num_workers=1, timeout=5,\n"
                        "    multiprocessing_context='fork', worker_init_fn=lambda worker: gc.collect()))))\n"
                        "finally: gc.enable()")
    assert not answer.error, answer.error
    assert answer.text.split().count("8") == 2
    check_ranks(kernel)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_data_worker_that_starts_anew(kernel, method):
    "4: a spawned worker cannot know a class of a cell; it works, or the error says so, within 10 s."
    kernel.ok(f"%%distributed\n{ROWS}")
    answer = kernel.run(f"%%rank 0\nlen(list(loader('{method}')))", timeout=60)
    assert answer.seconds < 10
    if answer.error: assert "Rows" in answer.error[2] and "cell" in answer.error[2].lower()
    check_ranks(kernel)


# Interrupt, questions, hangs

@pytest.mark.skipif(ipykernel.version_info < (7,), reason="ipykernel 6 has no subshells")
def test_a_busy_notebook_answers_on_a_subshell(kernel):
    "26: while a magic runs, a message on a subshell is answered within a second (ipykernel 7)."
    client = kernel.client
    running = client.execute("%%distributed\ntime.sleep(3)", store_history=False)
    time.sleep(.5)
    client.control_channel.send(client.session.msg("create_subshell_request", {}))
    shell = client.get_control_msg(timeout=2)["content"]["subshell_id"]
    message, began = client.session.msg("comm_info_request", {}), time.monotonic()
    message["header"]["subshell_id"] = shell
    client.shell_channel.send(message)
    assert client.get_shell_msg(timeout=2)["msg_type"] == "comm_info_reply" and time.monotonic() - began < 1
    client.control_channel.send(client.session.msg("delete_subshell_request", {"subshell_id": shell}))
    client.get_control_msg(timeout=5)
    assert client.get_shell_msg(timeout=10)["parent_header"]["msg_id"] == running
    while client.get_iopub_msg(timeout=5)["content"].get("execution_state") != "idle": pass
    check_ranks(kernel)


BUSY = {"loop": "while True: pass", "sleep": "time.sleep(60)", "all wait": "dist.recv(torch.ones(1), src=1 - rank)",
        "one waits": "time.sleep(60) if rank else dist.barrier()"}


@pytest.mark.parametrize("code", BUSY.values(), ids=BUSY)
def test_stop_pressed_twice_and_more(kernel, code):
    "6: impatience costs nothing: state is kept and the next cell runs."
    presses = interrupt(kernel.pid, 1, .1, .1)
    answer = kernel.run(f"%%distributed\n{code}")
    presses.join()
    assert answer.seconds < 7 and answer.error[2] == "KeyboardInterrupt: rank 0: was stopped; rank 1: was stopped"
    check_ranks(kernel)


def pressed_early(times, code, pauses):
    "Press stop shortly after a cell has begun; afterwards the ranks must be free and heard."
    with Pool(2) as pool:
        pool.run(f"{IMPORTS}\nx = 10 * rank")
        for pause in [pauses * (i + .5) / times for i in range(times)]:
            try:
                press = interrupt(os.getpid(), pause)
                pool.run(code)
                press.join()
                time.sleep(.02)
            except KeyboardInterrupt: press.join()
            began = time.monotonic()
            results = pool.run("y = torch.tensor(float(x)); dist.all_reduce(y); y.item()", timeout=12)
            assert [r.value for r in results] == ["10.0", "10.0"] and time.monotonic() - began < 5, f"{pause:.4f} s"


@pytest.mark.parametrize("code", ["sum(range(200_000))"])
def test_stop_pressed_as_a_cell_begins_or_ends(code):
    "6: there is no moment at which stop leaves a rank running, or deaf."
    pressed_early(16, code, .03)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("code", ["time.sleep(30)", "sum(range(200_000))", "for i in range(200): print(i)",
                                  "for _ in range(50): dist.all_reduce(torch.ones(1))"])
def test_stop_pressed_at_any_moment(code): pressed_early(100, code, .06)


def test_breakpoint_while_another_rank_waits(kernel):
    "31: typed answers reach rank 1, the prompt says who waits."
    answer = kernel.run("%%distributed\nif rank == 1: breakpoint()\ndist.barrier()\n"
                        "print('through')", typed=["p x + 1", "c"])
    assert answer.asked == ["[rank1] (rank 0 still busy) ipdb> "] * 2 and answer.error is None
    assert {"[rank1] 11", "[rank0] through", "[rank1] through"} <= set(lines(answer))


def test_debug_after_a_failure(kernel):
    "31: `%debug` on the rank that failed."
    assert kernel.run("%%distributed\ndef f(v):\n    if rank == 1: v / 0\nf(41)\ndist.barrier()").error
    answer = kernel.run("%%rank 1\n%debug", typed=["p v + 1", "q"])
    assert answer.asked == ["[rank1] ipdb> "] * 2 and "[rank1] 42" in lines(answer) and answer.error is None
    check_ranks(kernel)


@pytest.mark.parametrize("code", [pytest.param("if rank == 1: breakpoint()\nafter = 1\ndist.barrier()", id="pdb"),
                                  pytest.param("input('name? ')", id="input")])
def test_stop_pressed_at_a_question(kernel, code):
    "31: stop in place of an answer ends the cell on all ranks, and nothing after the question runs."
    answer = left_alone(kernel, f"%%distributed\nafter = 0\n{code}")
    assert answer.seconds < 6 and answer.error[0] == "RanksInterrupted" and len(answer.asked) == 1
    assert lines(kernel.ok("%%rank 1\nafter")) == ["[rank1] 0"]
    check_ranks(kernel)


def test_nobody_is_there_to_answer(kernel):
    answer = kernel.run("%%distributed\nif rank == 1: breakpoint()\ndist.barrier()")
    assert answer.seconds < 8 and answer.error and answer.error[1].startswith("rank 1: ")
    check_ranks(kernel)


@pytest.fixture
def impatient(kernel):
    "The kernel, which looks where the ranks are after a second of silence."
    kernel.ok("%dist silence 1")
    yield kernel
    kernel.ok("%dist silence 120")


def test_a_hang_is_told_from_a_wait(impatient):
    "Collectives that do not match are named with their lines, and the cell ends; a rank that computes is not stopped."
    answer = impatient.run("%%distributed\nif rank == 0:\n    dist.all_reduce(torch.ones(3))\nelse:\n"
                           "    dist.recv(torch.ones(1), src=0)")
    for r, line, name in ((0, "3 of this cell: dist.all_reduce(torch.ones(3))", "all_reduce"),
                          (1, "5 of this cell: dist.recv(torch.ones(1), src=0)", "recv")):
        assert f"[rank{r}] line {line}, waiting in {name}" in answer.text
        assert f"rank {r}: hung at line {line}, waiting in {name}" in answer.error[1]
    assert answer.seconds < 8
    check_ranks(impatient)
    answer = impatient.run("%%distributed\nif rank == 1:\n    began = time.time()\n"
                           "    while time.time() - began < 4: pass\ndist.barrier()")
    assert answer.error is None
    assert "[rank0] line 5 of this cell: dist.barrier(), waiting in barrier" in answer.text


def test_a_rank_that_is_done_is_not_told_to_be_somewhere(impatient):
    answer = impatient.ok("%%distributed\nif rank == 0: time.sleep(1.5)")
    assert "[rank0] line 2 of this cell: if rank == 0: time.sleep(1.5)" in answer.text
    assert "at idle" not in answer.text


# Security

def test_a_replayed_message_is_ignored(kernel):
    "§3: somebody who has seen a signed message sends it again."
    folder, count = session_of(kernel), kernel.folder/"count"
    key = json.loads((folder/"rank0.json").read_text())["key"].encode()
    context = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"ipc://{folder}/rank0-ipc-1")
        session = Session(key=key)
        frames = session.serialize(session.msg("execute_request", dict(code=f"print('x', file=open({str(count)!r}, "
                                                                            f"'a'))", silent=True)))
        for _ in range(3): socket.send_multipart(frames)
        assert socket.poll(5000)
        time.sleep(.5)
    context.term()
    assert count.read_text() == "x\n"
    check_ranks(kernel)


def test_unsigned_bytes_do_nothing(kernel):
    "§3: a pickle with a side effect, sent to every socket of a rank and laid where values are read."
    folder, proof = session_of(kernel), kernel.folder/"proof"
    evil = f"cbuiltins\nopen\n(V{proof}\nVw\ntR.".encode()
    context = zmq.Context()
    for path in folder.glob("rank0-ipc-*"):
        for kind in (zmq.DEALER, zmq.REQ):
            with context.socket(kind) as socket:
                socket.linger = 200
                socket.connect(f"ipc://{path}")
                socket.send_multipart([b"<IDS|MSG>", b"", evil, evil, evil, evil])
                socket.send_multipart([evil]) if kind == zmq.DEALER else None
    kernel.ok(f"from pathlib import Path\nfrom libai_wb.notebook.values import read_values\n"
              f"bad = Path({str(kernel.folder)!r})/'pulled0'\n"
              f"bad.write_bytes({evil!r})\ntry: read_values(bad)\nexcept ValueError as e: print('refused')")
    context.term()
    assert not proof.exists()
    check_ranks(kernel)


def listeners(process):
    "Sockets on which a process listens; none if it has ended meanwhile."
    try: return [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    except psutil.NoSuchProcess: return []


def test_everything_that_a_notebook_starts_listens_on_loopback(kernel):
    "§3: no listener of the kernel, of its ranks or of what they start is reachable from outside."
    kernel.ok(f"%%distributed\n{ROWS}\nworkers = iter(loader('fork')); next(workers)")
    family = [psutil.Process(kernel.pid), *psutil.Process(kernel.pid).children(recursive=True)]
    assert len(family) >= 7
    assert {c.laddr.ip for p in family for c in listeners(p)} <= {"127.0.0.1", "::1"}
    modes = [path.stat().st_mode & 0o777 for path in session_of(kernel).glob("rank*.json")]
    assert session_of(kernel).stat().st_mode & 0o777 == 0o700 and modes == [0o600] * 2
    kernel.ok("%%distributed\ndel workers")


# Papermill and its relatives

KEYS = """import json, pathlib, psutil, shutil
folder = pathlib.Path(psutil.Process().children()[0].environ()["LIBAI_WB_SESSION"])
pathlib.Path("keys").write_text("\\n".join(json.loads(p.read_text())["key"] for p in folder.glob("rank?.json")))
for log in folder.glob("rank*.log"): shutil.copy(log, ".")"""
SHOWS = "import matplotlib.pyplot as plt, pandas as pd\nplt.plot([1, 2]); plt.show()\npd.DataFrame(dict(a=[rank]))"


def test_papermill_parameters_pictures_and_no_key(tmp_path):
    "22, §3: parameters reach the ranks, pictures and tables have a static form, the keys are written nowhere."
    cells = [LOAD, "# parameters\nlr, steps, unused = .1, 1, None",
             f"%%distributed -n 2\n{IMPORTS}\nprint('got', lr, steps)", f"%%distributed\n{SHOWS}",
             "%dist\n%dist stack\n%dist tail\n%dist help",
             "%%distributed --expect-error\nif rank: raise ValueError(dict(os.environ))\ndist.barrier()",
             "%%distributed\nprint(os.environ, __import__('sys').argv)", KEYS, "%%distributed\n1/0"]
    notebook = new_notebook(cells=[new_code_cell(c) for c in cells])
    notebook.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, tmp_path/"in.ipynb")
    with pytest.raises(PapermillExecutionError, match="ZeroDivisionError"):
        execute_notebook(tmp_path/"in.ipynb", tmp_path/"out.ipynb", dict(lr=.25, steps=[1, 2]), cwd=tmp_path,
                         kernel_name="python3", language="python", progress_bar=False)
    written = nbformat.read(tmp_path/"out.ipynb", 4).cells
    written = [c for c in written if "papermill-error" not in str(c.metadata.get("tags"))]
    texts = [plain("".join(o.get("text", "") for o in c.outputs)) for c in written]
    assert set(texts[3].splitlines()) >= {"[rank0] got 0.25 [1, 2]", "[rank1] got 0.25 [1, 2]"}
    kinds = [set(o.data) for o in written[4].outputs if o.output_type == "display_data"]
    assert len(kinds) == 4 and all("text/plain" in k for k in kinds) and sum("image/png" in k for k in kinds) == 2
    keys = (tmp_path/"keys").read_text().split()
    said = [(tmp_path/name).read_text() for name in ("out.ipynb", "rank0.log", "rank1.log")]
    assert len(keys) == 2 and len(keys[0]) > 30 and not any(key in text for key in keys for text in said)


@pytest.mark.parametrize("tool", ["nbconvert", "nbclient"])
def test_other_ways_to_run_a_notebook(tmp_path, tool):
    "Batch: what papermill runs, nbconvert --execute and nbclient run, and a failing cell stops them."
    cells = [LOAD, f"%%distributed -n 1\n{IMPORTS}\n"
                   f"print('rank', rank)", "%%distributed\nraise ValueError('stops here')", "print('never')"]
    nbformat.write(new_notebook(cells=[new_code_cell(c) for c in cells]), tmp_path/"in.ipynb")
    if tool == "nbclient":
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError
        notebook = nbformat.read(tmp_path/"in.ipynb", 4)
        with pytest.raises(CellExecutionError, match="stops here"):
            NotebookClient(notebook, resources=dict(metadata=dict(path=str(tmp_path)))).execute()
    else:
        from nbconvert.preprocessors import ExecutePreprocessor
        notebook = nbformat.read(tmp_path/"in.ipynb", 4)
        place = dict(metadata=dict(path=str(tmp_path)))
        ExecutePreprocessor(allow_errors=True, kernel_name="python3").preprocess(notebook, place)
    texts = ["".join(o.get("text", "") for o in c.outputs) for c in notebook.cells]
    assert "[rank0] rank 0" in texts[1] and (texts[3] == "") == (tool == "nbclient")
    assert [o.ename for o in notebook.cells[2].outputs if o.output_type == "error"] == ["DistributedError"]


# Floods, last: a rank that is not heard any more would spoil what follows

@pytest.mark.full
def test_a_flood_of_displays(kernel):
    "21: 20,000 display() in a rank; the cell ends, says that it was too much, and shows its value."
    answer = kernel.run("%%rank 0\nfrom IPython.display import display, HTML\n"
                        "for i in range(20_000): display(HTML(f'<b>{i}</b>'))\n'the value'",
                        timeout=60)
    assert answer.error is None and answer.messages < 25_000 and "[rank0] 'the value'" in answer.text
    check_ranks(kernel)


@pytest.mark.full
def test_a_flood_of_pieces(kernel):
    "21: 20,000 lines that are flushed one by one: the end and the value are shown, and the log has all."
    answer = kernel.run("%%rank 0\nfor i in range(20_000): print('piece', i, flush=True)\n'the value'", timeout=60)
    assert "[rank0] 'the value'" in answer.text and "[rank0] piece 19999" in answer.text
    assert len(re.findall(r"^piece ", (session_of(kernel)/"rank0.log").read_text(), re.MULTILINE)) == 20_000
    check_ranks(kernel)


@pytest.mark.full
def test_a_flood_between_cells(kernel):
    "21: a thread has printed 30,000 lines since its cell ended; the next cell is heard all the same."
    kernel.ok("%%rank 0\nimport threading\ndef flood():\n    time.sleep(.3)\n"
              "    for i in range(30_000): print('flood', i, flush=True)\n"
              "thread = threading.Thread(target=flood); thread.start()")
    time.sleep(6)
    answer = kernel.ok("%%distributed\nprint('hello')\nrank")
    others = [line for line in lines(answer) if "flood" not in line]
    assert others == ["[rank0] 0", "[rank0] hello", "[rank1] 1", "[rank1] hello"]
    kernel.run("%%rank 0\nthread.join()", timeout=60)
    check_ranks(kernel)
