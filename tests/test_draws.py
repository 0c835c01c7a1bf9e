"""Named draws: every layout, micro-batch and recomputation drops the same, and what is dropped follows torch's and timm's laws."""
import pytest
import timm.layers
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from libai_wb.engine.step import TrainStep
from libai_wb.layers.attention import Attention
from libai_wb.layers.drop import Dropout, DropPath, PatchDropout, TokenMask
from libai_wb.layers.foreign import make_invariant
from libai_wb.layers.mlp import MLP
from libai_wb.layers.transformer import TransformerLayer
from libai_wb.mesh.launch import make_mesh, run_ranks
from libai_wb.mesh.parallelize import logical, parallelize
from libai_wb.mesh.proof import cut_proof, sample
from libai_wb.mesh.rng import name_draws
from libai_wb.mesh.topology import ParallelLayout
from libai_wb.models.registry import create_model
from libai_wb.models.vit import VisionTransformer

RATES = dict(drop_rate=.1, attn_drop_rate=.1, drop_path_rate=.3, patch_drop_rate=.3)
SIZES = dict(img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=16, depth=4, num_heads=4)


def rows(n, start=0, step=0): return torch.arange(start, start + n), torch.full((n,), step)


def named(layer, seed=0, mode="exact"): return name_draws(nn.ModuleDict({"layer": layer}), seed, mode)["layer"]


# The laws of torch and timm

@pytest.mark.parametrize("p", [.1, .5])
def test_dropout_follows_torchs_law(p):
    "Rate, scale and mean over 200 samples are those of nn.Dropout, and places are independent of each other."
    x = torch.ones(200, 64)
    y, theirs = named(Dropout(p))(x, *rows(200)), nn.functional.dropout(x, p)
    assert torch.allclose(y.max(), theirs.max())
    bound = 4 * (p / (1 - p) / x.numel()) ** .5
    assert abs(y.mean() - 1) < bound and abs((y == 0).float().mean() - p) < bound
    assert torch.corrcoef(y.T).fill_diagonal_(0).abs().max() < 5 / 200 ** .5


@pytest.mark.parametrize("scale", [True, False])
def test_drop_path_follows_timms_law(scale):
    x = torch.ones(20000, 1, 2)
    y, theirs = named(DropPath(.2, scale))(x, *rows(20000)), timm.layers.DropPath(.2, scale).train()(x)
    assert torch.equal(y.unique(), theirs.unique())
    assert abs((y > 0).float().mean() - .8) < 4 * (.16 / 20000) ** .5
    assert torch.equal(y[:, 0, 0], y[:, 0, 1])


@pytest.mark.parametrize("p, tokens, prefix", [(.25, 17, 1), (.9, 9, 0), (.99, 6, 2), (.7, 11, 1)])
def test_patch_dropout_keeps_what_timm_keeps(p, tokens, prefix):
    x = torch.arange(tokens).float().expand(2000, tokens)[..., None]
    y, theirs = named(PatchDropout(p, prefix))(x, *rows(2000)), timm.layers.PatchDropout(p, prefix).train()(x)
    assert y.shape == theirs.shape and torch.equal(y[:, :prefix], x[:, :prefix])
    kept = torch.bincount(y[:, prefix:].flatten().long(), minlength=tokens)[prefix:] / 2000
    share = (y.shape[1] - prefix) / (tokens - prefix)
    assert (kept - share).abs().max() < 5 * (share * (1 - share) / 2000) ** .5 + 1e-9


