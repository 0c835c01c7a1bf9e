"""The form for a layout says what training says, hands back configs as they were, writes commands that run; in a browser too."""
import os
import random
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from lab import ROOT, browser, in_browser, opened  # noqa: F401
from libai_wb.config.checks import diff
from libai_wb.config.lazy import LazyConfig
from libai_wb.engine.build import check_config, load_recipe, recipe_names
from libai_wb.engine.runs import Run
from libai_wb.mesh.topology import ParallelLayout
from libai_wb.notebook.layout_commands import command_text
from libai_wb.notebook.layout_fields import option_choices
from libai_wb.notebook.layout_form import LayoutForm
from libai_wb.notebook.parallel_config import ParallelConfigWidget

NANO = "vit_nano_digits"
EXPERIMENT = ROOT/"experiments"/"parallel_config.ipynb"


# what it says

MISTAKES = [  # values, the fields that are blamed, what is said
    (dict(dp=0), ["dp"], "dp=0 in a layout must be 1 or more"),
    (dict(dp="two"), ["dp"], "'two' must be a whole number"),
    (dict(tp=""), ["tp"], "is empty and must be a whole number"),
    (dict(tp=256), ["tp"], "cuts nothing"),
    (dict(pp=7), ["pp"], "pp=7 stages need at least 7 layers and the model has 4"),
    (dict(pp=2, settings="train.dist.custom_pipeline_stage_id=[0,0,1]"), ["pp"], "must list a stage for each of 4 layers"),
    (dict(devices=3, tp=2, dp=None), ["devices"], "3 ranks do not divide into tp 2 × pp 1 = 2"),
    (dict(devices=4, dp=2), ["devices"], "2 ranks and 4 are running"),
    (dict(per_node=3, dp=2), ["per_node"], "2 ranks do not fill nodes of 3 devices"),
    (dict(memory="much"), ["memory"], "must be a number above 0"),
    (dict(per_node="abc"), ["per_node"], "'abc' must be a whole number of 1 or more"),
    (dict(per_node=-2, device="cuda"), ["per_node"], "must be a whole number of 1 or more"),
    (dict(dp=10**9), ["dp"], "has 1,000,000,000 ranks and a form shows 65,536 at most"),
    (dict(layout="dp2tp"), ["layout"], "is not understood"),
    (dict(layout="dp2+acc0"), ["layout"], "acc=0 in a layout must be 1 or more"),
    (dict(dp=3), ["global_batch"], "Global batch 64 is not micro-batch ? × dp 3"),
    (dict(global_batch=None), ["global_batch"], "Neither train.global_batch_size nor"),
    (dict(global_batch=-4), ["global_batch"], "must be a whole number of 1 or more"),
    (dict(micro_batch=5), ["micro_batch"], "Global batch 64 is not micro-batch 5"),
    (dict(acc=5), ["acc"], "accumulation 5"),
    (dict(pp=4, global_batch=2), ["global_batch"], "needs at least 4 micro-batches and each replica has 2 rows"),
    (dict(zero=1), ["zero"], "asks for zero1, which this version does not run yet"),
    (dict(ckpt=True, sp=True), ["ckpt", "sp"], "asks for ckpt, which this version does not run yet"),
    (dict(compile=True), ["compile"], "asks for compile"),
    (dict(schedule="zerobubble"), ["schedule"], "asks for zerobubble"),
    (dict(dtype="bf16"), ["dtype"], "asks for bf16"),
    (dict(random="exakt"), ["random"], "train.random.mode='exakt' is unknown"),
    (dict(settings="train.sead=1"), ["settings"], "did you mean train.seed"),
    (dict(settings="train.seed"), ["settings"], "is not of the form key=value"),
    (dict(settings="model.num_heads=5"), ["settings"], ""),
    (dict(settings="+model.dept=5"), ["settings"], "dept"),
    (dict(pp=7, zero=1, acc=3), ["acc", "pp", "zero"], "asks for zero1"),
]


@pytest.mark.parametrize("values, blamed, words", MISTAKES, ids=lambda v: "-".join(v) if isinstance(v, (dict, list)) else "")
def test_a_mistake_is_told_beside_its_field(values, blamed, words):
    messages = LayoutForm(NANO, device="cpu").set(**values).messages
    assert sorted(messages) == blamed and words in " ".join(messages.values())
    assert all("\n" not in m and m for m in messages.values())


@pytest.mark.parametrize("name, text", [("per_node", "abc"), ("per_node", "1__0"), ("memory", "1__0"), ("dp", "two")])
def test_a_mistake_leaves_the_rest_of_the_panel_right(name, text):
    "Typed into a control: nothing is raised, nothing can be launched, and the next field is heard."
    widget = ParallelConfigWidget(NANO, "dp2", "cpu")
    bundle, panel = widget._repr_mimebundle_(), widget.panel
    panel.controls[name].value = text
    good = text == "1__0" and name == "memory"  # ten gigabytes
    assert bundle and bool(panel.said[name].value) == panel.buttons["launch"].disabled == bool(widget.messages) != good
    panel.controls["tp"].value = 2
    assert widget.form.values["tp"] == 2 and widget.figures() is not None and widget.text()
    panel.controls[name].value = ""
    assert widget.messages == {}
    widget.close()


