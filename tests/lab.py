"""A JupyterLab or a Notebook 7 under Chromium, for tests that see, press and type. Screenshots go to outputs/lab/."""
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
from kernels import plain, ranks_of, words_of
from nbformat.v4 import new_code_cell, new_notebook

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
in_browser = [pytest.mark.timeout(240), pytest.mark.skipif(not CHROMIUM, reason="needs the chromium program")]

ROOT = Path(__file__).resolve().parents[1]
SHOTS = ROOT/"outputs"/"lab"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
         "--disable-sync"]
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
    "A JupyterLab server over a folder, or one of Notebook 7."
    def __init__(self, folder, program="jupyterlab"):
        self.folder, self.tree = folder, dict(jupyterlab="lab/tree", notebook="notebooks")[program]
        env = os.environ | settings_of(folder/".jupyter") | dict(OMP_NUM_THREADS="1")
        command = [sys.executable, "-m", program, *OPTIONS, f"--ServerApp.root_dir={folder}"]
        self.process = subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True,
                                        start_new_session=True)
        found = (re.search(r"http://127\.0\.0\.1:\d+/", line) for line in self.process.stderr)
        self.url = next(m[0] for m in found if m)
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    @property
    def kernels(self):
        "The kernels that it has started."
        return [p for p in psutil.Process(self.process.pid).children() if "ipykernel_launcher" in words_of(p)]

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
        self.page.goto(f"{lab.url}{lab.tree}/{name}?token=t&reset")
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
def opened(folder, browser, *cells, source=None, program="jupyterlab"):
    "A notebook of these cells, or a copy of a notebook, in a JupyterLab of its own, or in another program."
    if source: shutil.copy(source, folder/"a.ipynb")
    else: nbformat.write(new_notebook(cells=[new_code_cell(c) for c in cells], metadata=PYTHON), folder/"a.ipynb")
    lab = Lab(folder, program)
    try:
        page = Page(lab, browser)
        yield lab, page
        assert page.errors == [], page.errors
        if not page.page.is_closed(): page.close()
    finally:
        family = psutil.Process(lab.process.pid).children(recursive=True) if lab.process.poll() is None else []
        lab.close()
        for p in psutil.wait_procs(family, timeout=10)[1]: p.kill()