def test_token_masks_hide_every_token_alike():
    keep, mask, restore = named(TokenMask(.75))(torch.zeros(2000, 16), *rows(2000))
    assert torch.equal(mask.sum(1), torch.full((2000,), 12.))
    assert (mask.mean(0) - .75).abs().max() < 5 * (.75 * .25 / 2000) ** .5
    assert torch.equal(restore.sort(1).values, torch.arange(16).expand(2000, -1))
    assert torch.equal(restore.gather(1, keep), torch.arange(4).expand(2000, -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", [lambda: Dropout(.3), lambda: DropPath(.3), lambda: PatchDropout(.3)])
def test_dtype_does_not_reach_the_draw(make, dtype):
    layer, x = named(make()), torch.arange(1., 8 * 17 * 4 + 1).view(8, 17, 4)
    y, same = layer(x, *rows(8)), layer(x.to(dtype), *rows(8))
    assert same.dtype == dtype and torch.equal(same != 0, y != 0)
    torch.testing.assert_close(same.float(), y, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)


# Independence

def test_an_extra_layer_shifts_no_other():
    "A draw more on one rank, or one layer more, leaves the masks of the others as they were."
    few, more = (nn.ModuleDict({k: Dropout(.5) for k in names}) for names in ("ab", "axb"))
    x = torch.ones(3, 40)
    a, b = name_draws(few, 0), name_draws(more, 0)
    want = {k: layer(x, *rows(3)) for k, layer in a.items()}
    for k in "xxbxa":
        y = b[k](x, *rows(3))
        if k in want: assert torch.equal(y, want[k])
    assert not torch.equal(want["a"], want["b"])


def test_no_global_generator_is_touched():
    state = torch.get_rng_state()
    model = create_model("vit_micro_patch7_28", **RATES)
    model(torch.zeros(2, 1, 28, 28), *rows(2)).sum().backward()
    assert torch.equal(state, torch.get_rng_state())


# Tensor parallelism

class Bound(nn.Module):
    "A layer that knows its rows, named, for `cut_proof`."
    def __init__(self, make, *args, **rates):
        super().__init__()
        self.layer = make(*args, **rates)
        name_draws(self, 0)

    def forward(self, x): return self.layer(x, *rows(len(x), 5, 2))


def attention(): return Bound(Attention, 12, 4, attn_drop=.3, drop=.2)
def whole_attention(): return Bound(Attention, 12, 3, attn_drop=.3, drop=.2)
def mlp(): return Bound(MLP, 6, 10, drop=.3)
def block(): return Bound(TransformerLayer, 12, 4, drop=.1, attn_drop=.2, drop_path=.3)
def vit(): return Bound(VisionTransformer, **SIZES, **RATES)


@pytest.mark.parametrize("n, make, shape", [(2, attention, (6, 5, 12)), (2, whole_attention, (6, 5, 12)),
    (2, mlp, (6, 3, 6)), (4, block, (6, 5, 12)), (2, vit, (6, 1, 8, 8)), (4, vit, (6, 1, 8, 8))])
def test_a_cut_layer_drops_what_the_whole_one_drops(n, make, shape):
    "Outputs and gradients of tp2 and tp4 are those of one process; a single other mask would be of order 1."
    assert max(proof.deviation for proof in run_ranks(cut_proof, n, make, sample(*shape))) < 1e-12


def head_mask(rank, n, mode):
    "This rank's heads and their mask of attention probabilities."
    layer = Attention(12, 4, attn_drop=.5)
    parallelize(layer, make_mesh(ParallelLayout(tp=n)), random_mode=mode)
    seen = []
    layer.attn_drop.register_forward_hook(lambda module, args, y: seen.append(y != 0))
    layer(torch.ones(3, 5, 12), *rows(3))
    return seen[0]


def test_every_rank_draws_its_own_heads():
    whole = head_mask_of_one()
    for n in 2, 4: assert torch.equal(torch.cat(run_ranks(head_mask, n, "exact"), 1), whole)
    a, b = run_ranks(head_mask, 2, "per_shard")
    assert a.shape == b.shape == (3, 2, 5, 5) and not torch.equal(a, b)


def head_mask_of_one():
    layer = name_draws(Attention(12, 4, attn_drop=.5), 0)
    return layer.attn_drop(torch.ones(3, 4, 5, 5), *rows(3), first=0) != 0


# per_shard

def shard_masks(rank, n, layout):
    "Coordinates, and this rank's masks by layer."
    lay = ParallelLayout.parse(layout)
    with torch.device("meta"): model = VisionTransformer(**SIZES, **RATES)
    model, coords, seen = parallelize(model, make_mesh(lay), random_mode="per_shard"), lay.coords(rank), {}
    for name, module in model.named_modules():
        if isinstance(module, Dropout | PatchDropout):
            def keep(module, args, y, name=name): seen[name] = y.detach() == 0 if "patch" not in name else y.detach()
            module.register_forward_hook(keep)
        elif isinstance(module, DropPath) and module.active:
            seen[name] = torch.stack(module.masks(torch.zeros(4, 1, 1), *rows(4, 4 * coords.dp)))
    batch = dict(images=torch.ones(4, 1, 8, 8), labels=torch.arange(4), ids=rows(4, 4 * coords.dp)[0])
    TrainStep(model, torch.optim.SGD(model.parameters()), make_mesh(lay), acc=lay.pp)(batch)
    return coords, seen


@pytest.mark.parametrize("layout", ["dp2tp2", "dp2tp2pp2"])
def test_per_shard_is_equal_where_replicated_and_different_where_sharded(layout):
    found = run_ranks(shard_masks, ParallelLayout.parse(layout).world, layout)
    by_place = {tuple(coords): masks for coords, masks in found}
    for (pp, dp, tp), masks in by_place.items():
        for name, mask in masks.items():
            same, other = by_place[pp, dp, 1 - tp][name], by_place[pp, 1 - dp, tp][name]
            assert torch.equal(mask, same) != name.endswith("attn_drop"), name # heads are cut, the rest is replicated
            assert not torch.equal(mask, other), name
    assert len({name for masks in by_place.values() for name in masks}) > 10


# Pipelines

def train(rank, n, layout):
    "Two updates, evaluation in between, everything that a layout could change."
    lay = ParallelLayout.parse(layout)
    with torch.device("meta"): model = VisionTransformer(**SIZES, **RATES).double()
    model = parallelize(model, make_mesh(lay), seed=1)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=.1), make_mesh(lay), acc=lay.acc or lay.pp)
    batch = dict(images=sample(8, 1, 8, 8), labels=torch.arange(8), ids=torch.arange(8) * 3)
    part = {k: v.chunk(lay.dp)[lay.coords(rank).dp] for k, v in batch.items()}
    losses = [step(part)["loss"]]
    model.eval()
    predicted = step.predict(part)
    model.train()
    losses.append(step(part)["loss"])
    return losses, predicted, {k: logical(p).detach() for k, p in model.named_parameters()}


