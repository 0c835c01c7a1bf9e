"""The shipped recipes describe what they say, and LiBai's own train after their imports are renamed."""
import copy
import functools
import inspect
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets as theirs
from torchvision.transforms import InterpolationMode

from libai_wb.cli import main
from libai_wb.compat import _OPTIONS, port_config
from libai_wb.config import LazyConfig, diff, get_config, instantiate, locate
from libai_wb.data.folders import cifar100
from libai_wb.engine.build import (build_optimizer, build_plain, load_recipe, recipe_lines, recipe_names, remarks,
                                   scale_iterations)
from libai_wb.engine.default import train
from libai_wb.engine.inspection import count_parameters
from libai_wb.engine.runs import Run
from libai_wb.models.registry import model_spec
from libai_wb.optim.build import group_names

from test_architecture import speaks_to_you
from test_datasets import trust_cifar, write_cifar, write_tree

HERE = Path(__file__).parent
RECIPES = recipe_names()
LIBAIS = ("vit_imagenet", "swin_imagenet", "swin_cifar100", "swinv2_cifar100", "swinv2_imagenet")
IMAGENET = 1_281_167
SMALL_MODELS = {"vit_imagenet": ["model.cfg.depth=2"], "swin_imagenet": ["model.cfg.depths=[1,1,2,1]"],
                "swin_cifar100": ["model.cfg.depths=[1,1,2,1]"], "swinv2_cifar100": ["model.depths=[1,1,2,1]"],
                "swinv2_imagenet": ["model.depths=[1,1,2,1]"]}


@functools.cache
def plain(name):
    "A recipe and its model on the meta device; not to be changed."
    cfg = load_recipe(name)
    return cfg, build_plain(cfg)


# Every recipe

@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_instantiates_and_comes_back(name, tmp_path):
    "Model on the meta device, optimizer and schedule; saved, reloaded and equal, nothing in it unread."
    cfg, model = plain(name)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    optimizer, schedule = build_optimizer(cfg, model, 1000, 50)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))
    LazyConfig.save(cfg, tmp_path/"saved.yaml")
    assert remarks(cfg) == [] and diff(load_recipe(tmp_path/"saved.yaml"), cfg) == []
    assert not list(tmp_path.glob("*.pkl"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short_and_says_what_it_is(name):
    text = (HERE.parent/"libai_wb/configs"/f"{name}.py").read_text()
    assert 8 <= len(text.splitlines()) <= 60
    line = next(s for s in recipe_lines() if s.startswith(f"{name} "))
    assert len(line) < 160 and line.endswith(".") and "\n" not in line


def test_recipes_are_listed(capsys):
    assert main(["recipes"]) == 0
    assert [s.split()[0] for s in capsys.readouterr().out.splitlines()] == RECIPES
    assert {*LIBAIS, "mae_pretrain_imagenet", "mae_finetune_imagenet", "deit3_imagenet", "swin_nano_fashion_mnist",
            "swinv2_nano_fashion_mnist", "mae_nano_fashion_mnist", "mae_nano_finetune_fashion_mnist"} <= {*RECIPES}


@pytest.mark.parametrize("name", [n for n in RECIPES if n.endswith(("imagenet", "cifar100"))])
def test_info_needs_no_data(name, capsys):
    "Nothing lies at path/to/imagenet."
    assert main(["info", name, "--layout", "dp8"]) == 0
    out = capsys.readouterr()
    assert "× dp 8 ×" in out.out and out.err == ""


def test_missing_data_are_one_sentence(capsys, tmp_path):
    assert main(["train", "deit3_imagenet", "train.global_batch_size=2", f"train.output_dir={tmp_path}"]) == 2
    assert "ImageNet is missing: there is no folder path/to/imagenet" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RECIPES)
def test_transforms_of_a_recipe(name):
    "Both transforms make pictures of the model's size, and the one of evaluation always the same."
    cfg, photo = load_recipe(name), Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8))
    for part in ("train", "test"):
        transform = cfg.dataloader[part].dataset.get("transform")
        if transform is None: continue
        built = instantiate(transform)
        shape = built(photo).shape
        assert shape == (cfg.model.in_chans, cfg.model.img_size, cfg.model.img_size)
        if part == "test": assert torch.equal(built(photo), built(photo))


