"""The project as a whole: what it declares, ships and keeps in git, and that scripts/check.py can fail."""
import configparser
import re
import subprocess
import sys
import time
from importlib.metadata import entry_points, packages_distributions

import pytest
import yaml

from test_architecture import LIB, MODULES, ROOT, imports

SETTINGS = configparser.ConfigParser(delimiters=["="], interpolation=None)
SETTINGS.read(ROOT/"settings.ini", encoding="utf-8")
SETTINGS = SETTINGS["DEFAULT"]
RECIPES = [p for p in sorted((ROOT/LIB/"configs").rglob("*.py")) if "common" not in p.parts and p.name[0] != "_"]


def declared(*keys):
    "Normalised names of the requirements under `keys` of settings.ini."
    return {re.split(r"[<>=!~\[]", r)[0].lower().replace("_", "-") for k in keys for r in SETTINGS[k].split()}


def tracked():
    "What git keeps or would keep."
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [p for name in names if name and (p := ROOT/name).is_file()]


def test_environment_agrees_with_settings():
    env = yaml.safe_load((ROOT/"environment.yml").read_text())
    pip = next(d["pip"] for d in env["dependencies"] if isinstance(d, dict))
    conda = [d for d in env["dependencies"] if isinstance(d, str)]
    assert conda == [f"python={SETTINGS['min_python']}", "pip"]
    extras = re.fullmatch(r"-e \.\[([a-z,]+)\]", pip[0])
    assert len(pip) == 1 and extras, "the pip section names this project and its extras, nothing else"
    assert all(f"{extra}_requirements" in SETTINGS for extra in extras[1].split(","))


def test_no_requirement_is_declared_twice():
    for key in ("requirements", "notebook_requirements", "dev_requirements", "bench_requirements"):
        names = [re.split(r"[<>=!~\[]", r)[0] for r in SETTINGS[key].split()]
        assert len(names) == len(set(names)), key


def undeclared(modules):
    "Third-party packages that a module imports when it is imported itself and that no requirement brings."
    by_module = packages_distributions()
    for mod in modules:
        keys = ["requirements", "notebook_requirements"] if mod.name.startswith("notebook.") else ["requirements"]
        for _, path, inner in imports(mod):
            top = path.split(".")[0]
            if inner or top == LIB or top in sys.stdlib_module_names: continue
            names = {d.lower().replace("_", "-") for d in by_module.get(top, [top])}
            if not names & declared(*keys): yield f"{mod.name} imports {top}"


def test_what_is_imported_is_declared():
    assert list(undeclared(MODULES)) == []
    assert list(undeclared([MODULES[0]._replace(name="layers.linear", source="import tensorboard")]))


def test_import_is_fast_and_brings_no_torch():
    code = "import sys, libai_wb; sys.exit('torch' in sys.modules)"
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3, seconds


def test_recipes_are_shipped(): assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_loads(path):
    from libai_wb.config.lazy import LazyConfig
    cfg = LazyConfig.load(str(path))
    assert {"model", "optim", "dataloader", "train"} <= set(cfg)


def test_files_are_small():
    assert [f"{p.relative_to(ROOT)}: {p.stat().st_size}" for p in tracked() if p.stat().st_size > 2**20] == []


def test_no_path_of_a_machine():
    tops = "work", "root", "home/[a-z]+", "tmp/wb", "Users/[a-z]+"
    paths = re.compile("|".join(rf"(?<![\w.])/{top}/" for top in tops).encode())
    assert paths.search(b"in /" + b"root/x") and not paths.search(b"frame" + b"work/x ../" + b"work/x")
    found = {str(p.relative_to(ROOT)): m[0].decode() for p in tracked() if (m := paths.search(p.read_bytes()))}
    assert found == {}


def test_console_script_resolves():
    name, target = SETTINGS["console_scripts"].split("=")
    script = next(iter(entry_points(group="console_scripts", name=name)))
    assert script.value == target and callable(script.load())


def test_makefile_and_ci_parse():
    for target in ("install", "demo", "lab", "test", "test-full", "clean"):
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True, timeout=60)
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True, timeout=60)


# scripts/check.py can fail

@pytest.fixture(scope="module")
def check(load_script): return load_script("scripts/check.py")


def test_check_sees_a_changed_file(check, tmp_path):
    (tmp_path/"nbs").mkdir()
    notebook = tmp_path/"nbs"/"a.ipynb"
    notebook.write_text("{}")
    check.unchanged([sys.executable, "-c", ""], root=tmp_path)
    with pytest.raises(SystemExit, match="a.ipynb"):
        check.unchanged([sys.executable, "-c", f"open({str(notebook)!r}, 'w').write('[]')"], root=tmp_path)


