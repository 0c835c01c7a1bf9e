"""Using a model: the same figures in every layout and as a plain loop, the same answers for tensors and files."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn

from libai_wb.cli import main
from libai_wb.config.call import LazyCall
from libai_wb.data.augment import image_transform
from libai_wb.data.datasets import ArrayDataset, digits
from libai_wb.data.loaders import EvalLoader
from libai_wb.engine.build import load_recipe
from libai_wb.engine.checkpoint import latest, save_pretrained
from libai_wb.engine.default import train
from libai_wb.engine.inference import evaluate, predict
from libai_wb.mesh.launch import run_ranks

QUIET = dict(progress=False, timeout=90, device="cpu")
ROWS = ["train.test_micro_batch_size=70"]  # 360 samples do not fill their last batch


def pixels(train=True):
    "The digits as 8-bit pictures, so that a PNG holds them exactly."
    images, labels = load_digits(return_X_y=True)
    part = slice(0, 1437) if train else slice(1437, None)
    return ArrayDataset((images[part].reshape(-1, 1, 8, 8) * 255 / 16).round().astype(np.uint8), labels[part],
                        mean=.305, std=.376, class_names=[f"digit {i}" for i in range(10)])


def recipe(folder):
    cfg = load_recipe("vit_nano_digits")
    for part in ("train", "test"): cfg.dataloader[part].dataset = LazyCall(pixels)(train=part == "train")
    cfg.train.update(output_dir=str(folder), train_iter=40)
    return cfg


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A run in dp2 that has begun to tell digits apart."
    return train(recipe(tmp_path_factory.mktemp("inference")), "dp2", name="nano", progress=False, timeout=90)


@pytest.fixture
def files(tmp_path):
    "The first held-out digits as PNG files, and their rows."
    data = pixels(train=False)
    paths = [str(tmp_path/f"{i}.png") for i in range(6)]
    for path, image in zip(paths, data.images): Image.fromarray(image[0]).save(path)
    return paths, data.fetch(range(6))["images"]


# Evaluating

def plain_loop(model):
    "Top-1 and top-5 in percent, counted with torch alone."
    data = pixels(train=False)
    images = (torch.from_numpy(data.images).float() / 255 - .305) / .376
    with torch.no_grad(): hit = model(images).topk(5).indices == torch.from_numpy(data.labels)[:, None]
    return {"Acc@1": 100 * hit[:, 0].sum().item() / len(hit), "Acc@5": 100 * hit.any(1).sum().item() / len(hit)}


@pytest.mark.parametrize("layout", [None, "dp2", "tp2", "pp2"])
def test_figures_are_the_run_s_own_in_every_layout(run, tmp_path, layout):
    found = evaluate(run.path, layout=layout, overrides=ROWS, **QUIET)
    found.to_json(tmp_path/"found.json")
    written = json.loads((tmp_path/"found.json").read_text())
    assert written["metrics"] == run.summary["metrics"] == plain_loop(run.model())
    assert written["samples"] == {"test": 360} and written["layout"] == (layout or "1")
    assert written["weights"] == str(run.path/"checkpoints"/"0000040") and 20 < written["metrics"]["Acc@1"] < 100


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dp3", "dp4", "tp4", "pp4", "dp2tp2", "dp2pp2", "tp2pp2", "dp2tp2pp2"])
def test_figures_are_the_same_in_all_layouts(run, layout):
    assert evaluate(run, layout=layout, overrides=ROWS, **QUIET).metrics == run.summary["metrics"]


def _evaluate_here(rank, n, path):
    found = evaluate(path, progress=False, device="cpu")
    return found.layout, found.metrics, found.samples


def test_ranks_that_are_there_are_used(run):
    want = "dp2", run.summary["metrics"], {"test": 360}
    assert run_ranks(_evaluate_here, 2, run.path, timeout=90) == [want, want]


def test_a_recipe_takes_weights_from_a_run_or_a_checkpoint(run):
    for weights in (run, run.path, latest(run.path/"checkpoints")):
        found = evaluate(recipe("unused"), weights=weights, **QUIET)
        assert found.metrics == run.summary["metrics"] and found.weights.endswith("checkpoints/0000040")


def test_an_evaluation_that_stops_early_says_how_many_it_saw(run):
    found = evaluate(run, layout="dp2", overrides=[*ROWS, "train.evaluation.eval_iter=2"], **QUIET)
    assert found.samples == {"test": 280}  # two batches of 70 on each of two replicas


def test_several_test_sets_keep_their_names(run):
    cfg = recipe("unused")
    cfg.dataloader.test = dict(held=cfg.dataloader.test, seen=LazyCall(EvalLoader)(dataset=LazyCall(pixels)()))
    found = evaluate(cfg, weights=run, layout="dp2", **QUIET)
    assert found.samples == dict(held=360, seen=1437)
    assert {k[5:]: v for k, v in found.metrics.items() if k.startswith("held/")} == run.summary["metrics"]
    assert sorted(found.metrics) == ["held/Acc@1", "held/Acc@5", "seen/Acc@1", "seen/Acc@5"]


def test_a_module_of_torch_is_evaluated_over_replicas(tmp_path):
    "One with batch normalisation, which cannot train in dp2 but can be used there."
    cfg = recipe(tmp_path)
    layers = [LazyCall(nn.Flatten)(), LazyCall(nn.BatchNorm1d)(num_features=64),
              LazyCall(nn.Linear)(in_features=64, out_features=10)]
    cfg.model = LazyCall(chain)(layers=layers)
    mine = train(cfg, name="chain", progress=False)
    for layout in ("1", "dp2"): assert evaluate(mine, layout=layout, **QUIET).metrics == mine.summary["metrics"]
    with pytest.raises(ValueError, match="declares neither facts"): evaluate(mine, layout="tp2", **QUIET)


def chain(layers): return nn.Sequential(*layers)


def test_what_is_filled_in_is_measured_too(tmp_path):
    "MAE: the masks follow the samples, so its figure is the run's own; there is no class to name, and that is said."
    run = train("mae_nano_digits", "pp2", overrides=["train.train_iter=3", f"train.output_dir={tmp_path}"],
                progress=False, timeout=90)
    found = evaluate(run, layout="dp2", overrides=ROWS, **QUIET)
    assert found.metrics == pytest.approx(run.summary["metrics"], rel=1e-6) and found.samples == {"test": 360}
    with pytest.raises(ValueError, match="MaskedAutoencoder gives a dict and no logits"):
        run.predict(torch.rand(2, 1, 8, 8))


# Weights of other libraries

def test_exported_weights_come_back(run, tmp_path, capsys):
    "timm reads what `export` writes, and so does `eval`; a file whose head does not fit is refused, not drawn anew."
    for style in ("timm", "huggingface", "libai"):
        assert main(["export", str(run.path), str(tmp_path/style), "--style", style]) == 0
        assert f"VisionTransformer of {run.path} with the names of {style}" in capsys.readouterr().out
        if style == "timm": # the place by default, and again
            assert main(["export", str(run.path), "--style", style]) == 0
            place = run.path/"export-timm"/"model.safetensors"
            assert str(place) in capsys.readouterr().out
            assert place.read_bytes() == (tmp_path/style/"model.safetensors").read_bytes()
            assert main(["export", str(run.path), "--style", style]) == 2
            assert "export-timm exists already" in capsys.readouterr().err
        layout = "tp2" if style == "huggingface" else "1"
        found = evaluate(recipe("unused"), weights=tmp_path/style/"model.safetensors", layout=layout, **QUIET)
        assert found.metrics == run.summary["metrics"]
    theirs = timm.models.VisionTransformer(img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=32, depth=4,
                                           num_heads=4).eval()
    theirs.load_state_dict(load_file(tmp_path/"timm"/"model.safetensors"))
    images = pixels(train=False).fetch(range(50))["images"]
    with torch.no_grad(): torch.testing.assert_close(run.predict(images).logits, theirs(images), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="has no 'head.* train the head first"):
        evaluate(run, weights=tmp_path/"timm", overrides=["model.num_classes=12"], **QUIET)


# Asking

def test_answers_are_the_model_s(run, files):
    paths, images = files
    model, answer = run.model(), run.predict(images, topk=3)
    with torch.no_grad(): logits = model(images)
    assert torch.equal(answer.logits, logits)
    want = logits.double().softmax(1).topk(3)
    assert torch.equal(answer.order, want.indices) and answer.images == list("012345")
    table = answer.table
    assert torch.equal(torch.tensor(table.probability).view(6, 3), want.values)
    assert table.name.tolist() == [f"digit {c}" for c in table["class"]]
    assert torch.equal(run.predict(images).classes, logits.argmax(1)) and len(run.predict(images).table) == 6
    assert torch.equal(predict(run.path, images, device="cpu").logits, logits)
    assert torch.equal(predict(recipe("unused"), images, weights=run, device="cpu").logits, logits)


def test_files_pictures_and_arrays_are_prepared_as_in_the_evaluation(run, files):
    paths, images = files
    want = run.predict(images).logits
    pictures = [Image.open(p) for p in paths]
    for given in (paths, pictures, [np.asarray(p) for p in pictures], [p.convert("RGB") for p in pictures],
                  images.numpy(), list(images)):
        assert torch.equal(run.predict(given).logits, want)
    assert run.predict(paths).images == paths and run.predict([paths[0], images[1]]).images == [paths[0], "1"]
    assert torch.equal(run.predict(images[2]).logits, run.predict(paths[2]).logits)


def test_the_transform_of_the_config_makes_any_size_fit(run, files):
    paths, images = files
    how = dict(size=8, train=False, channels=1, mean=.305, std=.376, crop=None, interpolation="nearest")
    cfg = recipe("unused")
    cfg.dataloader.test.dataset = LazyCall(digits)(train=False, transform=LazyCall(image_transform)(**how))
    large = [Image.open(p).resize((32, 32), Image.Resampling.NEAREST) for p in paths]
    torch.testing.assert_close(predict(cfg, large, weights=run, device="cpu").logits, run.predict(images).logits)


def test_what_cannot_be_read_is_named(run, files, tmp_path):
    paths, images = files
    (tmp_path/"broken.png").write_bytes(b"no picture")
    Image.new("L", (28, 28)).save(tmp_path/"large.png")
    for given, words in [(torch.rand(2, 3, 8, 8), r"Image 0 .* \(3, 8, 8\) .* \(1, 8, 8\)"),
                         ([*images, torch.rand(1, 9, 9)], r"Image 6 .* \(1, 9, 9\)"),
                         ((images * 255).byte(), "of type uint8"),
                         ([paths[0], tmp_path/"broken.png"], "broken.png cannot be read"),
                         (tmp_path/"large.png", "large.png of 28 × 28 pixels"), ([None], "NoneType"),
                         ([], "No image was given")]:
        with pytest.raises(ValueError, match=words) as e: run.predict(given)
        assert "\n" not in str(e.value)
    with pytest.raises(FileNotFoundError, match="no picture .*gone.png"): run.predict(tmp_path/"gone.png")


def test_weights_are_asked_for(run, tmp_path):
    image, narrow = torch.rand(1, 8, 8), ["model.mlp_ratio=2"]
    with pytest.raises(ValueError, match="A recipe comes without weights"): predict("vit_nano_digits", image)
    with pytest.raises(FileNotFoundError, match="There are no weights"): predict(run, image, weights=tmp_path/"no.pth")
    with pytest.raises(ValueError, match="in checkpoint"): evaluate(run, layout="tp2", overrides=narrow, **QUIET)


# From a shell

def shell(*words, before=()):
    "Output of a command in a process of its own, on the CPU."
    cmd = [sys.executable, *before, "-m", "libai_wb.cli", *map(str, words)]
    here = os.path.dirname(__file__)
    # the run's data set is a function of this file
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": here}
    done = subprocess.run(cmd, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_eval_in_a_shell(run, tmp_path):
    said = shell("eval", run.path, "--json", tmp_path/"eval.json", *ROWS)
    assert "360 samples, layout 1 on" in said
    assert json.loads((tmp_path/"eval.json").read_text())["metrics"] == run.summary["metrics"]


def test_eval_on_ranks_of_torchrun(run, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = shell("eval", run.path, "--layout", "tp2", "--json", tmp_path/"eval.json", before=torchrun)
    assert said.count("360 samples") == 1
    assert json.loads((tmp_path/"eval.json").read_text())["metrics"] == run.summary["metrics"]


def test_predict_in_a_shell(run, files):
    paths, images = files
    answers = json.loads(shell("predict", run.path, *paths[:2], "--topk", "2", "--json", paths[2]))
    assert answers == run.predict(paths[:3], topk=2).to_list()


def test_a_file_that_holds_more_is_taken_on_request(run, files, tmp_path, capsys):
    "What has no place is left out; a weight that the model misses is never drawn in its place."
    file = save_pretrained(run.model(), tmp_path/"more.safetensors")
    state = load_file(file)
    save_file(state | {"extra": torch.zeros(1)}, file)
    calls = ["eval", str(run.path), "--weights", str(file)], ["predict", str(run.path), files[0][0], "--weights", str(file)]
    for words in calls:
        assert main(words) == 2
        assert "1 tensor unexpected (extra)" in (said := capsys.readouterr().err) and "--no-strict" in said
        assert main([*words, "--no-strict"]) == 0
    save_file({k: t for k, t in state.items() if k != "norm.bias"}, file)
    for words in calls:
        assert main(words) == 2 and "--no-strict" not in capsys.readouterr().err
        assert main([*words, "--no-strict"]) == 2
        assert "has no 'norm.bias' of the size" in capsys.readouterr().err


def test_export_says_what_a_file_cannot(tmp_path, capsys):
    "A line on stderr about an eps that timm's reader has to be told; a model that timm has not is refused."
    short = ["train.train_iter=1", "train.evaluation.enabled=false"]
    made = train(recipe(tmp_path), overrides=[*short, "+model.norm_eps=1e-5"], name="eps", progress=False)
    assert main(["export", str(made.path), "--style", "timm"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("libai-wb: warning: VisionTransformer has norm_eps=1e-05") and said.count("\n") == 1
    over = [*short, "+model.ape=true", f"train.output_dir={tmp_path}"]
    swin = train("swin_nano_digits", overrides=over, progress=False)
    assert main(["export", str(swin.path), "--style", "timm"]) == 2
    assert "SwinTransformer has ape=True, and timm" in capsys.readouterr().err
    assert not (swin.path/"export-timm").exists()


@pytest.mark.parametrize("words, sentence", [
    (["eval", "vit_nano_digits"], "A recipe comes without weights"),
    (["predict", "vit_nano_digits", "a.png"], "A recipe comes without weights"),
    (["predict", "RUN", "gone.png"], "There is no picture gone.png"),
    (["predict", "RUN", "a.png", "--weights", "gone.pth"], "There are no weights gone.pth"),
    (["eval", "RUN", "--layout", "pp8"], "the model has 4"),
    (["export", "RUN", "RUN", "--style", "timm"], "exists already"),
    (["export", "RUN", "vit.pth", "--style", "timm"], "call it vit.safetensors"),
    (["export", "RUN", "vit.safetensors", "--style", "tim"], "did you mean 'timm'")])
def test_refusals_are_one_sentence(run, capsys, words, sentence):
    assert main([str(run.path) if w == "RUN" else w for w in words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("libai-wb: ") and said.count("\n") == 1 and sentence in said, said
