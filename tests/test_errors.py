"""A newcomer's mistakes each get one clear sentence, and nothing is written."""
import pytest
import torch

from libai_wb.cli import main

CASES = {
    "unknown recipe": (["train", "vit_nano_digit"], ["neither a shipped recipe nor a file", "did you mean 'vit_nano_digits'"]),
    "misspelt key": (["train", "vit_nano_digits", "train.global_batch=32"], ["train.global_batch", "did you mean train.global_batch_size"]),
    "misspelt option": (["info", "vit_nano_digits", "--layout", "dp2+zero9"], ["'dp2+zero9' is not understood", "for example"]),
    "option of a later version": (["train", "vit_nano_digits", "--layout", "dp2+zero3"], ["zero3", "does not run yet"]),
    "batch does not divide": (["train", "vit_nano_digits", "--layout", "dp3"], ["Global batch 64 is not", "dp 3"]),
    "too many stages": (["train", "vit_nano_digits", "--layout", "pp8"], ["pp=8", "the model has 4"]),
    "nothing to cut": (["info", "vit_nano_digits", "--layout", "tp200"], ["tp200 cuts nothing", "use a smaller tp"]),
    "too many ranks": (["train", "vit_nano_digits", "--layout", "dp4096", "train.global_batch_size=4096"], ["4096 ranks were asked for", "ask for at most"]),
    "missing data": (["train", "vit_micro_fashion_mnist", "+dataloader.train.dataset.root=/no/such/folder"],
                     ["Fashion-MNIST is missing", "/no/such/folder", "apt-get install dataset-fashion-mnist"]),
    "missing patch": (["verify", "vit_nano_digits", "--patch", "nowhere:nothing"], ["'nowhere:nothing' cannot be imported", "module:function"]),
    "label out of range": (["train", "vit_nano_digits", "model.num_classes=5", "train.train_iter=1"],
                           ["of sample ", "is no class: expected 0 to 4", "raise num_classes"]),
    "label out of range, Swin": (["train", "swin_nano_digits", "model.num_classes=5", "train.train_iter=1"],
                                 ["of sample ", "is no class: expected 0 to 4"]),
    "label out of range of a cut head": (["train", "vit_nano_digits", "--layout", "tp2", "--device", "cpu", "model.num_classes=6",
                                          "train.train_iter=1"], ["of sample ", "is no class: expected 0 to 5"]),
    "label out of range of each class's loss": (["train", "vit_nano_digits", "model.num_classes=5", "+model.loss_func=bce",
                                                 "train.train_iter=1"], ["of sample ", "is no class: expected 0 to 4"]),
    "label out of range of mixup": (["train", "vit_nano_digits", "model.num_classes=5", "train.train_iter=1",
                                     "+dataloader.train.mixup_func={_target_: libai_wb.data.Mixup, num_classes: 5}"],
                                    ["of sample ", "came to a Mixup with num_classes=5"]),
    "stage without blocks": (["info", "swin_nano_digits", "model.depths=[0,2]"],
                             ["SwinTransformer got depths=[0, 2]", "give whole numbers of at least 1"]),
    "window of nothing": (["info", "swinv2_nano_digits", "model.window_size=0"], ["SwinTransformerV2 got window_size=0"]),
    "patches of nothing": (["info", "mae_nano_digits", "model.patch_size=0"], ["MaskedAutoencoder got patch_size=0"]),
    "no heads": (["info", "vit_nano_digits", "model.num_heads=0"], ["VisionTransformer got num_heads=0"]),
    "evaluator of another task": (["train", "mae_nano_digits", "train.train_iter=1",
                                   "train.evaluation.evaluator={_target_: libai_wb.evaluation.ClsEvaluator}"],
                                  ["ClsEvaluator needs logits", "the model gave a dict", "use ReconstructionEvaluator"]),
    "no length": (["train", "vit_nano_digits", "train.train_iter=0"], ["train.train_iter", "say how long to train"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence(case, capsys, tmp_path, monkeypatch):
    words, parts = CASES[case]
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("libai-wb: ") and "warning" not in line]
    assert len(lines) == 1 and "Traceback" not in err, err
    for part in parts: assert part in lines[0], lines[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("verb", ["train", "verify"])
def test_no_gpu(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([verb, "vit_nano_digits", "--device", "cuda"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["train", "verify", "info", "recipes", "data"])
def test_every_verb_has_help_with_an_example(verb, capsys):
    with pytest.raises(SystemExit) as end: main([verb, "--help"])
    assert end.value.code == 0
    assert f"example: libai-wb {verb}" in capsys.readouterr().out