@pytest.mark.parametrize("seed, forms", [(0, 50), pytest.param(1, 200, marks=pytest.mark.full)])
def test_the_form_and_training_agree(seed, forms):
    "Random forms: both refuse, or both have the same sums."
    draw, form, kept = random.Random(seed), LayoutForm(NANO, device="cpu"), 0
    for _ in range(forms):
        values = dict(dp=draw.choice([1, 2, 3, 4]), tp=draw.choice([1, 2, 4]), pp=draw.choice([1, 2, 3, 4, 5]),
                      acc=draw.choice([None, None, 1, 2, 4]), schedule=draw.choice(["1f1b", "gpipe", "interleaved"]),
                      zero=draw.choice([0, 0, 0, 1]), global_batch=draw.choice([16, 48, 64, 96]),
                      micro_batch=draw.choice([None, None, 4, 16]))
        said = form.set(**values)
        cfg = load_recipe(NANO, [f"train.global_batch_size={values['global_batch']}",
                                 f"train.train_micro_batch_size={values['micro_batch'] or 'null'}"])
        layout = ParallelLayout(**{k: v for k, v in values.items() if "batch" not in k})
        try: plan = check_config(cfg, layout)
        except ValueError: assert said.messages, values
        else:
            assert (said.messages, said.plan, said.layout) == ({}, plan, layout)
            kept += 1
    assert .1 < kept / forms < .9


def test_every_word_of_the_grammar_is_a_field():
    "What a later version adds to the layout and its grammar is shown, and refused by name as long as it does not run."
    form = LayoutForm(NANO, "1", "cpu")
    assert {f.name for f in fields(ParallelLayout)} < set(form.fields)
    for name, values in option_choices().items():
        for value in values or (2,):
            layout = replace(ParallelLayout(), **{name: value})
            said = form.set(**{name: value})
            try: layout.refuse_unbuilt()
            except ValueError as e: assert said.messages == {name: str(e)}
            else: assert said.messages == {}
            assert said.layout == layout
        form.set(layout="1")


# what it hands back

@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_comes_back_unchanged(name):
    form = LayoutForm(name, device="cpu")
    assert form.verdict.messages == {} and form.verdict.changes == []
    assert diff(load_recipe(name), form.verdict.cfg) == []
    assert LazyConfig.to_py(load_recipe(name)) == LazyConfig.to_py(form.verdict.cfg)


def test_a_config_with_everything_set_comes_back_unchanged():
    cfg = load_recipe(NANO, ["train.layout=dp2tp2+acc2+gpipe", "train.train_micro_batch_size=16", "train.random.mode=per_shard",
                             "train.num_accumulation_steps=8", "+model.drop_path_rate=0.1"])
    before = LazyConfig.to_py(cfg)
    widget = ParallelConfigWidget(cfg, device="cpu")
    assert widget.messages == {} and LazyConfig.to_py(widget.cfg) == before and str(widget.layout) == "dp2tp2+acc2+gpipe"
    widget.set(dp=4, acc=1)
    widget.set(dp=2, acc=2)
    assert diff(cfg, widget.cfg) == [] and LazyConfig.to_py(cfg) == before
    other = ParallelConfigWidget(cfg, "tp2")
    assert [str(c) for c in diff(cfg, other.cfg)] == ["  train.layout: 'dp2tp2+acc2+gpipe' -> 'tp2'"]
    assert "accumulation" in other.messages["micro_batch"]  # 64 is not 16 × 8, as training would say


# what it writes down

