"""Curves of other tools, written by these tools, and the interactive comparison in a kernel, live and in papermill."""
import builtins
import time
from collections import OrderedDict

import nbformat
import numpy as np
import pandas as pd
import pytest
from kernels import new_kernel
from nbformat.v4 import new_code_cell, new_notebook
from papermill import execute_notebook
from timm.utils import update_summary

from libai_wb.align.sources import column, read_curves
from libai_wb.engine.default import train
from libai_wb.engine.events import MetricsWriter
from libai_wb.engine.summary import recorded
from libai_wb.notebook import LossAlign

pytestmark = pytest.mark.timeout(120)


def test_a_summary_that_timm_has_written(tmp_path):
    for epoch in range(3):
        update_summary(epoch, OrderedDict(loss=2. - epoch), OrderedDict(top1=10. * epoch), tmp_path/"summary.csv",
                       lr=.1, write_header=epoch == 0)
    table = read_curves(tmp_path)
    assert table["train_loss"].tolist() == [2., 1., 0.] and column(table) == "train_loss"
    assert table["eval_top1"].tolist() == [0., 10., 20.] and table["step"].tolist() == [0, 1, 2]


def test_events_that_torch_has_written(tmp_path):
    "Ten times more points than TensorBoard itself would show, one spike; two writers in one folder."
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(tmp_path)
    for i in range(20_000): writer.add_scalar("train/loss", 99. if i == 12_345 else 1. / (i + 1), i)
    writer.add_scalar("lr", .1, 0, new_style=True)
    writer.close()
    table = read_curves(tmp_path)
    assert len(table) == 20_000 and table["train/loss"].max() == 99. and table["lr"][0] == pytest.approx(.1)
    assert table["time"][0] == 0 and table["time"].is_monotonic_increasing and column(table) == "train/loss"


@pytest.mark.parametrize("folders,names", [
    (["sub/v0"], ["loss"]), (["train", "validation"], ["train/loss", "validation/loss"]),
    (["", "loss_eval"], ["loss", "loss_eval/loss"])])
def test_events_in_folders_below(tmp_path, folders, names):
    "Keras and `add_scalars` put every curve into a folder of its own."
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for value, folder in enumerate(folders):
        writer = tensorboard.SummaryWriter(tmp_path/folder)
        writer.add_scalar("loss", value, 0)
        writer.add_scalar("loss", float("nan"), 1)
        writer.close()
    table = read_curves(tmp_path)
    assert table[names].iloc[0].tolist() == [*range(len(names))] and table.columns[2:].tolist() == names
    assert len(LossAlign([tmp_path], metric=names[0]).curves.curve(tmp_path.name)) == 2


def test_a_run_of_ours_and_the_table_of_another(tmp_path):
    run = train("vit_nano_digits", out=tmp_path/"run", overrides=["train.train_iter=12"], progress=False)
    assert np.allclose(read_curves(run)["time"], run.metrics["seconds"].dropna(), atol=1e-5)
    other = run.metrics[["step", "loss"]].rename(columns={"step": "global_step", "loss": "train_loss"})
    other.loc[7, "train_loss"] *= 1.01
    align = LossAlign(dict(ours=run, theirs=other), band=1e-6)
    assert align.curves.divergence() == {"theirs": 7}
    assert align.curves.at(7).loc["ours", "lr"] == run.metrics["lr"][7]
    assert LossAlign([run, run.path], x="time").view.x == "time"


@pytest.mark.parametrize("missing,forms", [("plotly", 3), ("ipywidgets", 2)])
def test_it_is_complete_without(monkeypatch, missing, forms):
    "Without plotly the controls change a picture; without ipywidgets picture and table remain."
    real = builtins.__import__
    def refuse(name, *args, **kw):
        if name.partition(".")[0] == missing: raise ImportError(name)
        return real(name, *args, **kw)
    monkeypatch.setattr(builtins, "__import__", refuse)
    align = LossAlign(dict(a=[3., 2., 1.], b=[3., 2., 1.1]), band=1e-6)
    bundle = align._repr_mimebundle_()
    assert len(bundle) == forms and bundle["text/plain"].count("\n") == 3
    if forms == 2: return
    before = align.panel.picture.widget.value
    align.panel.controls["log"].value = True
    assert align.panel.picture.widget.value != before and "b leaves the band at step 2" in align.panel.message.value
    align.close()


def test_it_follows_a_run_that_goes_on(tmp_path):
    with recorded(tmp_path/"run" if (tmp_path/"run").mkdir() is None else None):
        writer = MetricsWriter(tmp_path/"run"/"metrics.jsonl")
        writer.write(step=0, loss=2.)
        align = LossAlign([tmp_path/"run"], follow=.1)
        align._repr_mimebundle_()
        writer.write(step=1, loss=1.5)
        end = time.monotonic() + 10
        while len(align.panel.picture.widget.data[0].x) < 2 and time.monotonic() < end: time.sleep(.05)
        assert align.panel.picture.widget.data[0].y.tolist() == [2., 1.5]
        writer.write(step=2, loss=1.)
        writer.close()
    end = time.monotonic() + 10  # the last look is after the end
    while len(align.panel.picture.widget.data[0].x) < 3 and time.monotonic() < end: time.sleep(.05)
    assert len(align.panel.picture.widget.data[0].x) == 3
    align.close()