def test_check_counts_notebooks(check):
    assert check.count_run("Starting a\n- Completed a\n- Completed b\n", 2) == 2
    for text, expected in (("No files were eligible for testing", 0), ("- Completed a\n", 2)):
        with pytest.raises(SystemExit, match="nbdev_test ran"): check.count_run(text, expected)


def test_check_names_what_hung(check):
    assert check.unfinished("Starting /x/a.ipynb\nStarting /x/b.ipynb\n- Completed /x/a.ipynb") == ["b.ipynb"]


def test_check_stops_what_fails_or_hangs(check):
    with pytest.raises(SystemExit, match="failed: 3"): check.run(sys.executable, "-c", "raise SystemExit(3)", limit=30)
    with pytest.raises(SystemExit, match="no end within 1 s"):
        check.run(sys.executable, "-c", "import time; time.sleep(60)", limit=1, log=subprocess.DEVNULL)


def test_check_writes_the_report(check, tmp_path, monkeypatch):
    xml = tmp_path/"junit.xml"
    xml.write_text('<testsuites><testsuite><testcase classname="t" name="a" time="2.0"><properties>'
                   '<property name="full" value="true"/><property name="top1" value="0.87"/></properties></testcase>'
                   '<testcase classname="t" name="b" time="1.0"/>'
                   '<testcase classname="t" name="c" time="0.5"><failure/></testcase></testsuite></testsuites>')
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "git", lambda *args: "0f1e2d" if "rev-parse" in args else "")
    check.write_report(xml, tmp_path/"reports"/"test-full.json")
    report = check.json.loads((tmp_path/"reports"/"test-full.json").read_text())
    assert report["commit"] == "0f1e2d" and report["seconds"] == 3.5
    assert report["totals"] == dict(passed=2, failed=1, skipped=0)
    assert report["tests"] == [dict(test="t::a", outcome="passed", seconds=2.0, top1="0.87"),
                               dict(test="t::c", outcome="failed", seconds=0.5)]
    xml.write_text('<testsuites><testsuite><testcase classname="t" name="c" time="0.4"/></testsuite></testsuites>')
    check.mend_report(xml, tmp_path/"reports"/"test-full.json")
    report = check.json.loads((tmp_path/"reports"/"test-full.json").read_text())
    assert report["totals"] == dict(passed=3, failed=0, skipped=0) and report["tests"][1]["outcome"] == "passed"
    assert report["tests"][1]["again"]["commit"] == "0f1e2d" and report["tests"][0]["top1"] == "0.87"


def test_check_goes_on_where_a_full_run_was_stopped(check, tmp_path, monkeypatch):
    xml, report = tmp_path/"junit.xml", tmp_path/"test-full.json"
    monkeypatch.setattr(check, "git", lambda *args: "0f1e2d" if "rev-parse" in args else "")
    case = '<testcase classname="t" name="{}" time="1"><properties><property name="full" value="true"/></properties></testcase>'
    whole = lambda *names: "<testsuite>" + "".join(map(case.format, names)) + "</testsuite>"
    xml.write_text(whole("a"))
    check.write_report(xml, report, ["t::a", "t::b", "t::c"])
    assert check.json.loads(report.read_text())["missing"] == ["t::b", "t::c"]
    xml.write_text(whole("b", "c"))
    check.mend_report(xml, report)
    found = check.json.loads(report.read_text())
    assert "missing" not in found and found["totals"] == dict(passed=3, failed=0, skipped=0)
    assert [row["test"] for row in found["tests"]] == ["t::a", "t::b", "t::c"]
    assert check.left_to_run(found, ["t::a", "t::d"]) == ["t::d"]
    nodes = {"tests/test_a.py::test_b[x-1]": "tests.test_a::test_b[x-1]", "tests/test_a.py::TestC::test_d": "tests.test_a.TestC::test_d"}
    assert [check.report_name(node) for node in nodes] == list(nodes.values())
    assert [check.node_of(name) for name in nodes.values()] == list(nodes)
    fails = whole("d").replace("</properties>", "</properties><failure/>")
    for xml_text, counts in ((fails, dict(passed=0, failed=1, skipped=0)), (whole("d"), dict(passed=1, failed=0, skipped=0))):
        xml.write_text(xml_text)
        check.mend_report(xml, report)
        found = check.json.loads(report.read_text())
        assert found["later"] == counts and found["totals"] == dict(passed=3, failed=0, skipped=0)
    assert [row.get("later", False) for row in found["tests"]] == [False] * 3 + [True]
