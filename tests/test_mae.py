"""Our masked autoencoder against transformers' ViTMAE, its masks and positions in every layout, and a ViT's late options."""
import pytest
import torch
import torch.nn.functional as F

from libai_wb.align.verification import verify
from libai_wb.config import LazyCall
from libai_wb.engine.build import build_training, check_config, load_recipe
from libai_wb.engine.default import train
from libai_wb.engine.inspection import inspect_config
from libai_wb.engine.step import TrainStep
from libai_wb.evaluation import ReconstructionEvaluator, evaluate_model
from libai_wb.layers.attention import to_by_head
from libai_wb.layers.embedding import sincos_positions
from libai_wb.mesh.collectives import local
from libai_wb.mesh.launch import make_mesh, run_ranks
from libai_wb.mesh.parallelize import logical, parallelize
from libai_wb.mesh.rng import name_draws
from libai_wb.mesh.topology import ParallelLayout
from libai_wb.models.mae import MaskedAutoencoder, show_reconstruction
from libai_wb.models.registry import create_model, model_spec
from libai_wb.models.vit import LinearProbe, VisionTransformer
from libai_wb.models.weights import from_foreign, to_foreign

SIZES = dict(img_size=12, patch_size=3, in_chans=3, embed_dim=32, depth=2, num_heads=4, decoder_embed_dim=16,
             decoder_depth=2, decoder_num_heads=2)
NAMES = {"embeddings.patch_embeddings.projection": "patch_embed.proj", "embeddings.cls_token": "cls_token",
         "embeddings.position_embeddings": "pos_embed", "layernorm_before": "norm1", "layernorm_after": "norm2",
         "decoder_layers": "decoder_blocks", "layers": "blocks", "layernorm": "norm", "attention": "attn", "o_proj": "proj"}


def draw_all(model, seed=0):
    "Give every parameter, biases, norms and tokens too, values that matter."
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad: p.copy_(.2 * torch.randn(p.shape, generator=source, dtype=torch.float64))


def official(tensors):
    "transformers' tensors under the official names; its query, key and value are packed head by head."
    found = {}
    for key, t in tensors.items():
        key = key.removeprefix("vit.").removeprefix("decoder.")
        for old, new in NAMES.items(): key = key.replace(old, new)
        found[key] = t
    for key in [k for k in found if ".q_proj." in k]:
        packed = torch.cat([found.pop(key.replace("q_proj", f"{c}_proj")) for c in "qkv"])
        heads = SIZES["decoder_num_heads" if "decoder" in key else "num_heads"]
        found[key.replace("q_proj", "qkv_by_head")] = to_by_head(packed, heads)
    return found


def theirs(dtype, norm_pix_loss):
    "transformers' model with random weights; its own start leaves the decoder's positions 0."
    from transformers import ViTMAEConfig, ViTMAEForPreTraining  # not at the top: ranks import this file too
    model = ViTMAEForPreTraining(ViTMAEConfig(
        image_size=12, patch_size=3, num_channels=3, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
        decoder_intermediate_size=64, layer_norm_eps=1e-6, norm_pix_loss=norm_pix_loss, mask_ratio=.75))
    draw_all(model)
    model.decoder.decoder_pos_embed.data.copy_(sincos_positions(4, 16))
    return model.to(dtype).train()


def ours(dtype, norm_pix_loss, state, mesh=None):
    "Our model, or this rank's part of it, with given weights."
    model = MaskedAutoencoder(**SIZES, norm_pix_loss=norm_pix_loss).to(dtype)
    model.load_state_dict(state)
    return parallelize(model, mesh)


def batch(dtype):
    source = torch.Generator().manual_seed(1)
    images = torch.randn(6, 3, 12, 12, generator=source, dtype=torch.float64).to(dtype)
    return dict(images=images, ids=torch.arange(6) + 40, step=torch.full((6,), 3))


def close(found, wanted, tol):
    "Outputs relative to the largest; gradients by norm, with a floor for those that are zero."
    floor = 1e-3 * max(g.norm() for g in wanted.values())
    return all((found[k] - w).norm() <= tol * max(w.norm(), floor) for k, w in wanted.items())


def reference(dtype, norm_pix_loss):
    "What transformers' model says: weights, output, gradients."
    model, rows = theirs(dtype, norm_pix_loss), batch(dtype)
    state = official(model.state_dict())
    masking = ours(dtype, norm_pix_loss, state).masking
    noise = masking.uniform(rows["images"], rows["ids"], rows["step"], (16,))
    out = model(rows["images"], noise=noise)
    out.loss.backward()
    grads = official({k: p.grad for k, p in model.named_parameters() if p.grad is not None})
    return state, (out.logits.detach(), out.mask, out.loss.item()), grads


def test_a_model_built_by_hand_is_usable(tmp_path):
    "Weights of transformers, a forward in evaluation and a picture, with no word about names; masks as create_model's."
    from libai_wb.engine.checkpoint import load_pretrained
    other = theirs(torch.float32, False)
    other.save_pretrained(tmp_path)
    model, named = MaskedAutoencoder(**SIZES).eval(), create_model("mae_vit_base_patch16_224", **SIZES).eval()
    for each in (model, named): load_pretrained(each, tmp_path)
    images, rows = batch(torch.float32)["images"], torch.arange(6)
    noise = model.masking.uniform(images, rows, torch.zeros_like(rows), (16,))
    with torch.no_grad(): out, want = model(images), other.eval()(images, noise=noise)
    assert torch.equal(out["mask"], want.mask) and torch.equal(out["mask"], named(images)["mask"])
    assert (out["pred"] - want.logits).abs().max() <= 1e-5 * want.logits.abs().max()
    figure = show_reconstruction(model, images[:2])
    assert [line.get_ylabel() for line in figure.axes[::2]] == ["original", "seen", "reconstruction"]
    assert not torch.equal(name_draws(model, seed=1)(images)["mask"], out["mask"])


def mae_in_layout(rank, world, layout, dtype, norm_pix_loss, state):
    "Prediction in evaluation form, loss and logical gradients of this rank's part."
    lay = ParallelLayout.parse(layout)
    mesh, rows = make_mesh(lay), batch(dtype)
    model = ours(dtype, norm_pix_loss, state, mesh)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.), mesh, acc=lay.pp)
    out = step.predict(rows)
    rows = {k: v.chunk(lay.dp)[lay.coords(rank).dp] for k, v in rows.items()}
    loss = step(rows)["loss"]
    return out, loss, {k: logical(p.grad) for k, p in model.named_parameters()}


@pytest.mark.parametrize("dtype, tol_out, tol_grad, norm_pix_loss", [
    (torch.float64, 1e-12, 1e-12, True), (torch.float64, 1e-12, 1e-12, False), (torch.float32, 1e-5, 1e-4, True)])
def test_same_outputs_loss_and_gradients(dtype, tol_out, tol_grad, norm_pix_loss):
    state, (logits, mask, loss), grads = reference(dtype, norm_pix_loss)
    for layout in ("1", "tp2", "pp2"):
        ranks = run_ranks(mae_in_layout, ParallelLayout.parse(layout).world, layout, dtype, norm_pix_loss, state)
        outs, losses, found = zip(*ranks)
        for out in filter(None, outs):
            assert torch.equal(out["mask"], mask.to(dtype)) and out["normalised"].all() == norm_pix_loss
            assert (out["pred"] - logits).abs().max() <= tol_out * logits.abs().max()
        assert all(abs(each - loss) <= tol_out * loss for each in losses) and any(o is not None for o in outs)
        names = {k for part in found for k in part}
        assert names == grads.keys() and not names & {"pos_embed", "decoder_pos_embed"}  # positions are no parameters
        for part in found: assert close(part, {k: grads[k] for k in part}, tol_grad), layout