@pytest.fixture(scope="module")
def one_process(): return run_ranks(train, 1, "1")[0]


@pytest.mark.parametrize("layout", ["1+acc4", "dp2", "pp2", "pp2+gpipe+acc4", "tp2pp2"])
def test_every_layout_drops_the_same(layout, one_process):
    "With dropout, drop-path and patch dropout, whose token count differs between training and evaluation."
    losses, predicted, weights = one_process
    lay = ParallelLayout.parse(layout)
    found = run_ranks(train, lay.world, layout)
    for rank, (got, out, held) in enumerate(found):
        assert max(abs(a - b) for a, b in zip(got, losses)) < 1e-12
        if out is not None: torch.testing.assert_close(out, predicted.chunk(lay.dp)[lay.coords(rank).dp])
        for k, p in held.items(): torch.testing.assert_close(p, weights[k], rtol=1e-11, atol=1e-12, msg=k)
    assert {k for _, _, held in found for k in held} == set(weights)
    assert any(out is not None for _, out, _ in found)


# Foreign models

def train_foreign(rank, n, layout):
    "Three updates of timm's model with everything that drops, checkpointed."
    lay = ParallelLayout.parse(layout)
    torch.manual_seed(0)
    model = make_invariant(timm.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, embed_dim=16, depth=2, num_heads=2, num_classes=10, patch_drop_rate=.25,
        proj_drop_rate=.1, pos_drop_rate=.1, attn_drop_rate=.1, drop_path_rate=.3).double())
    model.set_grad_checkpointing(lay.dp == 1)
    step = TrainStep(parallelize(model, make_mesh(lay), seed=3), torch.optim.SGD(model.parameters(), lr=.1),
                     make_mesh(lay), acc=lay.acc or 1)
    batch = dict(images=sample(8, 1, 8, 8), labels=torch.arange(8), ids=torch.arange(8) * 3)
    part = {k: v.chunk(lay.dp)[lay.coords(rank).dp] for k, v in batch.items()}
    return [step(part)["loss"] for _ in range(3)]


def test_a_foreign_model_follows_one_process_under_dp():
    one, accumulated = run_ranks(train_foreign, 1, "1")[0], run_ranks(train_foreign, 1, "1+acc4")[0]
    assert max(abs(a - b) for a, b in zip(accumulated, one)) < 1e-12
    for losses in run_ranks(train_foreign, 2, "dp2+acc2"):
        assert max(abs(a - b) for a, b in zip(losses, one)) < 1e-12


# Compiled and recomputed

def wild_block(path="blocks.0", **rates):
    torch.manual_seed(0)
    model = TransformerLayer(12, 3, **(dict(drop=.1, attn_drop=.2, drop_path=.3) | rates)).double()
    return name_draws(nn.ModuleDict({path.replace(".", "_"): model}), 0)[path.replace(".", "_")]


class Counting:
    "A backend that counts the graphs and then does what another one does."
    def __init__(self, name): self.name, self.graphs = name, 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_compiled_blocks_neither_break_nor_recompile(name, fresh_compiler):
    "One graph for 12 steps of two blocks with other keys and rates; outputs and gradients as in eager mode."
    blocks, backend = [wild_block("blocks.0"), wild_block("blocks.1", drop_path=.4)], Counting(name)
    for i in range(12):
        for model in blocks:
            x = sample(4, 5, 12).requires_grad_()
            ids, step = rows(4, 7 * i, i)
            want = model(x, ids, step)
            reference, = torch.autograd.grad(want.square().sum(), x)
            y = torch.compile(model, fullgraph=True, backend=backend)(x, ids, step)
            got, = torch.autograd.grad(y.square().sum(), x)
            torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(got, reference, rtol=1e-12, atol=1e-12)
    assert backend.graphs == 1


def test_a_python_number_would_recompile(fresh_compiler):
    "The control: the counting backend sees a key that is a number instead of a tensor."
    backend = Counting("eager")
    f = torch.compile(lambda x, key: x + key % 7, fullgraph=True, backend=backend, dynamic=False)
    for key in range(3): f(torch.zeros(2), key)
    assert backend.graphs == 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_block_has_the_same_gradients(reentrant):
    "Micro-batches run forward before the first one runs backward, as in a pipeline."
    model = wild_block()
    def gradients(run):
        model.zero_grad()
        xs = [sample(4, 5, 12).requires_grad_() for _ in range(2)]
        losses = [run(x, *rows(4, 4 * i, 3)).square().sum() for i, x in enumerate(xs)]
        for loss in losses: loss.backward()
        return [x.grad for x in xs] + [p.grad.clone() for p in model.parameters()]
    plain = gradients(model)
    again = gradients(lambda *args: checkpoint(model, *args, use_reentrant=reentrant, preserve_rng_state=False))
    for a, b in zip(again, plain): assert torch.equal(a, b)
