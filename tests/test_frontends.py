"""What the experiments show in Notebook 7, and as HTML without any kernel."""
import re

import nbformat
import pytest
from lab import ROOT, SHOTS, browser, in_browser, opened  # noqa: F401
from nbconvert import HTMLExporter

pytestmark = in_browser
KEPT = sorted(p for p in (ROOT/"experiments").glob("*.ipynb") if any(c.get("outputs") for c in nbformat.read(p, 4).cells))
CURVES = """import numpy as np
from libai_wb.notebook import LossAlign
n = np.arange(500)
one = dict(step=n, loss=2 * np.exp(-n / 200))
LossAlign(dict(one=one, two=one | dict(loss=one["loss"] * (1 + 1e-3 * (n > 300)))), band=1e-5)"""


@pytest.mark.parametrize("source", KEPT, ids=lambda p: p.stem)
def test_a_page_without_a_kernel(source, tmp_path, browser):  # noqa: F811
    "Each picture is there, and nothing that only a kernel could fill is left in its place."
    page_file = tmp_path/"a.html"
    page_file.write_text(HTMLExporter().from_filename(str(source))[0])
    pictures = sum("image/png" in o.get("data", {}) for c in nbformat.read(source, 4).cells for o in c.get("outputs", []))
    page, errors = browser.new_page(viewport=dict(width=1100, height=900)), []
    page.route(re.compile("^https?:"), lambda route: route.fulfill(status=200, body="", content_type="text/javascript"))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.goto(f"file://{page_file}")
    shown = page.locator(".jp-OutputArea-output img").evaluate_all("es => es.map(e => e.complete && e.naturalWidth > 99)")
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS/f"html-{source.stem}.png", full_page=True)
    page.close()
    assert shown == [True] * pictures
    assert [e for e in errors if "require" not in e and "MathJax" not in e] == []  # these two come from elsewhere


@pytest.mark.full
def test_notebook_7(tmp_path, browser):  # noqa: F811
    with opened(tmp_path, browser, CURVES, program="notebook") as (lab, page):
        own, page.errors = page.errors, []  # what Notebook 7 says of itself before any cell has run
        assert own in ([], ["Cannot read properties of undefined (reading 'schema')"])
        page.start(0)
        page.page.wait_for_selector(".jp-OutputArea-output .js-plotly-plot", timeout=30_000)
        page.page.get_by_text("two leaves the band at step 301").wait_for(timeout=10_000)
        page.shot("notebook-7")