def test_evaluation_mode_is_transformers_too():
    "In evaluation the masks are those of update 0; nothing else differs."
    model, rows = theirs(torch.float64, True), batch(torch.float64)
    ours_here = ours(torch.float64, True, official(model.state_dict())).eval()
    noise = ours_here.masking.uniform(rows["images"], rows["ids"], torch.zeros_like(rows["ids"]), (16,))
    with torch.no_grad(): want, got = model.eval()(rows["images"], noise=noise), ours_here(**rows)
    assert torch.equal(got["mask"], want.mask.double())
    torch.testing.assert_close(got["pred"], want.logits, rtol=1e-12, atol=1e-12)


# --- masks and positions in every layout ---

def masks_in_layout(rank, world, layout):
    "The way back that this rank drew for each (sample, update), and whether its positions stayed and have no gradient."
    lay, drawn = ParallelLayout.parse(layout), {}
    training = build_training(load_recipe("mae_nano_digits"), layout, make_mesh(lay))
    model = training.model
    def look(module, args, output):
        x, ids, step = args
        if not x.is_meta: drawn.update({(i, s): row.tolist() for i, s, row in zip(ids.tolist(), step.tolist(), output[2])})
    model.masking.register_forward_hook(look)
    for i in range(2): training.step(training.loader.batch(i))
    held = {k for g in training.step.optimizer.param_groups for p in g["params"] for k, q in model.named_parameters() if p is q}
    fixed = all(torch.equal(b, sincos_positions(4, b.shape[-1])) and b.grad is None for _, b in model.named_buffers())
    return drawn, fixed and not {"pos_embed", "decoder_pos_embed"} & held, sorted(k for k, _ in model.named_buffers())


def test_masks_follow_the_sample_and_positions_stay():
    "The first stage of every layout draws what one process draws; a stage keeps its own positions, and they never move."
    [(want, fixed, names)] = run_ranks(masks_in_layout, 1, "1")
    assert len(want) == 128 and fixed and names == ["decoder_pos_embed", "pos_embed"]
    assert len({tuple(v) for v in want.values()}) == 128
    for layout in ("dp2", "dp2tp2pp2"):
        lay, seen = ParallelLayout.parse(layout), {}
        for rank, (drawn, fixed, names) in enumerate(run_ranks(masks_in_layout, lay.world, layout)):
            assert fixed and all(want[k] == v for k, v in drawn.items())
            stage = lay.coords(rank).pp
            assert bool(drawn) == (stage == 0)
            if lay.pp > 1: assert names == [["pos_embed"], ["decoder_pos_embed"]][stage]
            seen |= drawn
        assert seen == want


def test_masks_in_evaluation_do_not_depend_on_the_update():
    training = build_training(load_recipe("mae_nano_digits"))
    batch, judge, found = training.loader.batch(0), ReconstructionEvaluator(), []
    training.model.eval()
    for update in (0, 5):
        training.step.update = update
        judge.process(batch, training.step.predict(batch))
        found.append(judge.evaluate())
        judge.reset()
    assert found[0] == found[1]


def evaluate_in_layout(rank, world, layout):
    "The counts of the test set, in float64."
    lay = ParallelLayout.parse(layout)
    training = build_training(load_recipe("mae_nano_digits"), layout, make_mesh(lay), dtype=torch.float64)
    judge, step = ReconstructionEvaluator(), training.step
    evaluate_model(step.predict, training.test_loaders()[""], judge, module=training.model)
    return judge.counts.tolist(), lay.coords(rank)


def test_evaluation_is_the_same_in_every_layout():
    "360 test samples in batches of 256: fillers are left out, and the integers of a cut run are those of one process."
    [(want, _)] = run_ranks(evaluate_in_layout, 1, "1")
    assert want[2] == 360 and want[1] == 0
    ranks = run_ranks(evaluate_in_layout, 8, "dp2tp2pp2")
    last = [counts for counts, at in ranks if (at.pp, at.tp) == (1, 0)]
    assert [sum(column) for column in zip(*last)] == want
    assert all(counts == [0, 0, 0] for counts, at in ranks if at.pp == 0)


