"""All that CI runs, in order; each step has a time limit and prints its seconds.

`python scripts/check.py` runs every step, `python scripts/check.py export notebooks` those two,
`--full` adds the tests marked `full` and writes reports/test-full.json; `again` runs what failed there, was not reached
or is new.
"""
import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ET
import zipfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT = "reports/test-full.json"
BIN = Path(sys.executable).parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
SMOKE = {  # notebook: parameters as YAML
    "experiments/quickstart.ipynb": "{steps: 4, layouts: [dp2, tp2]}",
    "experiments/timm_alignment.ipynb": "{recipe_name: swin_nano_fashion_mnist, steps: 20, seeds: [0]}",
    "experiments/distributed_tutorial.ipynb": "{steps: 4}",
    "experiments/compare_runs.ipynb": "{steps: 6, layouts: [dp2]}",
    "experiments/mae_fashion_mnist.ipynb": "{pretrain_steps: 20, finetune_steps: 10, seeds: [0]}",
}
IN_BARE_VENV = """
import importlib, pkgutil, sys
import libai_wb
assert libai_wb.__file__.startswith(sys.prefix), f"imported {libai_wb.__file__} and not the wheel"
assert "torch" not in sys.modules, "import libai_wb imported torch"
found = [module.name for module in pkgutil.walk_packages(libai_wb.__path__, "libai_wb.")]
names = [name for name in found if not name.startswith("libai_wb.configs.") and not name.endswith("__main__")]
for name in names: importlib.import_module(name)
print(len(names), "modules imported from the wheel")
"""


def run(*cmd, limit, cwd=ROOT, log=None):
    "Run `cmd` for at most `limit` seconds in a process group that ends with it; SystemExit when it fails."
    out = dict(stdout=log, stderr=subprocess.STDOUT) if log else {}
    child = subprocess.Popen([str(c) for c in cmd], cwd=cwd, env=ENV, stdin=subprocess.DEVNULL,
                             start_new_session=True, **out)
    try: code = child.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGABRT)  # faulthandler shows where each process stood
        time.sleep(2)
        code = f"no end within {limit} s"
    finally: end_group(child)
    if code != 0: raise SystemExit(f"{Path(cmd[0]).name} {' '.join(map(str, cmd[1:4]))} … failed: {code}")


def end_group(child):
    "Kill what is left of the process group of `child`."
    try: os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError: pass
    child.wait()