def test_many_long_runs_are_drawn_quickly_and_a_spike_is_kept():
    "20 runs of 20,000 points, and one spike in 200,000."
    steps, noise = np.arange(20_000), np.random.default_rng(0)
    runs = {f"run {i}": dict(step=steps, loss=2 + 1e-4 * noise.normal(size=20_000)) for i in range(20)}
    align = LossAlign(runs)
    align._repr_mimebundle_()
    assert all(len(trace.x) <= 2100 for trace in align.panel.picture.widget.data)
    align.close()
    long = np.full(200_000, 2.)
    long[123_456] = 9.
    align = LossAlign(dict(long=long))
    align._repr_mimebundle_()
    drawn = align.panel.picture.widget.data[0]
    assert drawn.y.max() == 9. and drawn.customdata[drawn.y.argmax(), 0] == 123_456
    align.close()


LOST = dict(step=[0, 1, 2, 3], loss=[1., 1., np.nan, np.nan], lr=[.1] * 4)
LOST_ROWS = pd.DataFrame(LOST).join(pd.DataFrame({"Acc@1": [None, 5., None, None]}))
FILES = {"a.csv": "step,loss,val\n0,1,\n1,1,2\n2,NaN,\n3,nan,\n",
         "b.jsonl": '{"step": 0, "loss": 1, "lr": 1}\n{"step": 1, "loss": 1, "lr": 1}\n{"step": 1, "Acc@1": 5}\n'
                    '{"step": 2, "loss": NaN, "lr": 1}\n{"step": 3, "loss": NaN, "lr": 1}\n{"step": 4, "Acc@1": 5}\n',
         "c.txt": "1\n1\nnan\nnan\n", "d.json": "[1.0, 1.0, NaN, NaN]", "e.csv": "loss\n1\n1\nNaN\nNaN\n",
         "f.json": '[{"loss": 1, "step": 0}, {"loss": 1, "step": 1}, '
                   '{"step": 2, "loss": NaN}, {"step": 3, "loss": NaN}]',
         "g.txt": "[1.0, 1.0, nan, nan]"}
SOURCES = dict(list=LOST["loss"], dict=dict(loss=LOST["loss"]), columns=LOST, table=pd.DataFrame(LOST), rows=LOST_ROWS,
               shuffled=pd.DataFrame(LOST).iloc[[3, 0, 1, 2]])


@pytest.mark.parametrize("kind", [*SOURCES, *FILES])
def test_a_loss_that_is_no_number_is_a_value(tmp_path, kind):
    "Training that diverges leaves the band there, whatever the source."
    if kind in FILES: (tmp_path/kind).write_text(FILES[kind])
    align = LossAlign(dict(a=[1.] * 4, b=SOURCES.get(kind, tmp_path/kind)), band=1e-3)
    assert align.curves.divergence() == {"b": 2} and align.curves.summary().loc["b", "points"] == 4
    assert np.isnan(align.curves.summary().loc["b", "last value"])


def test_a_loss_that_is_no_number_is_drawn():
    "As a gap above and at the top below, in both pictures."
    align = LossAlign(dict(a=[1.] * 4, b=LOST), band=1e-3)
    assert "nan" in align._repr_mimebundle_()["text/plain"].lower()
    drawn = align.panel.picture.widget.data
    assert np.isnan(drawn[1].y[2:]).all() and np.isfinite(drawn[3].y).all() and tuple(drawn[5].x) == (2.,)
    align.close()


def test_a_gap_is_no_value():
    "What is recorded now and then has gaps, also behind its last number."
    rows = pd.DataFrame({"step": [0, 1, 2, 2, 3], "loss": [3., 2., 1., None, .5], "lr": [1., 1., 1., None, 1.],
                         "Acc@1": [None, None, None, 9., None], "val": [4., None, 5., None, None]})
    many = {name: LossAlign([rows], metric=name).curves.curve("run 0") for name in ("loss", "Acc@1", "val")}
    assert {name: len(c) for name, c in many.items()} == {"loss": 4, "Acc@1": 1, "val": 2}


def test_a_run_without_its_first_update(tmp_path):
    "It has a curve without points, which fills as it is followed; the controls follow too."
    (tmp_path/"run").mkdir()
    with recorded(tmp_path/"run"):
        align = LossAlign([tmp_path/"run", [2., 1.]], follow=.05, band=1.)
        assert align.curves.summary()["points"].tolist() == [0, 2]
        align._repr_mimebundle_()
        writer = MetricsWriter(tmp_path/"run"/"metrics.jsonl")
        for i in range(3): writer.write(step=i, loss=2. - i, lr=.1, seconds=1. + i)
        writer.write(**{"step": 2, "Acc@1": 5.})
        writer.close()
    controls, end = align.panel.controls, time.monotonic() + 10
    while len(align.panel.picture.widget.data[0].x) < 3 and time.monotonic() < end: time.sleep(.05)
    assert (controls["steps"].max, controls["steps"].value) == (2, (0, 2)) and align.view.stop is None
    assert controls["metric"].options == ("loss", "lr", "seconds", "Acc@1")
    assert align.panel.picture.widget.data[0].y.tolist() == [2., 1., 0.]
    align.close()


def test_what_has_no_points_is_drawn():
    align = LossAlign(dict(a=[1.], b=[]), band=.1)
    assert align.curves.divergence() == {"b": None} and align._repr_mimebundle_()
    align.close()
    assert LossAlign(dict(a=[])).figure()


def test_controls_follow_what_is_shown():
    "`show` moves the controls; one that is moved changes nothing but itself; a refused change leaves all as it was."
    table = dict(step=[0, 1, 2], loss=[3., 2., 1.], lr=[1.] * 3, samples=[1, 2, 3])
    align = LossAlign(dict(a=table, b=table), band=.1)
    align._repr_mimebundle_()
    controls = align.panel.controls
    align.show(metric="lr", start=1, smoothing=.5)
    assert [controls[n].value for n in ("metric", "steps", "smoothing")] == ["lr", (1, 2), .5]
    controls["log"].value = True
    assert (align.curves.metric, align.view.start, align.view.smoothing, align.view.log) == ("lr", 1, .5, True)
    for wrong in (dict(x="time"), dict(smoothing=1.), dict(metric="bogus", smoothing=.1), dict(start="x")):
        with pytest.raises(ValueError): align.show(**wrong)
    assert (align.view.smoothing, align.view.x, align.curves.metric) == (.5, "step", "lr") and align.figure()
    controls["smoothing"].value = 0.
    controls["metric"].value = controls["x"].value = "samples"
    assert align.panel.picture.widget.data[0].x.tolist() == [2., 3.] == align.panel.picture.widget.data[0].y.tolist()
    align.close()


@pytest.mark.parametrize("steps,view,seen", [([0, 1], dict(start=100), (1, 1)), ([0, 1], dict(stop=100), (0, 1)),
                                             ([-3, -1], {}, (-3, 0)), ([.25, .5, 2.5], {}, (0, 3))])
def test_steps_that_a_slider_does_not_have(steps, view, seen):
    runs = {name: dict(step=steps, loss=[1.] * (len(steps) - 1) + [last]) for name, last in dict(a=1., b=2.).items()}
    align = LossAlign(runs, band=.1, **view)
    align._repr_mimebundle_()
    assert align.panel.controls["steps"].value == seen and align.curves.divergence() == {"b": steps[-1]}
    if not view: assert align.panel.picture.widget.data[0].x.tolist() == steps
    align.select(steps[-1])
    assert f"step {steps[-1]}" in align.panel.records.value and "<td>" in align.panel.records.value
    align.close()


CELLS = ["from libai_wb.notebook import LossAlign", "LossAlign(dict(a=[3., 2., 1.], b=[3., 2., 1.1]), band=1e-6)"]


def test_picture_and_table_remain_after_papermill(tmp_path):
    nbformat.write(new_notebook(cells=[new_code_cell(c) for c in CELLS]), tmp_path/"in.ipynb")
    execute_notebook(tmp_path/"in.ipynb", tmp_path/"out.ipynb", kernel_name="python3", language="python",
                     progress_bar=False)
    data = nbformat.read(tmp_path/"out.ipynb", 4).cells[-1].outputs[0].data
    assert data["image/png"] and "leaves the band at" in data["text/plain"]


@pytest.mark.full
def test_a_cell_that_is_run_again_leaves_one_panel(tmp_path):
    "The frontend sends the id of the cell along; the widgets of the run before are closed."
    with new_kernel(tmp_path) as kernel:
        kernel.ok(CELLS[0])
        kernel.ok("from ipywidgets.widgets.widget import _instances")
        seen, client = [], kernel.client
        for _ in range(5):
            content = dict(code=CELLS[1], silent=False, store_history=True, user_expressions={}, allow_stdin=False)
            message = client.session.msg("execute_request", content, metadata=dict(cellId="c1"))
            client.shell_channel.send(message)
            while client.get_shell_msg(timeout=30)["parent_header"]["msg_id"] != message["header"]["msg_id"]: pass
            seen.append(kernel.ok("len(_instances)").value)
        assert int(seen[0]) > 20 and len(set(seen)) == 1
