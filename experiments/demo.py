"""`make demo`: run the quickstart notebook, keep what it shows, and say in one line how it went.

`python experiments/demo.py --steps 8 --layouts dp2,tp2 --out DIR` runs a smaller one.
"""
import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ("quickstart.ipynb", "quickstart.html", "report.md", "losses.png", "summary.json")
NEEDS_DISK, NEEDS_MEMORY = 100e6, 2.5e9  # bytes: the results; the notebook and two ranks


class Trouble(Exception): "What stands in the way, in one sentence."


def check_room(disk, memory):
    "Refuse a machine with too few free bytes of `disk` or `memory`."
    if disk < NEEDS_DISK:
        raise Trouble(f"{disk / 1e6:.0f} MB of disk are free and the results need {NEEDS_DISK / 1e6:.0f} MB; free some, "
                      "or choose another place with DEMO_ARGS='--out DIR'.")
    if memory < NEEDS_MEMORY:
        raise Trouble(f"{memory / 1e9:.1f} GB of memory are free and the notebook with two ranks needs "
                      f"{NEEDS_MEMORY / 1e9:.1f} GB; close some programs and run it again.")


def check_extra(names=("papermill", "nbconvert", "nbformat", "ipykernel", "psutil")):
    "Refuse to start when a package of the notebook extra is missing."
    if missing := [n for n in names if not importlib.util.find_spec(n)]:
        raise Trouble(f"The demo needs the notebook extra and {missing[0]} is not installed; run `make demo`, or "
                      "`pip install -e '.[notebook]'` in the project's folder.")


def without_widgets(nb):
    "The notebook without progress bars, which are blank once their kernel is gone."
    nb.metadata.pop("widgets", None)
    for cell in nb.cells:
        shown = [o for o in cell.get("outputs", []) if "application/vnd.jupyter.widget-view+json" not in o.get("data", {})]
        if "outputs" in cell: cell.outputs = shown
    return nb


def sentence(error):
    "What a failed cell said, without colours and traceback."
    text = re.sub(r"\x1b\[[0-9;]*m", "", error.evalue).strip().splitlines() or ["no message"]
    return text[0] if text[0].startswith("✘") else f"The quickstart stopped in a cell: {error.ename}: {text[0]}"


def prepare(out):
    "Check what a run needs, and make room for its results in `out`."
    check_extra()
    sys.path.insert(0, str(ROOT))  # it also runs where the package is not installed
    from libai_wb.mesh.room import free_memory
    check_room(shutil.disk_usage(next(p for p in (out, *out.parents) if p.exists())).free, free_memory())
    out.mkdir(parents=True, exist_ok=True)
    for name in RESULTS: (out/name).unlink(missing_ok=True)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # the kernel of this environment, not another one of yours


def execute(out, parameters):
    "Run the notebook with a progress bar; it writes its results into `out`."
    import papermill
    papermill.execute_notebook(ROOT/"experiments"/"quickstart.ipynb", out/RESULTS[0], dict(parameters, out=str(out)), cwd=ROOT,
                               kernel_name="python3", progress_bar=True, extra_arguments=["--log-level=ERROR"])


def export(out):
    "Clean the executed notebook and write it as a page."
    import nbformat
    from nbconvert import HTMLExporter
    nb = without_widgets(nbformat.read(out/RESULTS[0], as_version=4))
    nbformat.write(nb, out/RESULTS[0])
    page, _ = HTMLExporter(mathjax_url="", exclude_input_prompt=True, exclude_output_prompt=True).from_notebook_node(nb)
    (out/RESULTS[1]).write_text(page, encoding="utf-8")


def run(out, parameters):
    "Run, export whatever was reached, and hand back the line that says how it went."
    prepare(out)
    from papermill.exceptions import PapermillExecutionError
    try: execute(out, parameters)
    except PapermillExecutionError as e: raise Trouble(f"{sentence(e)}\n  as far as it went: {out/RESULTS[0]}") from None
    finally:
        if (out/RESULTS[0]).exists(): export(out)
    return report(json.loads((out/"summary.json").read_text()))


def report(facts):
    "How it went, and what this machine was too small for."
    left = ", ".join(facts["left_out"])
    return facts["line"] + (f"\n  not run, because this machine carries no more ranks: {left}" if left else "")


def parse(argv=None):
    "The folder, and the notebook's parameters that were given."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT/"outputs"/"quickstart", help="folder for the results")
    parser.add_argument("--steps", type=int, help="optimizer updates (60)")
    parser.add_argument("--layouts", type=lambda text: text.split(","), help="what to compare (dp2,tp2,pp2,dp2tp2)")
    args = parser.parse_args(argv)
    return args.out.resolve(), {k: v for k in ("steps", "layouts") if (v := getattr(args, k)) is not None}


def main(argv=None):
    "Exit code 0, or another one with a sentence."
    out, parameters = parse(argv)
    began = time.monotonic()
    try: print(run(out, parameters), *(f"  {out/name}" for name in RESULTS), f"  {time.monotonic() - began:.0f} s", sep="\n")
    except Trouble as e: return print(f"✘ {str(e).removeprefix('✘ ')}", file=sys.stderr) or 1
    except KeyboardInterrupt: return print("\n✘ You stopped the demo.", file=sys.stderr) or 130


if __name__ == "__main__": sys.exit(main())