# --- data without labels ---

class Unlabelled:
    "Images and nothing else."
    def __len__(self): return 70
    def __getitem__(self, i): return dict(images=torch.full((1, 8, 8), i / 70))


def test_no_labels_are_needed(tmp_path):
    cfg = load_recipe("mae_nano_digits")
    cfg.dataloader.train.dataset = cfg.dataloader.test.dataset = LazyCall(Unlabelled)()
    cfg.train.train_iter = 2
    run = train(cfg, layout="1", out=tmp_path / "run", progress=False)
    assert len(run.metrics.loss.dropna()) == 2 and 0 < run.summary["metrics"]["masked_loss"] < 10
    assert "forward of one 1 × 8 × 8 image" in inspect_config(cfg, "pp4")
    cfg = load_recipe("mae_nano_digits")
    cfg.dataloader.train.mixup_func = load_recipe("mae_nano_finetune_digits").dataloader.train.mixup_func
    with pytest.raises(ValueError, match="mixes labels, and MaskedAutoencoder learns without any"):
        check_config(cfg, ParallelLayout())


# --- a ViT with layer scale, mean pooling and without a head, against timm ---

VIT = dict(img_size=16, patch_size=4, in_chans=3, num_classes=10, embed_dim=32, depth=3, num_heads=4, global_pool="avg")


def vit_twins(dtype, mesh=None, **more):
    "timm's model and ours, this rank's part, with the same random weights."
    from timm.models.vision_transformer import VisionTransformer as TimmViT
    theirs, ours = TimmViT(**VIT | more, init_values=.1).to(dtype), VisionTransformer(**VIT | more, init_values=.1).to(dtype)
    draw_all(theirs)
    ours.load_state_dict(from_foreign(ours, theirs.state_dict()))
    return theirs, parallelize(ours, mesh)


def vit_in_layout(rank, world, layout, dtype):
    "Largest relative deviation of logits, and whether all gradients of this rank are timm's, in units of the tolerance."
    lay, source = ParallelLayout.parse(layout), torch.Generator().manual_seed(1)
    mesh = make_mesh(lay)
    theirs, ours = vit_twins(dtype, mesh)
    images = torch.randn(6, 3, 16, 16, generator=source, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, 10, (6,), generator=source)
    wanted = theirs.train()(images)
    F.cross_entropy(wanted, labels).backward()
    step = TrainStep(ours, torch.optim.SGD(ours.parameters(), lr=0.), mesh, acc=lay.pp)
    out = step.predict(dict(images=images))
    step(dict(images=images, labels=labels))
    found = to_foreign(ours, {k: logical(p.grad) for k, p in ours.named_parameters()})
    grads = {k: p.grad for k, p in theirs.named_parameters()}
    floor = 1e-3 * max(g.norm() for g in grads.values())
    off = max(((g - grads[k]).norm() / max(grads[k].norm(), floor)).item() for k, g in found.items())
    return 0. if out is None else ((out - wanted).abs().max() / wanted.abs().max()).item(), off, sorted(found)


@pytest.mark.parametrize("dtype, tol_out, tol_grad", [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-4)])
def test_vit_with_layer_scale_and_mean_pooling_is_timms(dtype, tol_out, tol_grad):
    for layout in ("1", "tp2", "pp2") if dtype is torch.float64 else ("1",):
        ranks = run_ranks(vit_in_layout, ParallelLayout.parse(layout).world, layout, dtype)
        assert max(out for out, _, _ in ranks) <= tol_out and max(grad for _, grad, _ in ranks) <= tol_grad, layout
        names = {k for *_, part in ranks for k in part}
        assert {"blocks.2.ls1.gamma", "blocks.0.ls2.gamma", "fc_norm.weight"} <= names and len(names) == 3 * 14 + 8


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_features_are_timms(pool):
    theirs, ours = vit_twins(torch.float64, global_pool=pool, num_classes=0)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(ours.features(images), theirs.forward_features(images), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-12, atol=1e-12)


