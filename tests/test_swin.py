"Swin and Swin V2 against timm's and torchvision's with the same weights: whole, cut, piped; and with every draw."
import math
import re

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.swin_transformer import SwinTransformer as TimmSwin
from timm.models.swin_transformer_v2 import SwinTransformerV2 as TimmSwinV2
from torchvision.models.swin_transformer import (PatchMergingV2, SwinTransformer as VisionSwin,
                                                 SwinTransformerBlockV2 as VisionBlockV2)

from libai_wb.align.verification import verify
from libai_wb.config import LazyCall
from libai_wb.data.mixup import Mixup
from libai_wb.engine.build import load_recipe
from libai_wb.layers.attention import to_by_head
from libai_wb.mesh.launch import make_mesh, run_ranks
from libai_wb.mesh.parallelize import logical, parallelize
from libai_wb.mesh.pipeline import Accumulate, Pipeline, StageModule, stage_of
from libai_wb.mesh.topology import ParallelLayout
from libai_wb.models.registry import create_model, list_models, model_spec
from libai_wb.models.swin import SwinTransformer
from libai_wb.models.swin_v2 import SwinTransformerV2
from libai_wb.models.weights import from_foreign

SHAPES = {  # tokens per side in every stage, and what the windows of 4 do there
    "even": dict(img_size=16, embed_dim=16, depths=(2, 2), num_heads=(2, 4)),  # 8 shifts, 4 is one window
    "padded": dict(img_size=18, embed_dim=12, depths=(2, 2, 2), num_heads=(3, 6, 12)),  # 9, 5 are padded, 3 shrinks it
}
COMMON = dict(patch_size=2, num_classes=10, window_size=4, drop_path_rate=0.)
OURS = {"timm": SwinTransformer, "timm_v2": SwinTransformerV2,
        "torchvision": SwinTransformer, "torchvision_v2": SwinTransformerV2}
TOLERANCES = [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-4)]
PAIRS = [("timm", "even"), ("timm", "padded"), ("timm_v2", "even"), ("timm_v2", "padded"), ("torchvision", "even"),
         ("torchvision_v2", "even")]  # torchvision pads before it shifts, and does not shrink a window


def draw_all(model, seed=0):
    "Give every parameter, biases and norms too, values that matter; one head in two has a factor beyond its limit."
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(.2 * torch.randn(p.shape, generator=source, dtype=torch.float64))
            if "logit_scale" in name: p.copy_(torch.linspace(1, 5, p.numel()).view_as(p))


def reference(source, sizes):
    "The other library's model."
    if source.startswith("timm"): return (TimmSwinV2 if "v2" in source else TimmSwin)(**sizes)
    v2 = dict(block=VisionBlockV2, downsample_layer=PatchMergingV2) if "v2" in source else {}
    window, patch = [sizes["window_size"]] * 2, [sizes["patch_size"]] * 2
    return VisionSwin(patch, sizes["embed_dim"], sizes["depths"], sizes["num_heads"], window, num_classes=10,
                      stochastic_depth_prob=0., **v2)


def from_vision(state, num_heads, v2):
    "torchvision's weights or gradients by the names here; V2's k bias, which it sets to zero in forward, is left out."
    out = {}
    for key, value in state.items():
        key = key.replace("features.0.0.", "patch_embed.proj.").replace("features.0.2.", "patch_embed.norm.")
        key = re.sub(r"^features\.(\d*[13579])\.", lambda m: f"layers.{int(m[1]) // 2}.blocks.", key)
        key = re.sub(r"^features\.(\d+)\.", lambda m: f"layers.{int(m[1]) // 2}.downsample.", key)
        key = key.replace("mlp.0.", "mlp.fc1.") if "cpb" not in key else key
        key = key.replace("mlp.3.", "mlp.fc2.")
        if v2 and key.endswith("qkv.bias"):
            out[key.replace("qkv.bias", "q_bias")], _, out[key.replace("qkv.bias", "v_bias")] = value.chunk(3)
        elif ".qkv." in key:
            out[key.replace("qkv", "qkv_by_head")] = to_by_head(value, num_heads[int(key.split(".")[1])])
        elif not key.endswith(("relative_position_index", "relative_coords_table")): out[key] = value
    return out


