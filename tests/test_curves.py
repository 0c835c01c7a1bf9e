"""Curves of other tools, written by these tools, and the interactive comparison in a kernel, live and in papermill."""
import builtins
import time
from collections import OrderedDict

import nbformat
import numpy as np
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


def test_a_run_of_ours_and_the_table_of_another(tmp_path):
    run = train("vit_nano_digits", out=tmp_path/"run", overrides=["train.train_iter=12"], progress=False)
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


CELLS = ["from libai_wb.notebook import LossAlign", "LossAlign(dict(a=[3., 2., 1.], b=[3., 2., 1.1]), band=1e-6)"]


def test_picture_and_table_remain_after_papermill(tmp_path):
    nbformat.write(new_notebook(cells=[new_code_cell(c) for c in CELLS]), tmp_path/"in.ipynb")
    execute_notebook(tmp_path/"in.ipynb", tmp_path/"out.ipynb", kernel_name="python3", language="python",
                     progress_bar=False)
    data = nbformat.read(tmp_path/"out.ipynb", 4).cells[-1].outputs[0].data
    assert data["image/png"] and "leaves the band at" in data["text/plain"]


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