def test_the_dinov2_shape_is_timms():
    import timm
    target, arguments = model_spec("vit_small_patch14_518")
    with torch.device("meta"): ours, theirs = target(**arguments), timm.create_model("vit_small_patch14_dinov2")
    names = {k.replace(".qkv.", ".qkv_by_head."): tuple(v.shape) for k, v in theirs.state_dict().items()}
    assert {k: tuple(v.shape) for k, v in ours.state_dict().items()} == names
    assert ours.norm.eps == theirs.norm.eps and ours.facts().heads == theirs.blocks[0].attn.num_heads


# --- a linear probe ---

def probe_recipe():
    cfg = load_recipe("vit_nano_digits")
    cfg.model._target_ = LinearProbe
    cfg.train.train_iter, cfg.train.warmup_ratio = 24, .25
    return cfg


def test_a_probe_follows_in_every_layout():
    "Under a pipeline only the last stage holds parameters that train."
    answer = verify(probe_recipe(), ["dp2", "tp2", "pp2", "pp4", "dp2tp2pp2+gpipe"], steps=4, progress=False)
    assert answer.ok, f"\n{answer}"


def train_probe(rank, world, layout, steps=3):
    "Names of parameters that moved here."
    training = build_training(probe_recipe(), layout, make_mesh(ParallelLayout.parse(layout)))
    before = {k: local(p).detach().clone() for k, p in training.model.named_parameters()}
    for i in range(steps): training.step(training.loader.batch(i))
    return [k for k, p in training.model.named_parameters() if not torch.equal(local(p), before[k])]


def test_only_the_head_moves():
    assert run_ranks(train_probe, 1, "1") == [["head.weight", "head.bias"]]
    assert run_ranks(train_probe, 2, "pp2") == [[], ["head.weight", "head.bias"]]


def thaw(rank, world, layout):
    "A model whose first stage is frozen after the cut, then thawed: gradients of both phases, and those of one process."
    lay, found = ParallelLayout.parse(layout), []
    model = parallelize(create_model("vit_nano_patch4_8", dtype=torch.float64), mesh := make_mesh(lay))
    source = torch.Generator().manual_seed(0)
    rows = dict(images=torch.randn(4, 1, 8, 8, generator=source), labels=torch.arange(4))
    for frozen in (True, False):
        for k, p in model.named_parameters(): p.requires_grad_(not (frozen and not k.startswith(("norm", "head"))))
        params = [p for p in model.parameters() if p.requires_grad]
        step = TrainStep(model, torch.optim.SGD([{"params": params}], lr=0.), mesh, acc=lay.pp)
        loss = step(rows)["loss"]
        found.append((loss, {k: logical(p.grad) for k, p in model.named_parameters() if p.requires_grad}))
    return found


def test_stages_may_be_frozen_and_thawed_at_any_time():
    [want] = run_ranks(thaw, 1, "1")
    ranks = run_ranks(thaw, 2, "pp2")
    for phase, (loss, grads) in enumerate(want):
        found = {k: g for rank in ranks for k, g in rank[phase][1].items()}
        assert found.keys() == grads.keys() and all(abs(rank[phase][0] - loss) < 1e-12 for rank in ranks)
        assert close(found, grads, 1e-12)
    assert len(want[0][1]) == 4 < len(want[1][1]) == len(create_model("vit_nano_patch4_8").state_dict())


def train_nothing(rank, world):
    model = parallelize(create_model("vit_nano_patch4_8"), mesh := make_mesh(ParallelLayout(pp=2)))
    for p in model.parameters(): p.requires_grad_(False)
    with pytest.raises(ValueError, match="has no parameter to train; unfreeze one"):
        TrainStep(model, torch.optim.SGD([{"params": []}], lr=0.), mesh)


def test_a_model_without_anything_to_train_is_refused_on_every_stage():
    run_ranks(train_nothing, 2)