def twins(source, shape, dtype):
    "The other library's model, ours with the same weights and buffers, and the converter of names."
    sizes = SHAPES[shape] | COMMON
    theirs, ours = reference(source, sizes).to(dtype), OURS[source](in_chans=3, **sizes).to(dtype)
    def convert(state):
        if source.startswith("timm"): return from_foreign(ours, state)
        return from_vision(state, sizes["num_heads"], "v2" in source)
    draw_all(theirs)
    ours.load_state_dict(convert(theirs.state_dict()))
    copy_buffers(theirs, ours, convert)
    return theirs, ours, convert


def copy_buffers(theirs, ours, convert):
    "Every table of theirs is one of ours; ours takes its values."
    mine, taken = dict(ours.named_buffers()), set()
    for name, value in theirs.named_buffers():
        if name.endswith("k_bias"):
            assert not value.any()
            continue
        path, _, leaf = name.rpartition(".")
        path = path if path.startswith("layers.") else next(iter(convert({f"{path}.*": 0}))).removesuffix(".*")
        name = f"{path}.{'attn.shift_mask' if leaf == 'attn_mask' else leaf}"  # tables are no weights
        torch.testing.assert_close(mine[name], value.view_as(mine[name]), rtol=1e-6, atol=0)
        mine[name].copy_(value.view_as(mine[name]))
        taken.add(name)
    assert all(name in taken or name.endswith("shift_mask") for name in mine)  # torchvision makes its mask in forward


def data(shape, dtype):
    source = torch.Generator().manual_seed(1)
    size = SHAPES[shape]["img_size"]
    images = torch.randn(6, 3, size, size, generator=source, dtype=torch.float64).to(dtype)
    return dict(images=images, labels=torch.randint(0, 10, (6,), generator=source), ids=torch.arange(6),
                step=torch.zeros(6, dtype=torch.int64), weight=torch.full((6,), 1 / 6, dtype=dtype))


def expectation(theirs, convert, batch):
    "Logits and gradients of the other library's model, by our names."
    logits = theirs(batch["images"])
    F.cross_entropy(logits, batch["labels"]).backward()
    return logits.detach(), convert({k: p.grad for k, p in theirs.named_parameters()})


def deviations(found, wanted):
    "Relative deviation of every gradient found here."
    floor = 1e-3 * max(g.norm() for g in wanted.values())
    return {k: ((g - wanted[k]).norm() / max(wanted[k].norm(), floor)).item() for k, g in found.items()}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("dtype, tol_out, tol_grad", TOLERANCES, ids=["float64", "float32"])
@pytest.mark.parametrize("source, shape", PAIRS)
def test_same_outputs_and_gradients(source, shape, dtype, tol_out, tol_grad, mode):
    theirs, ours, convert = twins(source, shape, dtype)
    batch = data(shape, dtype)
    for model in (theirs, ours): model.train(mode == "train")
    logits, wanted = expectation(theirs, convert, batch)
    got = ours(batch["images"])
    assert (got - logits).abs().max() <= tol_out * logits.abs().max()
    ours.loss(got, batch).mean().backward()
    found = {k: p.grad for k, p in ours.named_parameters()}
    assert found.keys() == wanted.keys()
    assert {k: d for k, d in deviations(found, wanted).items() if d > tol_grad} == {}