def fingerprints(root):
    "SHA-256 of every notebook and module, by path: what cleaning and exporting may not change."
    files = [*root.glob("nbs/**/*.ipynb"), *root.glob("experiments/*.ipynb"), *root.glob("libai_wb/**/*.py")]
    return {str(f.relative_to(root)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def unchanged(*cmds, root=ROOT):
    "Run `cmds` and fail if they changed a file, whether or not it is committed."
    before = fingerprints(root)
    for cmd in cmds: run(*cmd, limit=90, cwd=root)
    after = fingerprints(root)
    changed = sorted(f for f in before.keys() | after.keys() if before.get(f) != after.get(f))
    if changed:
        raise SystemExit(f"{Path(cmds[0][0]).name} changed {', '.join(changed)}: look at the change and run again.")


def count_run(log, expected):
    "How many notebooks the output of nbdev_test says it ran; its exit code is 0 even when it found none."
    ran = log.count("- Completed ")
    if ran < max(1, expected): raise SystemExit(f"nbdev_test ran {ran} of {expected} notebooks.")
    return ran


def unfinished(log):
    "The notebooks that nbdev_test started and did not complete: where it hung."
    started, completed = ({Path(line.split()[-1]).name for line in log.splitlines() if line.startswith(word)}
                          for word in ("Starting ", "- Completed "))
    return sorted(started - completed)


def clean(): unchanged([BIN/"nbdev_clean"], [BIN/"nbdev_clean", "--fname", "experiments"])


def export(): unchanged([BIN/"nbdev_export"])


def notebooks():
    "Run every notebook under nbs/ as a test."
    with tempfile.TemporaryFile("w+") as log:
        try: run(BIN/"nbdev_test", "--n_workers", 2, "--do_print", "--timing", limit=900, log=log)
        finally:
            log.seek(0)
            text = log.read()
            print(text, flush=True)
            if unfinished(text): print("not completed:", *unfinished(text), flush=True)
    print(count_run(text, len(list(ROOT.glob("nbs/[0-9]*.ipynb")))), "notebooks ran", flush=True)


def tests(full=False):
    "Run pytest; `full` runs the long tests as well and writes the report, failed or not."
    if not full: return pytest()
    pytest("-m", "full or not full", limit=14400, then=lambda xml: write_report(xml, ROOT/REPORT, collected()))


def collected(marks="full or not full"):
    "The name that a report has for each test."
    cmd = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks]
    said = subprocess.run(cmd, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout
    return [report_name(line) for line in said.splitlines() if ".py::" in line]


def report_name(node):
    "The name that junit gives a test of pytest's: its class belongs to the module."
    path, rest = node.split(".py::", 1)
    *classes, test = rest.split("::")
    return f"{'.'.join([path.replace('/', '.'), *classes])}::{test}"


def node_of(name):
    "The other way round; classes are those that begin with a capital."
    path, test = name.split("::", 1)
    parts = path.split(".")
    classes = [p for p in parts if p[:1].isupper()]
    return "::".join(["/".join(p for p in parts if p not in classes) + ".py", *classes, test])


def again():
    "Run the tests that the report has as failed or as missing, and full ones that came later; put what comes of it in."
    names = left_to_run(json.loads((ROOT/REPORT).read_text()), collected("full"))
    ids = [node_of(name) for name in names]
    if ids: pytest("-m", "full or not full", *ids, limit=14400, then=lambda xml: mend_report(xml, ROOT/REPORT))


def left_to_run(report, full):
    "Names of the tests that failed, were not reached, or are not known to a report."
    known = {row["test"]: row["outcome"] for row in report["tests"]}
    missing = report.get("missing", [])
    return [*(n for n, word in known.items() if word == "failed"), *missing, *(n for n in full if n not in {*known, *missing})]


def pytest(*args, limit=2400, then=None):
    "Run pytest, and let `then` read its results, also when tests fail."
    with tempfile.TemporaryDirectory() as tmp:
        xml = Path(tmp)/"junit.xml"
        try: run(sys.executable, "-m", "pytest", "--durations=10", f"--junitxml={xml}", *args, limit=limit)
        finally:
            if then and xml.exists(): then(xml)


def git(*args):
    "What a git command prints."
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def outcome(case):
    "One word for a junit testcase, by its child elements."
    words = dict(failure="failed", error="failed", skipped="skipped")
    return next((word for tag, word in words.items() if case.find(tag) is not None), "passed")


def rows_of(cases):
    "Each full or failed test with its seconds and the figures that it recorded."
    rows = []
    for case in cases:
        figures = {p.get("name"): p.get("value") for p in case.iter("property")}
        if figures.pop("full", None) or figures or outcome(case) == "failed":
            rows.append(dict(test=name_of(case), outcome=outcome(case), seconds=round(float(case.get("time")), 1), **figures))
    return rows


def now():
    "When, and of what."
    return dict(date=datetime.now(timezone.utc).isoformat(timespec="seconds"), commit=git("rev-parse", "HEAD"),
                uncommitted=bool(git("status", "--porcelain")))


def name_of(case):
    "A test as reports name it."
    return f"{case.get('classname')}::{case.get('name')}"


def write_report(xml, path, names=()):
    "Date, commit, machine, totals, the long tests, and those of `names` that were not reached."
    cases = list(ET.parse(xml).iter("testcase"))
    missing = sorted({*names} - {name_of(c) for c in cases})
    report = dict(**now(), python=platform.python_version(), torch=version("torch"), cores=os.cpu_count(),
                  totals={word: sum(outcome(c) == word for c in cases) for word in ("passed", "failed", "skipped")},
                  **(dict(missing=missing) if missing else {}), seconds=round(sum(float(c.get("time")) for c in cases), 1), tests=rows_of(cases))
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print("report:", path.name, flush=True)


def mend_report(xml, path):
    "Put the results of a second run, each with its own date and commit, into a report; `later` counts tests new to it."
    report, cases = json.loads(path.read_text()), list(ET.parse(xml).iter("testcase"))
    rows, old, second = {row["test"]: row for row in rows_of(cases)}, {r["test"]: r for r in report["tests"]}, now()
    for case in cases:
        name, word = name_of(case), outcome(case)
        before, missing = old.get(name), name in report.get("missing", [])
        later = before["later"] if before and "later" in before else not before and not missing
        if not later:
            if before: report["totals"][before["outcome"]] -= 1
            report["totals"][word] += 1
        if before or later or name in rows:
            old[name] = rows.get(name, dict(test=name, outcome=word)) | dict(again=second) | (dict(later=True) if later else {})
    finish_report(report, old, {name_of(c) for c in cases})
    path.write_text(json.dumps(report, indent=1) + "\n")
    print("report:", path.name, flush=True)


def finish_report(report, rows, done):
    "Its rows in order, what is still missing, and the counts of later tests."
    report["tests"] = sorted(rows.values(), key=lambda row: row["test"])
    missing = [name for name in report.pop("missing", []) if name not in done]
    later = [row["outcome"] for row in rows.values() if row.get("later")]
    if missing: report["missing"] = missing
    if later: report["later"] = {word: later.count(word) for word in ("passed", "failed", "skipped")}


def smoke():
    "Run the experiments through papermill with tiny parameters."
    with tempfile.TemporaryDirectory() as tmp:
        for name, parameters in SMOKE.items():
            run(BIN/"papermill", ROOT/name, Path(tmp)/Path(name).name, "-y", parameters, "-p", "out", f"{tmp}/out",
                "--cwd", tmp, "--no-progress-bar", "--log-output", limit=180, cwd=tmp)


def wheel():
    "Build sdist and wheel, install the wheel in a bare venv that borrows the dependencies, import all of it there."
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp/"dist", ROOT]
        run(*build, limit=120, cwd=tmp, log=subprocess.DEVNULL)
        built = next(tmp.glob("dist/*.whl"))
        missing = {f for f in fingerprints(ROOT) if f.startswith("libai_wb/")} - set(zipfile.ZipFile(built).namelist())
        if missing: raise SystemExit(f"The wheel lacks {', '.join(sorted(missing))}.")
        venv.create(tmp/"bare", symlinks=True)
        site = next(tmp.glob("bare/lib/python*/site-packages"))
        (site/"borrowed.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
        pip = [sys.executable, "-m", "pip", "--python", tmp/"bare/bin/python", "install", "-q", "--no-deps"]
        run(*pip, built, limit=90, cwd=tmp)
        run(tmp/"bare/bin/python", "-c", IN_BARE_VENV, limit=120, cwd=tmp)
        run(tmp/"bare/bin/libai-wb", "--help", limit=60, cwd=tmp, log=subprocess.DEVNULL)


STEPS = dict(clean=clean, export=export, notebooks=notebooks, tests=tests, smoke=smoke, wheel=wheel)
MORE = dict(again=again)  # only by name


def main():
    "Run the named steps (all of them by default), stopping at the first that fails."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", choices=[*STEPS, *MORE, []], metavar="step", help=", ".join([*STEPS, *MORE]))
    parser.add_argument("--full", action="store_true", help="add the tests marked full and write their report")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # so that what runs is ended too
    begin = time.monotonic()
    for name in args.steps or STEPS:
        print(f"\n== {name}", flush=True)
        start = time.monotonic()
        (STEPS | MORE)[name](**({"full": args.full} if name == "tests" else {}))
        print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"\nall steps passed in {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__": main()
