"""`%%distributed` on GPUs: what only a CUDA device can show. Skipped without one; uses 1 GPU up to all that are found.

One rank on each GPU talks over NCCL. Where a test needs two ranks and there is one GPU, they share it over gloo.
"""
import math
import os
import signal
import time

import pytest
import torch
from kernels import IMPORTS, new_kernel, nothing_left, plain, ranks_of, wait_gone  # noqa: F401

from libai_wb.notebook.rank import sweep_sessions

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
SIZES = [n for n in (1, 2, 4, 8) if n <= max(GPUS, 1)]
PAIR = "-n 2" if GPUS > 1 else "-n 2 --gpus 0 --share-gpu"  # two ranks, whatever there is
ALL = f"-n {max(GPUS, 1)}"
REDUCE = "t = torch.full((1000,), rank + 1., device=device); dist.all_reduce(t); torch.cuda.synchronize(); t.unique().tolist()"
MiB = 2**20


def run(kernel, code, **more):
    "Run a cell; a rank's first use of CUDA takes its time."
    return kernel.run(code, timeout=90, **more)


def ok(kernel, code):
    "Run a cell that must pass."
    answer = run(kernel, code)
    assert not answer.error, answer.error
    return answer


def lines(answer):
    "What each rank has said, without the lines about ranks that start."
    return sorted(line for line in plain(answer.text).splitlines() if line.startswith("[rank"))


def free(gpu=0):
    "Free bytes on a GPU."
    return torch.cuda.mem_get_info(gpu)[0]


def until(true, seconds):
    "Wait for something to become true, and say whether it has."
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end: time.sleep(.1)
    return true()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    "A kernel without ranks."
    with new_kernel(tmp_path_factory.mktemp("kernel")) as kernel: yield kernel


@pytest.fixture(autouse=True)
def stopped(request):
    "Each test starts its own ranks."
    yield
    if "kernel" in request.fixturenames: request.getfixturevalue("kernel").ok("%dist stop")


@pytest.mark.parametrize("n", SIZES)
def test_all_reduce_on_each_gpu(kernel, n):
    answer = ok(kernel, f"%%distributed -n {n}\n{IMPORTS}\n{REDUCE}")
    assert lines(answer) == [f"[rank{r}] [{sum(range(1, n + 1)):.1f}]" for r in range(n)]
    answer = ok(kernel, "%%distributed\n(str(device), torch.cuda.current_device(), mesh and mesh.device_type, "
                        "dist.group.WORLD._get_backend(device).name(), 'OMP_NUM_THREADS' in os.environ)")
    mesh = "None" if n == 1 else "'cuda'"
    assert lines(answer) == [f"[rank{r}] ('cuda:{r}', {r}, {mesh}, 'nccl', True)" for r in range(n)]
    on_cpu = ok(kernel, "%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()")  # gloo beside NCCL
    assert lines(on_cpu) == [f"[rank{r}] {float(n)}" for r in range(n)]
    table = [line.split()[2] for line in ok(kernel, "%dist status").text.splitlines()[1:]]
    assert table == [f"cuda:{r}" for r in range(n)]


@pytest.mark.parametrize("layout", [f"dp{n}" for n in SIZES[1:]] + ["tp2"] * (GPUS > 1) + ["pp2"] * (GPUS > 1))
def test_the_mesh_is_on_the_gpus(kernel, layout):
    axis = layout[:2]
    answer = ok(kernel, f"%%distributed --layout {layout}\n{IMPORTS}\nt = torch.ones(1, device=device)\n"
                        f"dist.all_reduce(t, group=mesh.get_group('{axis}')); t.item()")
    assert lines(answer) == [f"[rank{r}] {float(layout[2:])}" for r in range(int(layout[2:]))]


def test_ranks_share_one_gpu_over_gloo(kernel):
    answer = ok(kernel, f"%%distributed -n 2 --gpus 0 --share-gpu\n{IMPORTS}\n{REDUCE}")
    assert lines(answer) == ["[rank0] [3.0]", "[rank1] [3.0]"]
    answer = ok(kernel, "%%distributed\n(str(device), torch.cuda.device_count(), dist.get_backend())")
    assert lines(answer) == ["[rank0] ('cuda:0', 1, 'gloo')", "[rank1] ('cuda:0', 1, 'gloo')"]