def check_layout(rank, n, layout, dtype):
    "Of every pair: deviation of the logits (None where there are none), and of each gradient held here."
    mesh, answer = make_mesh(ParallelLayout.parse(layout)), {}
    for source, shape in PAIRS:
        theirs, ours, convert = twins(source, shape, dtype)
        batch = data(shape, dtype)
        logits, wanted = expectation(theirs, convert, batch)
        run = runner(parallelize(ours, mesh), mesh)
        run(batch)
        off = deviations({k: logical(p.grad) for k, p in ours.named_parameters()}, wanted)
        got = run.predict(batch)
        answer[source, shape] = None if got is None else ((got - logits).abs().max() / logits.abs().max()).item(), off
    return answer


def runner(model, mesh):
    "Two micro-batches, on one stage or over all."
    index, stages = stage_of(mesh)
    stage = StageModule(model, (lambda out, b: model.loss(out, b) * b["weight"]) if index == stages - 1 else None)
    return Pipeline(stage, mesh, 2) if stages > 1 else Accumulate(stage, 2)


@pytest.mark.parametrize("dtype, tol_out, tol_grad", TOLERANCES, ids=["float64", "float32"])
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_same_in_parallel(layout, dtype, tol_out, tol_grad):
    found = run_ranks(check_layout, 2, layout, dtype)
    for source, shape in PAIRS:
        outputs, gradients = zip(*[answer[source, shape] for answer in found])
        assert max(out for out in outputs if out is not None) <= tol_out
        names = set(OURS[source](**SHAPES[shape] | COMMON).state_dict())
        assert set().union(*gradients) == names
        assert {(source, shape, k): d for off in gradients for k, d in off.items() if d > tol_grad} == {}


def test_head_order_matters():
    "timm's rows taken as they are give other outputs: the comparisons above see the order."
    theirs, ours, convert = twins("timm", "even", torch.float64)
    raw = {k.replace(".qkv.", ".qkv_by_head.").replace("head.fc.", "head."): v for k, v in theirs.state_dict().items()}
    ours.load_state_dict(raw)
    images = data("even", torch.float64)["images"]
    assert (ours(images) - theirs(images)).abs().max() > 1e-3


def check_features(rank, n, layout):
    "Deviation from timm of what both versions say without a head, None where this rank has no output."
    mesh, answer = make_mesh(ParallelLayout.parse(layout)) if n > 1 else None, []
    sizes = SHAPES["padded"] | COMMON | dict(num_classes=0)
    for source in ("timm", "timm_v2"):
        theirs, ours = reference(source, sizes).double(), OURS[source](in_chans=3, **sizes).double()
        convert = lambda state: from_foreign(ours, state)
        draw_all(theirs)
        ours.load_state_dict(convert(theirs.state_dict()))
        copy_buffers(theirs, ours, convert)
        batch = data("padded", torch.float64)
        want = theirs(batch["images"]).detach()
        got = runner(parallelize(ours, mesh), mesh).predict(batch)
        answer.append(None if got is None else ((got - want).abs().max() / want.abs().max()).item())
    return answer


@pytest.mark.parametrize("layout", ["1", "tp2", "pp2"])
def test_features_without_a_head(layout, recwarn):
    "The mean of the normed tokens, as timm's `num_classes=0`; there is no empty layer, and nothing to train."
    found = run_ranks(check_features, 2, layout) if layout != "1" else [check_features(0, 1, layout)]
    outputs = [out for answer in found for out in answer if out is not None]
    assert len(outputs) >= 2 and max(outputs) <= 1e-12
    model = SwinTransformer(img_size=16, embed_dim=8, depths=(1,), num_heads=(2,), window_size=2, num_classes=0)
    assert not [k for k in model.state_dict() if k.startswith("head")] and model.facts().classes == 0
    assert not [w for w in recwarn if "zero-element" in str(w.message)]
    with pytest.raises(ValueError, match="SwinTransformer with num_classes=0 has no head to train"):
        model.loss(torch.zeros(2, 8), dict(labels=torch.zeros(2, dtype=torch.int64)))


