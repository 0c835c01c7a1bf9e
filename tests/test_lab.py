"""The magics in a real JupyterLab: what somebody sees, presses and types. Screenshots go to outputs/lab/."""
import signal
import time
from pathlib import Path

import pytest
from kernels import LOAD, nothing_left, ranks_of, wait_gone  # noqa: F401
from lab import PANEL, ROOT, Page, browser, in_browser, kinds, opened, shown  # noqa: F401

from libai_wb.notebook.rank import sweep_sessions

pytestmark = in_browser
TUTORIAL = ROOT/"experiments"/"distributed_tutorial.ipynb"


# Run, watch, stop

BARS = "%%distributed\nimport time\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(300)): time.sleep(.01)"
LONG = "%%distributed\nfor step in range(10_000):\n    time.sleep(.02)\n    if step % 20 == 0: print('at', step)"


def test_a_cell_with_bars_and_the_stop_button(tmp_path, browser):
    cells = LOAD, "%%distributed -n 2\nx = 10 * rank\nx", BARS, LONG, "%%distributed\n(x, step > 0)"
    with opened(tmp_path, browser, *cells) as (lab, page):
        page.run(0)
        assert page.run(1).splitlines()[1:] == ["[rank0] 0", "[rank1] 10"] and len(lab.ranks) == 2
        page.start(2)
        seen, most = set(), 0
        page.until(lambda: "%" in page.text(2), "a bar")
        while page.status() == "busy":
            outputs = page.cells()[2]["outputs"]
            most = max(most, len(outputs))
            seen |= {o["data"]["text/plain"] for o in outputs if o["output_type"] == "display_data"}
            page.page.wait_for_timeout(50)
            if len(seen) == 3: page.shot("bars")
        assert len(seen) > 3 and most <= 2 and all(text.count("it/s") <= 2 for text in seen)
        assert sorted(line[:14] for line in page.done(2).split("\n") if line) == ["[rank0] 100%|█", "[rank1] 100%|█"]
        page.start(3)
        page.until(lambda: page.text(3).count("at 20\n") == 2, "both ranks have begun")
        for _ in range(2): page.press("Interrupt the kernel") # impatient
        assert "KeyboardInterrupt: rank 0: was stopped; rank 1: was stopped" in page.done(3, 10)
        assert page.run(4).splitlines() == ["[rank0] (0, True)", "[rank1] (10, True)"]
        page.shot("stop")


# The tutorial

@pytest.mark.full
@pytest.mark.timeout(500)
def test_the_tutorial_from_top_to_bottom(tmp_path, browser):
    with opened(tmp_path, browser, source=TUTORIAL) as (lab, page):
        code = [i for i, cell in enumerate(page.cells()) if cell["cell_type"] == "code"]
        bars = next(i for i in code if "counting" in page.cells()[i]["source"])
        page.menu("Edit", "Clear Outputs of All Cells")
        page.menu("Run", "Run All Cells")
        states, most = set(), 0
        def finished():
            nonlocal most
            cells = page.cells()
            states.add(shown(cells[bars]))
            most = max(most, len(cells[bars]["outputs"]))
            assert [shown(c) for c in cells if "error" in kinds(c)] == []
            return all(cells[i].get("execution_count") for i in code) and page.status() == "idle"
        page.until(finished, "the notebook is done", 400)
        assert most <= 2 and len(states) > 4 and shown(page.cells()[bars]).count("100%") == 2
        assert lab.ranks == []  # `%dist stop`
        page.shoot_all("tutorial")


# Questions of a rank

@pytest.mark.full
def test_a_breakpoint_is_answered_in_the_notebook(tmp_path, browser):
    cell = "%%distributed -n 2\nx = 21 * (rank + 1)\nif rank == 1: breakpoint()\ntorch.distributed.barrier()\nx"
    fails = "%%distributed\ny = rank\n1 / (1 - y)"
    more = fails, "%%rank 1\n%debug", "%%distributed\nx + y"
    with opened(tmp_path, browser, LOAD, "%%distributed -n 2\nimport torch", cell, *more) as (_, page):
        for i in range(2): page.run(i)
        page.start(2)
        page.answer("p x")
        page.shot("breakpoint")
        page.answer("x = 7")
        page.answer("c")
        assert page.done(2).splitlines()[-2:] == ["[rank0] 21", "[rank1] 7"] and "42" in page.text(2)
        page.shot("breakpoint-done")
        assert "rank 1: ZeroDivisionError" in page.run(3)
        page.start(4)
        page.answer("p 'y is', y")
        page.answer("q")
        assert "('y is', 1)" in page.done(4)
        page.shot("debug")
        assert page.run(5).splitlines() == ["[rank0] 21", "[rank1] 8"]


# Endings

WAITS = "%%distributed\nprint('begun')\ntorch.distributed.barrier() if rank == 0 else time.sleep(100)"
FIRST = "%%distributed -n 2\nimport time, torch\nx = 10 * rank"


@pytest.mark.full
def test_a_restart_of_the_kernel_ends_its_ranks(tmp_path, browser):
    with opened(tmp_path, browser, LOAD, FIRST, WAITS, "%%distributed\n'x' in globals()") as (lab, page):
        for i in range(2): page.run(i)
        page.start(2)
        page.until(lambda: page.text(2).count("begun") == 2, "both ranks have begun")
        old = lab.ranks
        assert len(old) == 2
        page.menu("Kernel", "Restart Kernel…")
        page.page.click(".jp-Dialog-button:has-text('Restart')")
        page.until(lambda: not any(r.is_running() for r in old), "the ranks are gone", 8)
        page.until(lambda: page.status() == "idle", "a new kernel")
        page.run(0)
        assert page.run(3).splitlines()[-2:] == ["[rank0] False", "[rank1] False"]
        page.shot("restart")


@pytest.mark.full
def test_a_closed_tab_misses_nothing(tmp_path, browser):
    counts = "%%distributed\nfor i in range(60):\n    print('line', i)\n    time.sleep(.2)"
    with opened(tmp_path, browser, LOAD, FIRST, counts, "%dist tail 50", "%%distributed\n(x, i)") as (lab, page):
        for i in range(2): page.run(i)
        page.start(2)
        page.until(lambda: "line 3\n" in page.text(2), "the cell has begun")
        page.menu("File", "Save Notebook")
        page.until(lambda: not page.js(f"{PANEL}.context.model.dirty"), "it is saved")
        page.close()
        time.sleep(2)
        again = Page(lab, browser, ready=("idle", "busy"))
        again.start(3)
        again.until(lambda: "line 59" in again.text(3), "the end of what was missed")
        for r in (0, 1):
            assert [f"[rank{r}] line {i}" in again.text(3).splitlines() for i in range(15, 60)] == [True] * 45
        assert again.run(4).splitlines() == ["[rank0] (0, 59)", "[rank1] (10, 59)"]
        again.shot("tail")
        assert again.errors == []


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_no_rank_outlives_the_server(tmp_path, browser, number):
    with opened(tmp_path, browser, LOAD, FIRST, WAITS) as (lab, page):
        for i in range(2): page.run(i)
        page.start(2)
        page.until(lambda: page.text(2).count("begun") == 2, "both ranks have begun")
        kernels, ranks = lab.kernels, lab.ranks
        folder = Path(ranks[0].environ()["LIBAI_WB_SESSION"])
        assert len(kernels) == 1 and len(ranks) == 2
        page.close()
        lab.close(number)
        wait_gone(ranks, 8)
        wait_gone(kernels, 8)
        sweep_sessions() # a kernel that loses its server has no time to tidy up, the next one does it
        assert not folder.exists()
