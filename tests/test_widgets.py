"""The comparison of runs in a real JupyterLab: controls, zoom, hover and click, with the mouse and the keyboard."""
import json
import re
import time

import pytest

from kernels import nothing_left  # noqa: F401
from lab import ROOT, browser, in_browser, opened  # noqa: F401

pytestmark = in_browser
SETUP = """import numpy as np
from libai_wb.notebook import LossAlign
n = np.arange(2000)
one = dict(step=n, loss=2 * np.exp(-n / 700) + .1, lr=np.linspace(.1, 0, 2000))
two = one | dict(loss=one["loss"] * (1 + 1e-3 * (n > 1200)))
align = LossAlign(dict(one=one, two=two), band=1e-5)"""
STATE = "import json; print(json.dumps(dict(x=align.view.x, log=align.view.log, clicked=align.clicked, metric=align.curves.metric)))"
PLOT = ".jp-OutputArea-output .js-plotly-plot"


def test_somebody_compares_two_runs(tmp_path, browser):  # noqa: F811
    with opened(tmp_path, browser, SETUP, "align", STATE) as (lab, page):
        page.run(0)
        page.start(1)
        plot = page.page.wait_for_selector(PLOT, timeout=30_000)
        page.page.get_by_text("two leaves the band at step 1201").wait_for(timeout=10_000)
        assert page.page.locator(f"{PLOT} .scatterlayer .trace").count() >= 4
        wide = f"(e => [e.querySelector('.svg-container').clientWidth, e.clientWidth])(document.querySelector('{PLOT}'))"
        page.until(lambda: len({*page.js(wide)}) == 1, "a plot as wide as the notebook")
        looks = page.js(f"document.querySelector('{PLOT}').data.map(t => [t.line?.color, t.showlegend])")
        assert looks[1] == ["#D55E00", True] and looks[3] == ["#D55E00", False]  # what was set arrives
        page.shot("loss-align")
        box = page.page.locator(f"{PLOT} .nsewdrag").first.bounding_box()
        x, y = box["x"] + .3 * box["width"], box["y"] + .5 * box["height"]
        line = page.js(f"""(() => {{
            const axes = document.querySelector("{PLOT}")._fullLayout, height = 2 * Math.exp(-600 / 700) + .1;
            return [axes.xaxis.l2p(600) + axes.xaxis._offset, axes.yaxis.l2p(height) + axes.yaxis._offset]; }})()""")
        at = plot.bounding_box()
        page.page.mouse.move(at["x"] + line[0], at["y"] + line[1])
        page.page.locator(".hoverlayer .hovertext").first.wait_for(timeout=5_000)
        assert "step" in page.page.locator(".hoverlayer").text_content()
        page.shot("loss-align-hover")
        page.page.mouse.down()
        page.page.mouse.up()
        said = page.page.locator(".widget-html b").get_by_text("step")
        said.wait_for(timeout=5_000)
        assert 550 < int(re.search(r"step (\d+)", said.text_content())[1]) < 650
        page.shot("loss-align-clicked")
        page.page.mouse.move(x, y)
        page.page.mouse.down()
        page.page.mouse.move(x + 150, y, steps=5)
        page.page.mouse.up()
        zoomed = f"document.querySelector('{PLOT}')._fullLayout.xaxis.range"
        page.until(lambda: page.js(zoomed)[0] > 300, "a zoom")
        points = f"document.querySelector('{PLOT}').data[0].x.length"
        page.until(lambda: 500 < page.js(points) < 700, "only the points of the range")
        shown = page.js(points)
        page.page.mouse.dblclick(x, y)
        page.until(lambda: page.js(zoomed)[0] < 1 and page.js(points) > shown, "the whole run again")
        check = page.page.get_by_label("logarithmic values")
        check.focus()
        page.page.keyboard.press("Space")
        page.until(lambda: page.js(f"document.querySelector('{PLOT}')._fullLayout.yaxis.type") == "log", "a log axis")
        page.shot("loss-align-log")
        state = json.loads(page.run(2))
        assert state["log"] and state["clicked"] is not None


@pytest.mark.full
@pytest.mark.parametrize("name", ["compare_runs", "parallel_config", "quickstart", "swin"])
def test_an_experiment_from_top_to_bottom(name, tmp_path, browser):  # noqa: F811
    "Run All, as somebody would; no cell fails, and what is shown stands still at the end."
    with opened(tmp_path, browser, source=ROOT/"experiments"/f"{name}.ipynb") as (lab, page):
        last = max(i for i, cell in enumerate(page.cells()) if cell["cell_type"] == "code")
        page.menu("Run", "Run All Cells")
        page.until(lambda: page.cells()[last].get("execution_count") and page.status() == "idle", "the end", 220)
        assert not [out for cell in page.cells() for out in cell.get("outputs", []) if out["output_type"] == "error"]
        page.shoot_all(name)


MANY = """import time
import numpy as np
from libai_wb.notebook import LossAlign
n, noise = np.arange(20_000), np.random.default_rng(0)
runs = {f"run {i:02}": dict(step=n, loss=2 * np.exp(-n / 5000) + .05 * noise.random(20_000)) for i in range(20)}
runs["run 07"]["loss"][12_345] = 9."""


@pytest.mark.full
def test_many_long_runs(tmp_path, browser, record_property):  # noqa: F811
    "400,000 points: seconds from the key to the picture and for each of ten pans; one spike is drawn."
    with opened(tmp_path, browser, MANY, "LossAlign(runs)") as (lab, page):
        page.run(0)
        page.run(1)  # modules are imported and the script of plotly is loaded
        began = time.monotonic()
        page.js("(document.querySelectorAll('.js-plotly-plot').forEach(e => e.setAttribute('data-old', 1)), 0)")
        page.start(1)
        fresh = ".jp-OutputArea-output .js-plotly-plot:not([data-old]) .scatterlayer .trace"
        page.page.wait_for_selector(fresh, timeout=30_000)
        opening = time.monotonic() - began
        assert page.js(f"document.querySelector('{PLOT}').data.some(t => Array.from(t.y ?? []).includes(9))")
        box = page.page.locator(f"{PLOT} .xaxislayer-above, {PLOT} .nsewdrag").first.bounding_box()
        x, y, pans = box["x"] + .5 * box["width"], box["y"] + .5 * box["height"], []
        page.page.locator(f"{PLOT}").first.hover()
        page.page.locator(f"{PLOT} [data-title='Pan']").click()
        for _ in range(10):
            began = time.monotonic()
            page.page.mouse.move(x, y)
            page.page.mouse.down()
            page.page.mouse.move(x + (60 if len(pans) % 2 else -60), y, steps=3)
            page.page.mouse.up()
            page.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
            pans.append(time.monotonic() - began)
        record_property("seconds_to_open", f"{opening:.2f}")
        record_property("seconds_of_a_pan", f"{sorted(pans)[5]:.3f}")
        page.shot("many-runs")