@pytest.mark.timeout(180)
@pytest.mark.full
@pytest.mark.parametrize("kind", ["shell", "torchrun", "sbatch"])
def test_the_command_trains(kind, tmp_path):
    "Two ranks, started by the line as it stands; srun is played by a script that runs what it is given."
    form = LayoutForm(NANO, "dp2", "cpu")
    form.set(global_batch=32, settings="train.train_iter=3\ntrain.evaluation.enabled=false\ntrain.output_dir='my runs'")
    tools = tmp_path/"tools"
    tools.mkdir()
    (tools/"srun").write_text('#!/bin/sh\nexec "$@"\n')
    (tools/"srun").chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | dict(PATH=path, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(["bash", "-c", command_text(form, kind)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path/"my runs"/f"{NANO}-dp2")
    assert (run.state, len(run.metrics), run.summary["world"]) == ("finished", 3, 2)
    assert run.config.train.global_batch_size == 32


def test_a_config_of_python_is_named_after_it_is_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    widget = ParallelConfigWidget(load_recipe(NANO, ["train.seed=5"]), "dp2", "cpu")
    first, line = widget.command().splitlines()
    assert first == "# first write the config: .save('VisionTransformer.yaml'), or the button Save config"
    assert line == "libai-wb train VisionTransformer.yaml --layout dp2 --device cpu"
    widget.save("VisionTransformer.yaml")
    assert diff(load_recipe("VisionTransformer.yaml"), widget.cfg) == []


# in a browser

FORM = ".libai-wb-form"


class TestInBrowser:
    pytestmark = in_browser

    def open_form(self, page):
        "Run the first cells of the experiment, up to the one that shows the form."
        cells = [i for i, c in enumerate(page.cells()) if c["cell_type"] == "code"][:3]
        for i in cells[:2]: page.run(i)
        page.start(cells[2])
        page.page.locator(f"{FORM} [role=img] svg").first.wait_for(timeout=60_000)
        page.done(cells[2], 60)
        return page.page.locator(FORM)

    def value_after(self, page, label, text):
        "Type into a field and leave it by the keyboard."
        field = page.page.get_by_label(label, exact=True)
        field.fill(text)
        field.press("Tab")

    def test_somebody_chooses_a_layout_and_starts_it(self, tmp_path, browser):  # noqa: F811
        with opened(tmp_path, browser, source=EXPERIMENT) as (lab, page):
            form = self.open_form(page)
            mesh, layout = form.locator("[role=img]").first, page.page.get_by_label("Layout", exact=True)
            assert layout.input_value() == "dp2" and "rank 1" in mesh.get_attribute("aria-label")
            form.get_by_text("parameters 208 kB").first.wait_for(timeout=60_000)  # the memory
            page.shot("parallel-config")
            self.value_after(page, "Ranks that share each weight (tp)", "2")
            page.until(lambda: layout.input_value() == "dp2tp2", "a new layout")
            page.until(lambda: "rank 3 heads 2–3" in form.locator("[role=img]").first.get_attribute("aria-label"), "a picture")
            page.until(lambda: "train.layout: None -> 'dp2tp2'" in form.inner_text(), "a new config")
            self.value_after(page, "Global batch (samples)", "31")
            alert = form.get_by_role("alert").filter(has_text="Global batch 31 is not micro-batch")
            alert.first.wait_for(timeout=10_000)
            launch = form.get_by_role("button", name="Launch")
            page.until(launch.is_disabled, "no launch")
            page.page.get_by_label("ZeRO stage").select_option("1")
            form.get_by_role("alert").filter(has_text="asks for zero1, which").first.wait_for(timeout=10_000)
            page.shot("parallel-config-refused")
            page.page.get_by_label("ZeRO stage").select_option("off")
            self.value_after(page, "Global batch (samples)", "32")
            self.value_after(page, "Layout", "dp2")
            page.until(launch.is_enabled, "a launch")
            command = page.page.get_by_label("Command", exact=True)
            page.page.get_by_label("Command for").select_option("torchrun")
            page.until(lambda: "torchrun --standalone --nproc-per-node 2" in command.input_value(), "a command")
            launch.click()
            said = form.locator(".libai-wb-note").filter(has_text="outputs/parallel_config/vit_nano_digits-dp2")
            page.until(lambda: "finished, update 40 of 40" in said.last.inner_text(), "the end of the run", 100)
            runs = [Run(p.parent) for p in (tmp_path/"outputs").rglob("summary.json")]
            assert [(r.state, r.summary["layout"], len(r.metrics)) for r in runs] == [("finished", "dp2", 40)]
            assert runs[0].config.train.global_batch_size == 32
            page.shot("parallel-config-run")

    @pytest.mark.full
    def test_it_can_be_read_in_the_dark(self, tmp_path, browser):  # noqa: F811
        with opened(tmp_path, browser, source=EXPERIMENT) as (lab, page):
            page.js("window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
            form = self.open_form(page)
            self.value_after(page, "Pipeline stages (pp)", "9")
            form.get_by_role("alert").first.wait_for(timeout=10_000)
            page.shot("parallel-config-dark")
            for part in ("[role=img] svg", ".widget-label", "[role=alert]", "pre"):
                ink, paper = page.page.evaluate(COLOURS, f"{FORM} {part}")
                assert contrast(ink, paper) > 4.5, (part, ink, paper)


COLOURS = """selector => {
    const e = document.querySelector(selector), numbers = c => c.match(/[\\d.]+/g).map(Number);
    let paper = e;
    while (paper && (numbers(getComputedStyle(paper).backgroundColor)[3] ?? 1) === 0) paper = paper.parentElement;
    return [numbers(getComputedStyle(e).color), numbers(getComputedStyle(paper ?? document.body).backgroundColor)]; }"""


def contrast(ink, paper):
    "How far two colours are apart, by the formula of WCAG 2: 1 to 21."
    def light(colour):
        linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + .055) / 1.055) ** 2.4 for c in colour[:3]]
        return sum(f * c for f, c in zip((.2126, .7152, .0722), linear))
    bright, dark = sorted([light(ink), light(paper)], reverse=True)
    return (bright + .05) / (dark + .05)


def test_contrast_is_that_of_the_standard():
    assert contrast([0, 0, 0], [255, 255, 255]) == 21 and round(contrast([119, 119, 119], [255, 255, 255]), 2) == 4.48
