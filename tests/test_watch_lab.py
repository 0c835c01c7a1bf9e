"""The dashboard of a run in a real JupyterLab: it moves while a cell sleeps, and its button ends the run meanwhile."""
import re

import pytest
from kernels import nothing_left  # noqa: F401
from lab import browser, in_browser, opened  # noqa: F401
from test_detached import nothing_goes_on  # noqa: F401

pytestmark = in_browser
START = """from libai_wb import train, watch
run = train("vit_nano_digits", "dp2", "run", ["train.train_iter=100000", "train.evaluation.enabled=false"],
            progress=False, detach=True)"""
BOARD = ".jp-OutputArea-output [role=progressbar]"
PARTS = ".jp-OutputArea-output .widget-html-content"


@pytest.mark.full
def test_somebody_watches_a_run_and_ends_it(tmp_path, browser):  # noqa: F811
    cells = START, "watch(run)", "import time\ntime.sleep(40)", "print(run.state)"
    with opened(tmp_path, browser, *cells) as (lab, page):
        page.run(0)
        page.start(1)
        page.page.wait_for_selector(BOARD, timeout=30_000)
        text = lambda: " ".join(page.page.locator(PARTS).all_text_contents())
        page.until(lambda: "running for" in text() and re.search(r"\d samples/s", text()), "a run", 150)
        page.start(2)
        page.until(lambda: page.status() == "busy", "a busy kernel")
        done = lambda: int(re.search(r"([\d,]+) of 100,000 updates", text())[1].replace(",", ""))
        before = done()
        page.until(lambda: done() > before, "an update while the cell sleeps", 10)
        assert page.status() == "busy"
        page.until(lambda: page.page.locator(f"{PARTS} svg path").count() > 1, "a curve", 10)
        page.shot("watch-light")
        page.js("window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
        page.page.locator("body[data-jp-theme-light=false]").wait_for(state="attached", timeout=20_000)
        page.page.wait_for_timeout(1500)
        page.shot("watch-dark")
        button = page.page.get_by_role("button", name="Stop", exact=True)
        button.focus()
        page.page.keyboard.press("Enter")
        again = page.page.get_by_role("button", name="Press again to stop the run")
        again.wait_for(timeout=10_000)
        page.page.wait_for_timeout(500)
        page.page.keyboard.press("Space")
        page.until(lambda: "the run is stopped" in text() and "stopped after" in text(), "the end", 40)
        assert page.page.locator(".jp-InputPrompt").nth(2).text_content() == "[*]:"  # the cell still sleeps
        page.shot("watch-stopped")
        page.press("Interrupt the kernel")
        page.until(lambda: page.page.locator(".jp-InputPrompt").nth(2).text_content() != "[*]:", "the end of the cell")
        assert page.run(3).strip() == "stopped"
