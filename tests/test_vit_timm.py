"Our ViT against timm's with the same weights, one model for every layout, and the layers without any set-up."
import subprocess
import sys

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer as TimmViT

from libai_wb.mesh.launch import make_mesh, run_ranks
from libai_wb.mesh.parallelize import logical, parallelize
from libai_wb.mesh.topology import ParallelLayout
from libai_wb.models.registry import create_model, list_models, model_spec
from libai_wb.models.vit import VisionTransformer
from libai_wb.models.weights import from_foreign, to_foreign

HEADS = 4
SIZES = dict(img_size=16, patch_size=4, in_chans=3, num_classes=10, embed_dim=32, depth=3, num_heads=HEADS)


def draw_all(model, seed=0):
    "Give every parameter and floating buffer, biases and norms too, values that matter."
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for t in [*model.parameters(), *model.buffers()]:
            if t.is_floating_point(): t.copy_(.2 * torch.randn(t.shape, generator=source, dtype=torch.float64))


def twins(dtype, qkv_bias=True):
    "timm's model and ours with the same weights and buffers."
    theirs, ours = (make(**SIZES, qkv_bias=qkv_bias).to(dtype) for make in (TimmViT, VisionTransformer))
    draw_all(theirs)
    ours.load_state_dict(from_foreign(ours, theirs.state_dict()))
    return theirs, ours


def batch(dtype):
    source = torch.Generator().manual_seed(1)
    images = torch.randn(6, 3, 16, 16, generator=source, dtype=torch.float64).to(dtype)
    return images, torch.randint(0, 10, (6,), generator=source)


def grads_in_timm_order(model):
    "Gradients by timm's names."
    return to_foreign(model, {k: p.grad for k, p in model.named_parameters()})


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("dtype, tol_out, tol_grad", [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-4)])
def test_same_outputs_and_gradients(dtype, tol_out, tol_grad, qkv_bias):
    theirs, ours = twins(dtype, qkv_bias)
    images, labels = batch(dtype)
    expected, got = theirs(images), ours(images)
    assert (got - expected).abs().max() <= tol_out * expected.abs().max()
    F.cross_entropy(expected, labels).backward()
    ours.loss(got, {"labels": labels}).mean().backward()
    reference = {k: p.grad for k, p in theirs.named_parameters()}
    found = grads_in_timm_order(ours)
    assert found.keys() == reference.keys()
    floor = 1e-3 * max(g.norm() for g in reference.values())
    for name, g in reference.items():
        assert (found[name] - g).norm() <= tol_grad * max(g.norm(), floor), name


def test_qkv_order_matters():
    "The comparison above sees a head order that is wrong: timm's rows taken as they are give other outputs."
    theirs, ours = twins(torch.float64)
    images, _ = batch(torch.float64)
    raw = {k.replace(".qkv.", ".qkv_by_head."): v for k, v in theirs.state_dict().items()}
    ours.load_state_dict(raw)
    assert (ours(images) - theirs(images)).abs().max() > 1e-3


def test_norm_eps_matters():
    "LiBai's eps gives other outputs than timm's, far above the tolerance."
    theirs, _ = twins(torch.float64)
    other = VisionTransformer(**SIZES, norm_eps=1e-5).double()
    other.load_state_dict(from_foreign(other, theirs.state_dict()))
    images, _ = batch(torch.float64)
    assert (other(images) - theirs(images)).abs().max() > 1e-10


def test_round_trip_and_buffers():
    theirs, ours = twins(torch.float32)
    back = to_foreign(ours, ours.state_dict())
    assert list(back) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items(): assert torch.equal(back[name], value), name
    fresh = TimmViT(**SIZES)
    fresh.load_state_dict(back)
    buffers = dict(ours.named_buffers())
    assert buffers.keys() == dict(theirs.named_buffers()).keys()
    for name, value in theirs.named_buffers(): assert torch.equal(buffers[name], value), name


@pytest.mark.parametrize("strict", [True, False])
def test_raw_timm_weights_are_refused(strict):
    theirs, ours = twins(torch.float32)
    with pytest.raises(ValueError, match=r"'blocks\.0\.attn\.qkv\.weight'.*load_pretrained"):
        ours.load_state_dict(theirs.state_dict(), strict=strict)


@pytest.mark.parametrize("name", list_models("vit_*_224"))
def test_named_variants_have_timms_shapes(name):
    target, arguments = model_spec(name)
    with torch.device("meta"): ours, theirs = target(**arguments), timm.create_model(name, num_classes=1000)
    rename = {k.replace(".qkv.", ".qkv_by_head."): tuple(v.shape) for k, v in theirs.state_dict().items()}
    assert {k: tuple(v.shape) for k, v in ours.state_dict().items()} == rename
    assert ours.facts().heads == theirs.blocks[0].attn.num_heads
    assert ours.norm.eps == theirs.norm.eps
    assert ours.no_weight_decay() == theirs.no_weight_decay() & set(ours.state_dict())


def test_one_seed_one_model():
    a, b = (create_model("vit_nano_patch4_8", seed=3).state_dict() for _ in range(2))
    for name, value in a.items(): assert torch.equal(value, b[name]), name
    wide = create_model("vit_nano_patch4_8", seed=3, dtype=torch.float64).state_dict()
    for name, value in a.items(): assert torch.equal(value.double(), wide[name]), name


def check_slices(rank, n, layout):
    "Names of this rank's parameters, and whether each is the slice of the one-process model's."
    target, arguments = model_spec("vit_nano_patch4_8")
    with torch.device("meta"): model = target(**arguments)
    part = dict(parallelize(model, make_mesh(ParallelLayout.parse(layout)), seed=3).named_parameters())
    whole = dict(create_model("vit_nano_patch4_8", seed=3).named_parameters())
    return list(part), all(torch.equal(logical(p), whole[k]) for k, p in part.items())


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2pp2"])
def test_one_model_for_every_layout(layout):
    found = run_ranks(check_slices, ParallelLayout.parse(layout).world, layout)
    assert all(equal for _, equal in found)
    assert {k for names, _ in found for k in names} == set(create_model("vit_nano_patch4_8").state_dict())


def test_layers_stand_alone():
    "In a fresh process, with no group, mesh or configuration, every layer runs forward and backward."
    code = """
import torch
from libai_wb.layers import Attention, Embedding, LayerNorm, Linear, Linear1D, MLP, PatchEmbedding
from libai_wb.layers import TransformerLayer, VocabEmbedding, cross_entropy
x = torch.randn(2, 5, 8, requires_grad=True)
for layer in (Attention(8, 2), LayerNorm(8), MLP(8, 16), TransformerLayer(8, 2), Linear(8, 8),
              Linear1D(8, 8, parallel="col"), Linear1D(8, 8, parallel="row")):
    y = layer(x)
    assert y.shape == x.shape
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
for table in Embedding(9, 4), VocabEmbedding(9, 4): assert table(torch.tensor([[1, 8]])).shape == (1, 2, 4)
assert PatchEmbedding(8, 4, 3, 6)(torch.randn(1, 3, 8, 8)).shape == (1, 4, 6)
assert cross_entropy(torch.randn(3, 4), torch.tensor([0, 1, 3])).shape == (3,)
assert not torch.distributed.is_initialized()
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr
