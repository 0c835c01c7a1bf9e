"""The demo's own parts, the quickstart as it is kept, and what README says; scripts/check.py runs the quickstart itself."""
import configparser
import re
import shlex
import subprocess
from types import SimpleNamespace

import nbformat
import pytest

from test_architecture import ROOT

README = (ROOT/"README.md").read_text(encoding="utf-8")
NOTEBOOK = nbformat.read(ROOT/"experiments"/"quickstart.ipynb", as_version=4)


@pytest.fixture(scope="module")
def demo(load_script): return load_script("experiments/demo.py")


# the demo

def test_demo_needs_room(demo):
    demo.check_room(1e9, 8e9)
    with pytest.raises(demo.Trouble, match="50 MB of disk are free and the results need 100 MB"): demo.check_room(5e7, 8e9)
    with pytest.raises(demo.Trouble, match="1.0 GB of memory are free .* needs 2.5 GB"): demo.check_room(1e9, 1e9)


def test_demo_names_a_missing_extra(demo):
    demo.check_extra()
    with pytest.raises(demo.Trouble, match="no_such_package is not installed; run `make demo`"):
        demo.check_extra(["json", "no_such_package"])


def test_demo_stops_with_a_sentence(demo, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "NEEDS_MEMORY", 1e18)
    assert demo.main(["--out", str(tmp_path/"new")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("✘ ") and "of memory are free" in said and said.count("\n") == 1
    assert not (tmp_path/"new").exists()


def test_demo_clears_only_its_results(demo, tmp_path):
    for name in (*demo.RESULTS, "mine.txt"): (tmp_path/name).touch()
    demo.prepare(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_demo_says_what_a_cell_said(demo):
    failed = SimpleNamespace(ename="ValueError", evalue="\x1b[31mno room\x1b[0m\nTraceback")
    assert demo.sentence(failed) == "The quickstart stopped in a cell: ValueError: no room"
    assert demo.sentence(SimpleNamespace(ename="AssertionError", evalue="✘ only 3 of 4 follow")) == "✘ only 3 of 4 follow"
    assert demo.sentence(SimpleNamespace(ename="KeyError", evalue="")) == "The quickstart stopped in a cell: KeyError: no message"


def test_demo_drops_blank_widgets(demo):
    v4 = nbformat.v4
    bar = v4.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "0%"})
    text = v4.new_output("stream", text="done")
    nb = v4.new_notebook(cells=[v4.new_markdown_cell("a"), v4.new_code_cell("b", outputs=[bar, text])], metadata={"widgets": {}})
    nb = demo.without_widgets(nb)
    assert nb.cells[1].outputs == [text] and "widgets" not in nb.metadata


def test_demo_reports_what_was_left_out(demo):
    assert demo.report(dict(line="✔ 4 layouts follow", left_out=[])) == "✔ 4 layouts follow"
    assert demo.report(dict(line="✔ 3 layouts follow", left_out=["dp2tp2"])).endswith("no more ranks: dp2tp2")


def test_demo_arguments(demo, tmp_path):
    out, parameters = demo.parse(["--out", str(tmp_path), "--steps", "4", "--layouts", "dp2,tp2"])
    assert out == tmp_path and parameters == dict(steps=4, layouts=["dp2", "tp2"])
    assert demo.parse([]) == (ROOT/"outputs"/"quickstart", {})


# the notebook

def test_quickstart_is_short_and_clean():
    assert len(NOTEBOOK.cells) <= 18
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in NOTEBOOK.cells)
    assert max(len(line) for cell in NOTEBOOK.cells for line in cell.source.splitlines()) <= 120


def test_quickstart_parameters_are_those_that_are_passed(demo):
    cell, = [c for c in NOTEBOOK.cells if "parameters" in c.metadata.get("tags", [])]
    names = set(re.findall(r"^(\w+) =", cell.source, re.M))
    passed = set(demo.parse(["--steps", "1", "--layouts", "dp2"])[1]) | {"out"}
    assert names == {"recipe", "layouts", "steps", "seed", "out"} and passed <= names


# README

def fences(language):
    "The code blocks of README in `language`."
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands():
    "The shell commands of README, without comments."
    return [shlex.split(line, comments=True) for block in fences("sh") for line in block.splitlines() if line]


def test_readme_is_short_and_finished():
    assert README.count("\n") <= 150 and "@@" not in README
    assert max(map(len, README.splitlines())) <= 240


def test_readme_pictures_are_light():
    names = re.findall(r"!\[[^]]+\]\((.+?)\)", README)
    assert names == ["docs/losses.png", "docs/widgets.png"]
    assert max((ROOT/name).stat().st_size for name in names) <= 150_000


def test_readme_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\((.+?)\)", README) if not link.startswith("http")]
    paths = re.findall(r"`((?:nbs|experiments|libai_wb|tests)/[^`]*)`", README)
    assert links and paths and [p for p in links + paths if not (ROOT/p).exists()] == []


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_readme_command_exists(words):
    from libai_wb.cli import _parse
    if words[0] == "make": subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True, timeout=60)
    else:
        rest = words[words.index("libai_wb.cli") + 1:] if words[0] == "torchrun" else words[1:]
        assert words[0] in ("libai-wb", "torchrun") and callable(_parse(rest).function)


@pytest.mark.parametrize("source", fences("python"))
def test_readme_imports_work(source):
    lines = [line for line in source.splitlines() if not line.startswith("%")]
    compile("\n".join(lines), "README", "exec")
    for line in lines:
        if line.startswith("from libai_wb"): exec(line, {})


def test_readme_names_recipes_that_are_shipped():
    from libai_wb.engine.build import recipe_names
    table = README.split("## Recipes")[1].split("## ")[0]
    named = re.findall(r"^\| `(\w+)`", table, re.M)
    assert len(named) > 1 and set(named) <= set(recipe_names())


def test_readme_version_of_python_is_the_declared_one():
    settings = configparser.ConfigParser(delimiters=["="], interpolation=None)
    settings.read(ROOT/"settings.ini", encoding="utf-8")
    assert f"Python {settings['DEFAULT']['min_python']} or newer" in README


def test_the_second_comparison_with_timm_is_the_same_notebook():
    "The kept run for Swin has the cells of the one for ViT, and parameters of its own."
    first, second = (nbformat.read(ROOT/"experiments"/f"timm_alignment{x}.ipynb", 4).cells for x in ("", "_swin"))
    injected = [c for c in second if "injected-parameters" in c.metadata.get("tags", [])]
    assert [c.source for c in second if c not in injected] == [c.source for c in first]
    assert len(injected) == 1 and "swin_nano_fashion_mnist" in injected[0].source