TRAIN = """
from libai_wb import train
small = ["train.train_iter=5", "train.output_dir=out"]
run = train("vit_nano_digits", {layout!r}, device={device!r}, overrides=small, progress=False)
[round(x, 4) for x in run.metrics.loss.dropna().tolist()]
"""


def losses(text): return [float(x) for x in text.partition("[")[2].rstrip("]").split(",")]


@pytest.fixture(scope="module")
def on_cpu(kernel):
    "Losses of one process on the CPU."
    answer = ok(kernel, TRAIN.format(layout="1", device="cpu"))
    return losses(answer.value)


def test_training_on_a_shared_gpu(kernel, on_cpu):
    answer = ok(kernel, f"%%distributed -n 2 --gpus 0 --share-gpu{TRAIN.format(layout='dp2', device='cuda')}")
    got = [losses(line.partition("] ")[2]) for line in lines(answer) if line.endswith("]")]
    assert got == [pytest.approx(on_cpu, abs=5e-3)] * 2
    assert len(on_cpu) == 5 and all(map(math.isfinite, on_cpu))


@pytest.mark.parametrize("layout", ["1"] + [f"dp{n}" for n in SIZES[1:]] + ["tp2"] * (GPUS > 1) + ["pp2"] * (GPUS > 1))
def test_training_from_the_notebook(kernel, on_cpu, layout):
    answer = ok(kernel, TRAIN.format(layout=layout, device="cuda"))
    assert losses(answer.value) == pytest.approx(on_cpu, abs=5e-3)


def test_gpus_are_chosen(kernel):
    for gpu in range(GPUS):
        answer = ok(kernel, f"%%distributed -n 1 --gpus {gpu}\nimport torch, os\n"
                            "(str(device), torch.cuda.device_count(), os.environ['CUDA_VISIBLE_DEVICES'])")
        assert lines(answer) == [f"[rank0] ('cuda:0', 1, '{gpu}')"]
    assert lines(ok(kernel, "%%distributed -n 2 --gpus none\nstr(device)")) == ["[rank0] 'cpu'", "[rank1] 'cpu'"]


def refused(answer):
    "The sentence by which ranks were refused; it is all that is shown."
    name, value, trace = answer.error
    assert name == "LaunchError" and trace == f"LaunchError: {value}" and "\n" not in value
    return value


def test_more_ranks_than_gpus_are_refused(kernel):
    sentence = refused(run(kernel, f"%%distributed -n {GPUS + 1}\n1"))
    assert f"{GPUS + 1} ranks were asked for and {GPUS} GPU" in sentence and "--share-gpu" in sentence
    assert ranks_of(kernel.pid) == []
    name, value, _ = run(kernel, TRAIN.format(layout=f"dp{GPUS + 1}", device="cuda")).error
    assert name == "ValueError" and f"needs {GPUS + 1} GPUs, one for each rank" in value


# Failure

def recovers(kernel, answer, kept):
    "After a failure the ranks reach each other and have their variables; or a restart is offered, and does it."
    text = "\n".join(answer.error[1:])
    if "%dist restart" in text or "died" in text: ok(kernel, "%dist restart")
    else: assert lines(ok(kernel, "%%distributed\nkept")) == [f"[rank{r}] {k}" for r, k in enumerate(kept)]
    return lines(ok(kernel, f"%%distributed\n{IMPORTS}\n{REDUCE}")) == ["[rank0] [3.0]", "[rank1] [3.0]"]


@pytest.mark.parametrize("waits", ["dist.all_reduce(t)", "dist.all_reduce(t); torch.cuda.synchronize()", "t @ t"],
                         ids=["collective", "synchronize", "no collective"])
def test_a_failing_rank_is_named(kernel, waits):
    ok(kernel, f"%%distributed {PAIR}\n{IMPORTS}\n{REDUCE}\nkept = 10 * rank")
    answer = run(kernel, "%%distributed\nt = torch.ones(64, 64, device=device)\n"
                         f"if rank == 1: raise ValueError('boom on one')\n{waits}")
    name, value, trace = answer.error
    assert answer.seconds < 5 and name == "DistributedError" and value.startswith("rank 1: ValueError: boom on one")
    assert trace.count("Traceback") == 1
    assert recovers(kernel, answer, (0, 10))