# The numbers

def settings(name):
    "What a recipe decides, by short names."
    cfg = load_recipe(name)
    t, o, s = cfg.train, cfg.optim, cfg.train.scheduler
    return dict(lr=o.lr, wd=o.weight_decay, batch=t.global_batch_size, epochs=t.train_epoch, clip=o.params.get(
        "clip_grad_max_norm"), warm=round(t.warmup_ratio * t.train_epoch, 9), factor=s.warmup_factor,
        low=s.get("alpha", s.get("eta_min")), img=cfg.model.img_size, path=cfg.model.get("drop_path_rate"))


NUMBERS = dict(
    vit_imagenet=(1e-3, .05, 1024, 300, None, 5, 1e-3, .01, 224, 0.),
    swin_imagenet=(1e-3, .05, 1024, 300, None, 20, 1e-3, .01, 224, .2),
    swin_cifar100=(5e-4, .05, 256, 300, None, 20, 5e-7, 0., 224, .2),
    swinv2_cifar100=(5e-4, .05, 256, 300, None, 20, 5e-7, 0., 256, .2),
    swinv2_imagenet=(1e-3, .05, 1024, 300, None, 20, 1e-3, .01, 256, .2),
    mae_pretrain_imagenet=(2.4e-3, .05, 4096, 800, None, 40, 0., 0., 224, None),
    mae_finetune_imagenet=(2e-3, .05, 1024, 100, None, 5, 0., 1e-6, 224, .1),
    deit3_imagenet=(4e-3, .05, 2048, 800, 1., 5, 2.5e-4, 1e-5, 224, .05))


def test_deit3_follows_the_official_command():
    "facebookresearch/deit, README_revenge.md: --opt fusedlamb, whose eps is main.py's --opt-eps, and --repeated-aug."
    cfg = load_recipe("deit3_imagenet")
    assert (cfg.optim.eps, cfg.dataloader.train.repeats, cfg.model.init_values) == (1e-8, 3, 1e-4)
    cfg.dataloader.train.dataset = list(range(768 * 8))  # three copies of each picture, and an epoch of the same length
    loader = instantiate(cfg.dataloader.train, global_batch=768, mixup_func=None)
    ids = loader.global_ids(0)[0]
    assert loader.steps_per_epoch == 8 and len(set(ids.tolist())) == 768
    assert (np.bincount(ids % 6144)[ids % 6144] == 3).all()


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_the_published_ones(name):
    found = settings(name)
    for (key, value), want in zip(found.items(), NUMBERS[name], strict=True):
        assert value == want or math.isclose(value, want, rel_tol=1e-12), (key, value, want)


@pytest.mark.parametrize("name, samples, updates, warm", [
    ("vit_imagenet", IMAGENET, 375_342, 6_256), ("swin_cifar100", 50_000, 58_594, 3_907),
    ("swinv2_cifar100", 50_000, 58_594, 3_907), ("mae_pretrain_imagenet", IMAGENET, 250_228, 12_512)])
def test_lengths_are_libais(name, samples, updates, warm):
    cfg = load_recipe(name)
    assert scale_iterations(cfg, samples, cfg.train.global_batch_size) == (updates, warm)


def spared(name, *leaves):
    "Parameters of a recipe that are not decayed, and whether each of `leaves` is among them everywhere."
    cfg, model = plain(name)
    groups = instantiate(cfg.optim.params, model=model)
    off = {n for g, names in zip(groups, group_names(model, groups)) for n in names if g.get("weight_decay") == 0}
    has = {leaf: [n for n, _ in model.named_parameters() if n.endswith(leaf)] for leaf in leaves}
    assert all(has.values()), has
    return off, model, {leaf: off.issuperset(names) for leaf, names in has.items()}


@pytest.mark.parametrize("name, leaves", [
    ("vit_imagenet", ("pos_embed", "cls_token", "norm1.weight", ".bias")),
    ("swin_imagenet", ("relative_position_bias_table", "norm1.weight", ".bias")),
    ("swin_cifar100", ("relative_position_bias_table", "downsample.norm.weight", ".bias")),
    ("swinv2_imagenet", ("logit_scale", "cpb_mlp.0.weight", "cpb_mlp.2.weight", "q_bias", "v_bias", "norm1.weight")),
    ("swinv2_cifar100", ("logit_scale", "cpb_mlp.0.weight", "q_bias", ".bias")),
    ("mae_pretrain_imagenet", ("norm1.weight", ".bias")),
    ("mae_finetune_imagenet", ("pos_embed", "cls_token", "norm1.weight", ".bias")),
    ("deit3_imagenet", ("pos_embed", "cls_token", "ls1.gamma", "norm1.weight", ".bias"))])
def test_what_is_not_decayed(name, leaves):
    off, model, all_spared = spared(name, *leaves)
    assert set(all_spared.values()) == {True}, all_spared
    matrices = {n for n, p in model.named_parameters() if n.endswith((".qkv_by_head.weight", "fc1.weight", "head.weight"))}
    assert matrices and not matrices & off


def test_layers_learn_at_their_own_rate():
    "The table of the paper's code for a ViT-Base and .65."
    cfg, model = plain("mae_finetune_imagenet")
    optimizer, schedule = build_optimizer(cfg, model, 1000, 50)
    rate = {n: g["lr_scale"] for g, names in zip(optimizer.param_groups, group_names(model, optimizer.param_groups))
            for n in names}
    first, last = rate["patch_embed.proj.weight"], rate["head.weight"]
    assert (round(first, 4), round(rate["blocks.0.mlp.fc1.weight"], 4), last) == (.0037, .0057, 1.)
    at = lambda step: schedule.curve(step, 2e-3)
    assert (at(0), at(50), at(1000)) == pytest.approx((0., 2e-3, 1e-6), rel=1e-9)
    assert at(525) == pytest.approx(1e-6 + (2e-3 - 1e-6) / 2, rel=1e-9)  # the middle of the cosine behind the warm-up


def test_maes_schedule_ends_at_zero():
    "U12: it does not rise again."
    schedule = build_optimizer(*plain("mae_pretrain_imagenet"), 800, 40)[1]
    curve = [schedule.curve(step, 2.4e-3) for step in range(801)]
    assert curve[0] == 0 and curve[40] == 2.4e-3 and curve[-1] == pytest.approx(0, abs=1e-18)
    assert all(a > b for a, b in zip(curve[40:], curve[41:]))


@pytest.mark.parametrize("name, count", [
    ("vit_imagenet", 86_567_656), ("deit3_imagenet", 22_050_664 + 2 * 12 * 384), ("swin_imagenet", 28_288_354),
    ("swinv2_imagenet", 28_347_154), ("mae_pretrain_imagenet", 111_907_840 - 197 * (768 + 512))])
def test_sizes_are_the_published_ones(name, count):
    "timm's counts; the two fixed position tables of MAE are no parameters here."
    assert count_parameters(plain(name)[1]) == count


@pytest.mark.parametrize("family", ["vit", "swin", "swinv2"])
def test_models_by_libais_names(family):
    "What LiBai's file gets wrong is right here: the arguments are those of the registered model, defaults included."
    models = get_config(f"common/models/{family}.py")
    assert len(models) == dict(vit=10, swin=7, swinv2=6)[family]
    for name, node in models.items():
        target, fixed = model_spec(re.sub(r"_patch4_window(\d+)_", r"_window\1_", name) if family == "swinv2" else name)
        usual = {k: p.default for k, p in inspect.signature(target).parameters.items()} | fixed
        assert target is node["_target_"]
        assert {k: usual[k] for k in node if k != "_target_"} == {k: tupled(v) for k, v in node.items() if k != "_target_"}


def tupled(value): return tuple(value) if isinstance(value, Sequence) else value


def test_corrected_models():
    "U11, read off the modules."
    get = lambda family, name: get_config(f"common/models/{family}.py")[name]
    assert get("vit", "vit_huge_patch14_224").patch_size == 14
    assert get("swin", "swin_base_patch4_window12_384").window_size == 12
    assert get("swinv2", "swinv2_base_patch4_window8_256").embed_dim == 128


# The small ones run

@pytest.mark.parametrize("name", ["swin_nano_fashion_mnist", "swinv2_nano_fashion_mnist", "mae_nano_fashion_mnist"])
def test_small_recipes_learn(name, tmp_path):
    "Sixteen updates: the pictures arrive, and the loss falls."
    over = ["train.train_iter=16", "train.global_batch_size=32", "train.evaluation.enabled=false", "optim.lr=4e-3"]
    loss = train(name, out=tmp_path/"run", overrides=over, progress=False).metrics.loss
    assert loss.iloc[-4:].mean() < .96 * loss.iloc[:3].mean()


def test_one_run_starts_another(tmp_path):
    "MAE on digits, then its encoder as a classifier: the same weights, and a head of its own."
    short = ["train.train_iter=4", "train.evaluation.enabled=false"]
    mae = train("mae_nano_digits", out=tmp_path/"mae", overrides=short, progress=False)
    cfg = load_recipe("mae_nano_finetune_digits", [*short, "train.train_iter=1", "optim.lr=0.0",
                                                   f"train.load_weight={mae.path}"])
    tuned = train(cfg, out=tmp_path/"tuned", progress=False)
    before, after = mae.model().state_dict(), tuned.model().state_dict()
    same = [k for k in after if k in before and k.startswith(("blocks", "patch_embed", "cls_token", "pos_embed"))]
    assert len(same) > 40 and all(torch.equal(before[k], after[k]) for k in same)
    assert 0 < after["head.weight"].std() < .05


# LiBai's own

NAMES = (("libai\\b", "libai_wb"), ("flowvision", "libai_wb.vision"), ("oneflow", "torch"))
SHORT = ["train.train_micro_batch_size=2", "train.num_accumulation_steps=1", "train.train_iter=2", "train.train_epoch=0",
         "dataloader.train.num_workers=0", "dataloader.test[0].num_workers=0", "train.evaluation.enabled=false"]


