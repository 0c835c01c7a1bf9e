"""Every layout follows one process, and faults that were planted are found."""
import random

import pytest
import torch

from libai_wb.align.verification import verify
from libai_wb.cli import main
from libai_wb.engine.build import load_recipe
from libai_wb.engine.step import TrainStep
from libai_wb.mesh.launch import make_mesh, run_ranks
from libai_wb.mesh.parallelize import logical, parallelize
from libai_wb.mesh.topology import ParallelLayout

LAYOUTS = ["1", "dp2", "dp4", "tp2", "tp4", "pp2", "pp4", "dp2tp2", "dp2pp2", "tp2pp2", "dp2tp2pp2"]


def recipe():
    "Nano ViT with clipping, warm-up and accumulation, short enough that the learning rate leaves its warm-up."
    cfg = load_recipe("vit_nano_digits")
    cfg.train.num_accumulation_steps, cfg.train.train_iter, cfg.train.warmup_ratio = 2, 24, .25
    assert cfg.optim.params.clip_grad_max_norm == 1.0
    return cfg


def with_options(layout, gpipe, acc):
    "A layout with its schedule and accumulation; four stages want four micro-batches."
    acc = max(acc, 4) if "pp4" in layout else acc
    return f"{layout}+acc{acc}" + ("+gpipe" if gpipe and "pp" in layout else "")


def pairwise_cover(seed=0):
    "Layouts with options for each dtype, so that every pair of values of two factors occurs."
    cover = {"float64": [], "float32": []}
    for staged in (False, True):
        layouts = [text for text in LAYOUTS if ("pp" in text) == staged]
        layouts = random.Random(seed).sample(layouts, len(layouts))
        for i, layout in enumerate(sorted(layouts, key=lambda text: "pp4" in text)):  # whose accumulation is not free
            gpipe, acc = bool(i & 1), 2 + (i & 2)
            cover["float64"].append(with_options(layout, gpipe, acc))
            cover["float32"].append(with_options(layout, not gpipe, 6 - acc))
    return cover


def test_cover_holds_every_pair():
    "Each layout meets each dtype, accumulation and, where it has stages, each schedule; so do the options among each other."
    cover = pairwise_cover()
    everything = [(d, text) for d, texts in cover.items() for text in texts]
    for layout in LAYOUTS:
        mine = {(d, text) for d, text in everything if text.split("+")[0] == layout}
        assert {d for d, _ in mine} == {"float64", "float32"}
        assert {"gpipe" in text for _, text in mine} == ({False, True} if "pp" in layout else {False})
        assert {text.split("acc")[1][0] for _, text in mine} == ({"4"} if "pp4" in layout else {"2", "4"})
    for acc in "24":
        assert {(d, "gpipe" in t) for d, t in everything if f"acc{acc}" in t} == {(d, g) for d in cover for g in (False, True)}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_layouts_follow(dtype):
    answer = verify(recipe(), pairwise_cover()[dtype], steps=5, dtype=dtype, progress=False)
    assert answer.ok, f"\n{answer}"


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype,acc", [("float64", 2), ("float64", 4), ("float64", 8), ("float32", 2)])
def test_layouts_follow_for_24_steps(dtype, acc, record_property):
    answer = verify(recipe(), [with_options(text, False, acc) for text in LAYOUTS], steps=24, dtype=dtype, progress=False)
    for result in answer.results: record_property(result.layout, f"margin {result.margin:.2g} {result.worst}")
    assert answer.ok, f"\n{answer}"


@pytest.mark.parametrize("fault,layout,extra,where", [
    ("drop_reduction", "dp2", [], "leaves at step 0, gradient of head.bias: dp copies disagree"),
    ("double_row_bias", "tp2", ["--init", "probe"], "leaves at step 0, loss"),
    ("local_clip", "tp2", [], "leaves at step 0, grad_norm"),
    ("local_clip", "pp2", [], "leaves at step 0, grad_norm"),
])
def test_controls_are_found(fault, layout, extra, where, capsys):
    words = ["verify", "vit_nano_digits", "--layouts", layout, "--steps", "2", *extra]
    assert main(words) == 0
    assert main([*words, "--patch", f"libai_wb.align.faults:{fault}"]) == 1
    assert where in capsys.readouterr().out


def _train_timm(rank, world, layout, steps):
    "A timm ViT, unknown to the library, in the hand-written loop; each rank starts from its own random weights."
    import timm
    lay = ParallelLayout.parse(layout)
    torch.manual_seed(100 * rank)
    mesh = make_mesh(lay)
    model = parallelize(timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, depth=2, num_classes=5).double(), mesh)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), mesh, acc=lay.acc or 1, clip=1.)
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    rows = [t.chunk(lay.dp)[lay.coords(rank).dp] for t in (images, torch.arange(8) % 5)]
    losses = [step(dict(images=rows[0], labels=rows[1]))["loss"] for _ in range(steps)]
    return losses, {k: logical(p).detach() for k, p in model.named_parameters()}


@pytest.mark.parametrize("layout", ["dp2", "dp2+acc2"])
def test_a_timm_model_trains_as_it_is(layout):
    [(losses, weights)] = run_ranks(_train_timm, 1, "1", 4)
    for got, parameters in run_ranks(_train_timm, 2, layout, 4):
        torch.testing.assert_close(got, losses, rtol=1e-11, atol=0)
        for k, p in parameters.items(): torch.testing.assert_close(p, weights[k], rtol=1e-8, atol=1e-10)