def test_a_cuda_error_is_named(kernel):
    ok(kernel, f"%%distributed {PAIR}\n{IMPORTS}\n{REDUCE}\nkept = 10 * rank")
    answer = run(kernel, "%%distributed\nif rank == 1: torch.empty(1 << 50, device=device)\n"
                         "dist.all_reduce(t)\ntorch.cuda.synchronize()")
    assert answer.seconds < 5 and answer.error[1].startswith("rank 1: OutOfMemoryError")
    assert recovers(kernel, answer, (0, 10))


@pytest.mark.parametrize("step", ["x = x @ x / 1e3", "x = x @ x / 1e3; torch.cuda.synchronize()"], ids=["queueing", "waiting"])
def test_interrupt_in_a_cuda_loop(kernel, step):
    ok(kernel, f"%%distributed {PAIR}\n{IMPORTS}\n{REDUCE}\nx, kept = torch.ones(1000, 1000, device=device), 7 + rank")
    answer = run(kernel, f"%%distributed\nwhile True: {step}", interrupt_after=2)
    assert answer.seconds < 8 and answer.error[2].startswith("KeyboardInterrupt")
    assert answer.error[1] == "rank 0: was stopped; rank 1: was stopped"
    assert lines(ok(kernel, "%%distributed\nkept")) == ["[rank0] 7", "[rank1] 8"]
    assert recovers(kernel, answer, (7, 8))


def test_interrupt_among_collectives(kernel):
    ok(kernel, f"%%distributed {PAIR}\n{IMPORTS}\n{REDUCE}\nkept = 7 + rank")
    answer = run(kernel, "%%distributed\nwhile True: dist.all_reduce(t); t.fill_(1); torch.cuda.synchronize()", interrupt_after=2)
    assert answer.seconds < 9 and answer.error[2].startswith("KeyboardInterrupt")
    assert recovers(kernel, answer, (7, 8))  # where all sat in NCCL, one had to end


# Memory

def test_memory_comes_back(kernel):
    free()  # this process's own context
    before = free()
    ok(kernel, f"%%distributed -n 1 --gpus 0\nimport torch\nx = torch.ones(512, {MiB}, dtype=torch.uint8, device=device)")
    assert before - free() > 500 * MiB
    ok(kernel, "%%distributed\ndel x")
    held = free()
    ok(kernel, "%dist free")  # PyTorch's cache
    assert until(lambda: free() - held > 450 * MiB, 5)
    ok(kernel, "%dist stop")
    assert until(lambda: free() > before - 64 * MiB, 5), (before - free()) / MiB


def test_a_failure_holds_no_memory_after_free(kernel):
    ok(kernel, f"%%distributed -n 1 --gpus 0\nimport torch\nt = torch.ones(1, device=device)")
    held = free()
    code = f"def f():\n    big = torch.ones(512, {MiB}, dtype=torch.uint8, device=device)\n    raise ValueError('full')\nf()"
    assert run(kernel, f"%%distributed\n{code}").error
    assert held - free() > 450 * MiB  # the traceback holds the local variable
    ok(kernel, "%dist free")
    assert until(lambda: held - free() < 64 * MiB, 5), (held - free()) / MiB


def test_no_rank_stays_on_a_gpu_when_the_notebook_is_killed(tmp_path):
    free()
    before = free()
    with new_kernel(tmp_path) as kernel:
        ok(kernel, f"%%distributed {PAIR}\n{IMPORTS}\n{REDUCE}\nx = torch.ones(1000, 1000, device=device)")
        kernel.client.execute("%%distributed\nopen(f'ready{rank}', 'w').close()\nwhile True: x = x @ x / 1e3")
        assert until(lambda: len(list(tmp_path.glob("ready*"))) == 2, 30)
        ranks = ranks_of(kernel.pid)
        assert len(ranks) == 2 and before - free() > 100 * MiB
        os.kill(kernel.pid, signal.SIGKILL)
        wait_gone(ranks)
    sweep_sessions()
    assert until(lambda: free() > before - 64 * MiB, 5), (before - free()) / MiB
