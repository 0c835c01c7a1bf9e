"""Figures of the README: accuracy of the shipped recipes (minutes, so only in `make test-full`)."""
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from libai_wb.config import LazyCall
from libai_wb.engine.build import load_recipe
from libai_wb.engine.default import train

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


class PixelModel(nn.Sequential):
    "Softmax regression on the pixels, the yardstick: what a model without a transformer reaches."
    def __init__(self): super().__init__(nn.Flatten(), nn.Linear(28 * 28, 10))


def top1(cfg, out, layout="1"):
    run = train(cfg, layout=layout, out=out, progress=False)
    return run, run.summary["metrics"]["Acc@1"]


@pytest.mark.parametrize("layout", ["1", "dp2"])
def test_vit_micro_on_fashion_mnist(tmp_path, record_property, layout):
    run, accuracy = top1(load_recipe("vit_micro_fashion_mnist"), tmp_path / "run", layout)
    record_property("top1", f"{accuracy:.2f}")
    record_property("seconds_of_training", f"{run.summary['seconds']:.0f}")
    assert accuracy >= 85


def test_linear_model_on_the_pixels(tmp_path, record_property):
    cfg = load_recipe("vit_micro_fashion_mnist")
    cfg.model = LazyCall(PixelModel)()
    _, accuracy = top1(cfg, tmp_path / "run")
    record_property("top1", f"{accuracy:.2f}")
    assert 75 < accuracy < 88


@pytest.mark.parametrize("name,least", [("vit_nano_digits", 95), ("swin_nano_digits", 90), ("swinv2_nano_digits", 94)])
def test_nano_on_digits(tmp_path, record_property, name, least):
    _, accuracy = top1(load_recipe(name), tmp_path / "run")
    record_property("top1", f"{accuracy:.2f}")
    assert accuracy >= least


def executed(name, out, **parameters):
    "The summary that a notebook of experiments/ writes; whether its own assertions held is asserted by the caller."
    notebook = Path(__file__).resolve().parents[1]/"experiments"/f"{name}.ipynb"
    given = [word for key, value in parameters.items() for word in ("-p", key, str(value))]
    subprocess.run([Path(sys.executable).parent/"papermill", notebook, out/"done.ipynb", "-p", "out", out, *given,
                    "--cwd", out, "--no-progress-bar"], check=False)
    return json.loads((out/"summary.json").read_text())


@pytest.mark.parametrize("recipe,steps", [("vit_micro_fashion_mnist", 1500), ("swin_nano_fashion_mnist", 2000)])
def test_the_recipe_through_timm(tmp_path, record_property, recipe, steps):
    "The notebook trains both sides; its own verdict is the assertion below."
    facts = executed("timm_alignment", tmp_path, recipe_name=recipe, steps=steps)
    for side, runs in facts["top1"].items():
        record_property(f"top1_{side}", " ".join(f"{x:.2f}" for x in runs))
        record_property(f"mean_{side}", f"{statistics.mean(runs):.2f}")
        record_property(f"std_{side}", f"{statistics.stdev(runs):.2f}")
    ours, timm = facts["top1"]["libai_wb"], facts["top1"]["timm"]
    assert len(ours) == len(timm) == 3 and facts["steps"] == steps
    assert abs(statistics.mean(ours) - statistics.mean(timm)) <= max(.5, statistics.stdev(timm))


def test_masked_autoencoder_on_fashion_mnist(tmp_path, record_property):
    "Pre-training halves its loss at least; fine-tuning on 1,000 labels is reported beside training from scratch."
    facts = executed("mae_fashion_mnist", tmp_path)
    record_property("loss", f"{facts['first_loss']:.3f} → {facts['last_loss']:.3f}")
    for start, runs in facts["top1"].items(): record_property(start, " ".join(f"{x:.2f}" for x in runs))
    assert facts["last_loss"] <= facts["first_loss"] / 2 and all(len(runs) == 3 for runs in facts["top1"].values())