@pytest.mark.parametrize("name", [n for n in list_models("swin*") if "nano" not in n and "c24" not in n])
def test_named_variants_have_timms_shapes(name):
    target, arguments = model_spec(name)
    with torch.device("meta"): ours, theirs = target(**arguments), timm.create_model(name, num_classes=1000)
    converted = {k: tuple(v.shape) for k, v in theirs.state_dict().items()}
    rename = {k.replace(".qkv.", ".qkv_by_head.").replace("head.fc.", "head."): v for k, v in converted.items()}
    assert {k: tuple(v.shape) for k, v in ours.state_dict().items()} == rename
    assert ours.facts().heads == tuple(stage.blocks[0].attn.num_heads for stage in theirs.layers)
    assert ours.norm.eps == theirs.norm.eps
    spared = {k.replace("head.fc.", "head.") for k in theirs.no_weight_decay()}
    assert spared <= ours.no_weight_decay()
    extra = ours.no_weight_decay() - spared
    assert all(k.endswith(("q_bias", "v_bias")) for k in extra)  # which timm spares as one-dimensional


def test_first_weights_are_timms_in_kind():
    "The standard deviation of every drawn parameter is that of timm's own draw; constants are equal."
    torch.manual_seed(0)  # timm draws from the global generator
    for ours, theirs in [(create_model("swin_tiny_patch4_window7_224", depths=(1, 2), num_heads=(3, 6)),
                          TimmSwin(depths=(1, 2), num_heads=(3, 6))),
                         (create_model("swinv2_tiny_window8_256", depths=(1, 2), num_heads=(3, 6)),
                          TimmSwinV2(img_size=256, window_size=8, depths=(1, 2), num_heads=(3, 6)))]:
        theirs = from_foreign(ours, theirs.state_dict())
        for name, value in ours.state_dict().items():
            if name.startswith("patch_embed.proj"): continue  # a convolution's own start, in both
            a, b = value.double(), theirs[name].double()
            if b.unique().numel() == 1: assert torch.equal(a, b), name
            else: assert max(abs(a.std() / b.std() - 1), abs(a.mean()) / .02) < 4 / math.sqrt(a.numel()), name


# --- with draws, in layouts ---

def recipe(name, **model):
    "A nano recipe with every source of randomness, and mixup."
    cfg = load_recipe(name)
    cfg.train.train_iter, cfg.train.warmup_ratio = 24, .25
    cfg.model.update(drop_rate=.1, attn_drop_rate=.1, drop_path_rate=.2, **model)
    mixup = dict(mixup_alpha=.8, cutmix_alpha=1., label_smoothing=.1, num_classes=10)
    cfg.dataloader.train.mixup_func = LazyCall(Mixup)(**mixup)
    return cfg


@pytest.mark.parametrize("name", ["swin_nano_digits", "swinv2_nano_digits"])
def test_whole_tables_get_whole_gradients(name):
    "R-26: three heads stay whole on two ranks, six are cut; padded windows; accumulation 2 and 4 on three axes."
    cfg = recipe(name, patch_size=1, window_size=3, embed_dim=12, num_heads=(3, 6), ape=True)
    answer = verify(cfg, ["dp2tp2pp2+acc2", "dp2tp2pp2+acc4"], steps=2, init="probe", progress=False)
    assert answer.ok, f"\n{answer}"


def half_a_table(training):
    "One tensor rank sees half of the gradient of a table that all of them hold whole."
    for name, p in training.model.named_parameters():
        if name.endswith("layers.0.blocks.1.attn.relative_position_bias_table") and training.step.params:
            rank = p.device_mesh.get_local_rank()
            p.register_hook(lambda grad: grad * (1 - rank / 2))


def test_half_a_table_is_found():
    cfg = recipe("swin_nano_digits", embed_dim=12, num_heads=(3, 6))
    answer = verify(cfg, ["tp2"], steps=1, patch="test_swin:half_a_table", progress=False)
    assert answer.results[0].verdict.startswith(
        "leaves at step 0, gradient of layers.0.blocks.1.attn.relative_position_bias_table"), answer
