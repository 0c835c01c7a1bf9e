"""The magics in a real JupyterLab: what somebody sees, presses and types. Screenshots go to outputs/lab/."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import nbformat
import psutil
import pytest
from kernels import LOAD, nothing_left, plain, ranks_of, wait_gone  # noqa: F401
from nbformat.v4 import new_code_cell, new_notebook

from libai_wb.notebook.rank import sweep_sessions

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(not CHROMIUM, reason="needs the chromium program")]

ROOT = Path(__file__).resolve().parents[1]
SHOTS = ROOT/"outputs"/"lab"
TUTORIAL = ROOT/"experiments"/"distributed_tutorial.ipynb"
FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync".split()
OPTIONS = ["--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root", "--IdentityProvider.token=t",
           "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
           "--expose-app-in-browser"]
PYTHON = dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"))
PANEL = "window.jupyterapp.shell.currentWidget"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


def settings_of(folder):
    "Environment of a JupyterLab that keeps what it remembers in `folder` and asks no questions."
    kinds = dict(JUPYTER_CONFIG_DIR="config", JUPYTER_DATA_DIR="data", JUPYTER_RUNTIME_DIR="runtime",
                 JUPYTERLAB_SETTINGS_DIR="settings", JUPYTERLAB_WORKSPACES_DIR="workspaces")
    news = folder/"settings"/"@jupyterlab"/"apputils-extension"/"notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text(json.dumps(dict(fetchNews="false", checkForUpdates=False)))
    return {k: str(folder/v) for k, v in kinds.items()}


class Lab:
    "A JupyterLab server over a folder."
    def __init__(self, folder):
        self.folder = folder
        env = os.environ | settings_of(folder/".jupyter") | dict(OMP_NUM_THREADS="1")
        command = [sys.executable, "-m", "jupyterlab", *OPTIONS, f"--ServerApp.root_dir={folder}"]
        self.process = subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True,
                                        start_new_session=True)
        found = (re.search(r"http://127\.0\.0\.1:\d+/", line) for line in self.process.stderr)
        self.url = next(m[0] for m in found if m)
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    @property
    def kernels(self):
        "The kernels that it has started."
        return [p for p in psutil.Process(self.process.pid).children() if "ipykernel_launcher" in p.cmdline()]

    @property
    def ranks(self): return [r for k in self.kernels for r in ranks_of(k.pid)]

    def close(self, number=signal.SIGTERM):
        "End the server, and say how long it took to end."
        if self.process.poll() is not None: return
        os.kill(self.process.pid, number)
        self.process.wait(20)


class Page:
    "A notebook in a browser tab."
    def __init__(self, lab, browser, name="a.ipynb", ready=("idle",)):
        self.errors, self.page = [], browser.new_page(viewport=dict(width=1100, height=900))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.goto(f"{lab.url}lab/tree/{name}?token=t&reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.until(lambda: self.status() in ready, "the kernel is ready", 60)

    def js(self, code): return self.page.evaluate(f"() => {code}")
    def cells(self): return self.js(f"{PANEL}.context.model.toJSON().cells")
    def status(self): return self.js(f"{PANEL}?.sessionContext?.session?.kernel?.status")
    def text(self, index): return shown(self.cells()[index])

    def until(self, fact, what, seconds=30):
        "Wait until `fact()` holds."
        end = time.monotonic() + seconds
        while not (found := fact()):
            assert time.monotonic() < end, f"{what}: not within {seconds} s; the cells show {self.texts()}"
            self.page.wait_for_timeout(50)
        return found

    def texts(self): return [shown(c)[-300:] for c in self.cells() if c["cell_type"] == "code"]

    def menu(self, *names):
        "Choose from a menu."
        self.page.click(f".lm-MenuBar-itemLabel:text-is('{names[0]}')")
        self.page.click(f".lm-Menu-itemLabel:text-is('{names[1]}')")

    def press(self, title):
        "Press a button of the toolbar."
        self.page.locator(".jp-NotebookPanel-toolbar").get_by_title(title).first.click()

    def start(self, index):
        "Run a cell with Ctrl-Enter, as somebody would; returns at once."
        self.js(f"({PANEL}.content.deselectAll(), {PANEL}.content.activeCellIndex = {index})")
        self.js(f"{PANEL}.content.scrollToItem({index})")
        self.page.locator(".jp-Notebook .jp-mod-active .jp-InputPrompt").click()
        self.page.keyboard.press("Control+Enter")

    def done(self, index, seconds=40):
        "Wait for the end of a cell; what it shows."
        fact = lambda: self.cells()[index].get("execution_count") and self.status() == "idle"
        self.until(fact, f"cell {index} is done", seconds)
        return self.text(index)

    def run(self, index, seconds=40):
        before = self.cells()[index].get("execution_count")
        self.start(index)
        self.until(lambda: self.cells()[index].get("execution_count") != before or self.status() == "busy", "a start")
        return self.done(index, seconds)

    def answer(self, text):
        "Type into the box below a cell."
        box = self.page.wait_for_selector(".jp-Stdin-input", timeout=20_000)
        box.click()
        self.page.keyboard.type(text)
        self.shot("typing")
        self.page.keyboard.press("Enter")
        box.wait_for_element_state("hidden")

    def shot(self, name):
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS/f"{name}.png")

    def shoot_all(self, name):
        "Screenshots of the notebook from top to bottom."
        outer = self.page.locator(".jp-NotebookPanel .jp-WindowedPanel-outer")
        outer.evaluate("e => e.scrollTo(0, 0)")
        for n in range(30):
            self.page.wait_for_timeout(400)
            self.shot(f"{name}-{n}")
            if not outer.evaluate("e => { const y = e.scrollTop; e.scrollBy(0, 700); return e.scrollTop > y }"): return

    def close(self): self.page.close()


def shown(cell):
    "What a cell shows, as text."
    parts = []
    for out in cell.get("outputs", []):
        data = out.get("data", {}).get("text/plain", "")
        parts += ["\n".join(out.get("traceback", [])), "".join(out.get("text", "")), "".join(data)]
    return plain("".join(parts))


def kinds(cell): return [out["output_type"] for out in cell.get("outputs", [])]


@contextmanager
def opened(folder, browser, *cells, source=None):
    "A notebook of these cells, or a copy of a notebook, in a JupyterLab of its own."
    if source: shutil.copy(source, folder/"a.ipynb")
    else: nbformat.write(new_notebook(cells=[new_code_cell(c) for c in cells], metadata=PYTHON), folder/"a.ipynb")
    lab = Lab(folder)
    try:
        page = Page(lab, browser)
        yield lab, page
        assert page.errors == []
        if not page.page.is_closed(): page.close()
    finally:
        family = psutil.Process(lab.process.pid).children(recursive=True) if lab.process.poll() is None else []
        lab.close()
        for p in psutil.wait_procs(family, timeout=10)[1]: p.kill()


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