@pytest.fixture(scope="module")
def ported(tmp_path_factory):
    "The files of tests/libai_recipes after sed, and a tree of pictures."
    root = tmp_path_factory.mktemp("ported")
    shutil.copytree(HERE/"libai_recipes", root/"configs", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (root/"configs").rglob("*.py"):
        text = file.read_text()
        for old, new in NAMES: text = re.sub(old, new, text)
        file.write_text(text)
    write_tree(root/"imagenet", train=dict(a=4, b=4), val=dict(a=2, b=2))
    return root


def where(name, root):
    "Overrides that say where the data are; CIFAR's recipes are pointed at the tree as well."
    loaders = ("dataloader.train.dataset[0]", "dataloader.test[0].dataset")
    kind = ["._target_=libai_wb.data.datasets.ImageNetDataset", ".download=false"] if "cifar" in name else []
    return [f"{loader}{end}" for loader in loaders for end in (*kind, f".root={root/'imagenet'}")]


@pytest.mark.full
@pytest.mark.parametrize("name", LIBAIS)
def test_libais_recipe_trains_as_it_is(name, ported):
    "Two steps of the model that the recipe describes."
    run = ported/f"whole-{name}"
    assert main(["train", str(ported/"configs"/f"{name}.py"), "--out", str(run), *SHORT, *where(name, ported)]) == 0
    assert Run(run).metrics.loss.notna().sum() == 2
    shutil.rmtree(run)


@pytest.mark.parametrize("name", LIBAIS)
def test_libais_recipe_trains(name, ported, capsys):
    "Two steps of fewer blocks."
    run, over = ported/f"run-{name}", [*SHORT, *where(name, ported), *SMALL_MODELS[name]]
    code = main(["train", str(ported/"configs"/f"{name}.py"), "--out", str(run), *over])
    assert code == 0, capsys.readouterr().err
    losses = Run(run).metrics.loss
    classes = 100 if "cifar" in name else 1000
    assert len(losses) == 2 and abs(losses[0] - math.log(classes)) < 1.5 and losses.notna().all()
    said = [line for line in capsys.readouterr().out.splitlines() if "LiBai's" in line]
    for key in ("graph.auto_parallel", "train.nccl_fusion_threshold_mb", "train.nccl_fusion_max_ops"):
        assert len([line for line in said if f"LiBai's {key} (" in line]) == 1
    assert any("train.amp" in line for line in said) == name.endswith("imagenet")
    use_without_the_recipe(run, next((ported/"imagenet"/"val").rglob("*.JPEG")), capsys)
    shutil.rmtree(run)


def use_without_the_recipe(run, picture, capsys):
    "Evaluate, ask and export by what stands in the run's config.yaml; its pictures are prepared as in training."
    assert "???" not in (run/"config.yaml").read_text()
    assert main(["eval", str(run)]) == 0 and main(["predict", str(run), str(picture), "--topk", "1"]) == 0
    assert main(["export", str(run), str(run/"out.safetensors"), "--style", "libai"]) == 0
    out = capsys.readouterr()
    assert "Acc@1" in out.out and picture.name in out.out and out.err == ""
    where = "dataloader.test.dataset.transform.transforms[0].interpolation"
    size = load_recipe(run/"config.yaml").model.img_size
    for part in ("train", "test"):
        cfg = load_recipe(run/"config.yaml", [f"{where}=nearest"])
        transform = instantiate(cfg.dataloader[part].dataset.transform)
        assert transform(Image.open(picture).convert("RGB")).shape == (3, size, size)
    assert transform.transforms[0].interpolation is InterpolationMode.NEAREST
    assert main(["eval", str(run), f"{where}=nearst"]) == 2
    assert "'nearst' is no InterpolationMode: write NEAREST" in capsys.readouterr().err


@pytest.mark.parametrize("name", LIBAIS)
def test_libais_recipe_describes_the_shipped_one(name, ported):
    "Model, optimizer and length are those of the recipe that comes with the package, the corrections of U11 aside."
    theirs, ours = load_recipe(ported/"configs"/f"{name}.py"), load_recipe(name)
    a, b = build_plain(theirs), build_plain(ours)
    assert {n: p.shape for n, p in a.named_parameters()} == {n: p.shape for n, p in b.named_parameters()}
    assert {m.p for m in a.modules() if hasattr(m, "p")} == {m.p for m in b.modules() if hasattr(m, "p")}
    norms = [{n: m.eps for n, m in model.named_modules() if isinstance(m, torch.nn.LayerNorm)} for model in (a, b)]
    assert norms[0] == norms[1] and set(norms[0].values()) == {1e-5}
    steps = [build_optimizer(cfg, model, 1000, 50) for cfg, model in ((theirs, a), (ours, b))]
    for key in ("lr", "betas", "eps"): assert len({str(o.defaults[key]) for o, _ in steps}) == 1
    assert steps[0][1].lr_at(700)[0] == pytest.approx(steps[1][1].lr_at(700)[0], rel=1e-12)
    assert theirs.dataloader.train.mixup_func.num_classes == ours.dataloader.train.mixup_func.num_classes
    for key in ("train_epoch", "warmup_ratio", "test_micro_batch_size", "log_period"):
        assert theirs.train[key] == ours.train[key], key
    rows = theirs.train.train_micro_batch_size * (theirs.train.num_accumulation_steps or 1)
    assert ours.train.global_batch_size in (rows, 8 * rows)  # LiBai's numbers are for 8 ranks


def test_libais_recipe_in_a_layout(ported):
    "A function of the config file reaches the ranks; two replicas train as one."
    file, short = ported/"configs"/"swinv2_cifar100.py", [o.replace("size=2", "size=1") for o in SHORT[:1]] + SHORT[1:]
    small = ["model.embed_dim=24", "model.depths=[1,1]", "model.num_heads=[2,4]", "model.img_size=64"]
    size = [f"dataloader.{part}.transform.transforms[0].size=64" for part in ("train.dataset[0]",)]
    over = [*short, *small, *size, *where("swinv2_cifar100", ported)]
    two = train(file, "dp2", out=ported/"two", overrides=over, progress=False, timeout=100)
    over[0] = SHORT[0]
    one = train(file, "1", out=ported/"one", overrides=over, progress=False)
    np.testing.assert_allclose(two.metrics.loss, one.metrics.loss, rtol=1e-5)
    assert two.model().head.out_features == 100  # the run opens without the file


def test_libais_cifar(ported, monkeypatch):
    "The recipe reads CIFAR-100's own files too."
    folder = ported/"cifar"/theirs.CIFAR100.base_folder
    write_cifar(ported/"cifar", theirs.CIFAR100)
    trust_cifar(monkeypatch, folder, theirs.CIFAR100)
    over = [f"dataloader.train.dataset[0].root={ported/'cifar'}", f"dataloader.test[0].dataset.root={ported/'cifar'}"]
    cfg = load_recipe(ported/"configs"/"swin_cifar100.py", over)
    data = instantiate(cfg.dataloader.train.dataset)
    assert (len(data), data[1]["images"].shape, int(data[1]["labels"])) == (3, (3, 224, 224), 99)
    assert len(data) == len(cifar100(ported/"cifar"))


def test_names_of_libais_modules():
    "What LiBai's and flowvision's modules are called can be imported."
    from libai_wb.data.build import build_image_test_loader, build_image_train_loader
    from libai_wb.data.datasets import CIFAR10Dataset, CIFAR100Dataset, ImageNetDataset, MNISTDataset
    from libai_wb.models import SwinTransformer, SwinTransformerV2, VisionTransformer
    from libai_wb.models.swin_transformer import SwinTransformer as swin
    from libai_wb.models.swin_transformer_v2 import SwinTransformerV2 as swin_v2
    from libai_wb.models.build import build_model
    from libai_wb.models.utils import GraphBase
    from libai_wb.models.vision_transformer import VisionTransformer as vit
    from libai_wb.data.samplers import CyclicSampler, SingleRoundSampler
    from libai_wb.data.structures import DistTensorData, Instance
    assert (swin, swin_v2, vit) == (SwinTransformer, SwinTransformerV2, VisionTransformer)
    assert isinstance(build_model(get_config("common/models/vit.py").vit_tiny_patch16_224), VisionTransformer)
    assert Instance(x=DistTensorData(torch.arange(3), placement_idx=-1)).x.tolist() == [0, 1, 2]
    assert next(iter(CyclicSampler(range(8), 4))) == next(iter(SingleRoundSampler(range(8), 4))) == [0, 1, 2, 3]


def test_the_porting_table_names_modules_exactly():
    "Every dotted name of this library in docs/porting.md is found; where names stay the same, sed finds them."
    text = (HERE.parent/"docs/porting.md").read_text()
    for name in set(re.findall(r"`(libai_wb(?:\.\w+)+)`", text)): locate(name)
    same = re.findall(r"^\| (`libai\.[^|]*) \| the same names? in `([\w.]+)`", text, re.M)
    assert len(same) > 8
    for theirs, module in same:
        names = re.findall(r"`([\w.]+)`", theirs)
        assert names[0].rpartition(".")[0].replace("libai", "libai_wb") == module
        for name in names: locate(f"{module}.{name.rpartition('.')[2]}")


def test_the_porting_table_names_every_key():
    "docs/porting.md: tables whose rows are whole, and a row for each option that is left out."
    text = (HERE.parent/"docs/porting.md").read_text()
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert len(blocks) == 5
    for rows in map(str.splitlines, blocks):
        assert set(rows[1]) <= set("|- ") and len({row.count("|") for row in rows}) == 1, rows[0]
    named = set(re.findall(r"`([\w.]+)[`=]", text))
    assert {*_OPTIONS} <= named and {"optim.do_bias_correction", "model.loss_func"} <= named
    assert list(speaks_to_you(text)) == []


def test_porting_keeps_what_is_ported(ported):
    for name in LIBAIS:
        cfg = load_recipe(ported/"configs"/f"{name}.py")
        before = copy.deepcopy(cfg)
        assert before["_ported_"] and diff(port_config(cfg), before) == []
