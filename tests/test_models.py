"""Swin, Swin V2 and masked autoencoders with all their randomness: every layout follows one process."""
import pytest

from libai_wb.align.verification import verify
from libai_wb.config import LazyCall
from libai_wb.data.augment import image_transform
from libai_wb.data.mixup import Mixup
from libai_wb.engine.build import build_training, load_recipe

from test_random import GREY, augmented_digits
from test_verify import with_options

LAYOUTS = ["dp2", "dp4", "tp2", "pp2", "pp4", "dp2tp2", "dp2pp2", "tp2pp2", "dp2tp2pp2"]
DROPS = dict(drop_rate=.1, attn_drop_rate=.1, drop_path_rate=.2)
RECIPES = {"swin_nano_digits": DROPS, "swinv2_nano_digits": DROPS, "mae_nano_digits": {},
           "mae_nano_finetune_digits": DROPS}


def recipe(name, samples=200, steps=24):
    "A nano recipe with every source of randomness; 200 samples leave 8 rows for update 3, 1437 leave 29 for update 22."
    cfg = load_recipe(name)
    cfg.train.update(global_batch_size=64, train_micro_batch_size=None, num_accumulation_steps=1, train_epoch=0,
                     train_iter=steps, warmup_ratio=.25)
    cfg.optim.params.clip_grad_max_norm = 1.
    cfg.model.update(RECIPES[name])
    transform = LazyCall(image_transform)(auto_augment="rand-m9-mstd0.5-inc1", erasing=.25, crop="pad", flip=0., **GREY)
    cfg.dataloader.train.update(dataset=LazyCall(augmented_digits)(samples=samples, transform=transform), tail="short")
    if RECIPES[name]:
        cfg.dataloader.train.mixup_func = LazyCall(Mixup)(mixup_alpha=.8, cutmix_alpha=1., label_smoothing=.1, num_classes=10)
    return cfg


def option(layout, acc):
    "One micro-batch needs GPipe where there are stages."
    return with_options(layout, acc == 1 and "pp4" not in layout, acc)


def cover(number):
    "All layouts for one recipe; over four recipes each layout meets both dtypes with both accumulations."
    found = {"float64": [], "float32": []}
    for i, layout in enumerate(LAYOUTS):
        dtype, acc = list(found)[(i + number) % 2], 1 + (i + number // 2) % 2
        found[dtype].append(option(layout, acc))
    return found


def test_the_cover_holds_every_pair():
    seen = {(name, dtype, *text.split("+")[:2]) for number, name in enumerate(RECIPES)
            for dtype, texts in cover(number).items() for text in texts}
    for layout in LAYOUTS:
        mine = [s for s in seen if s[2] == layout]
        assert {s[0] for s in mine} == set(RECIPES) and {s[1] for s in mine} == {"float64", "float32"}
        assert {s[3] for s in mine} == ({"acc4"} if layout == "pp4" else {"acc1", "acc2"})
    for name in RECIPES: assert len({s[1] for s in seen if s[0] == name} | {s[3] for s in seen if s[0] == name}) == 5


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_has_what_it_says(name):
    "A ragged batch inside the compared steps, every layer with its rate, masks where there is an encoder of parts."
    training = build_training(recipe(name))
    assert [int(training.loader.batch(i)["weight"].sum()) for i in range(5)] == [64, 64, 64, 8, 64]
    rates = {n: m.p for n, m in training.model.named_modules() if getattr(m, "p", 0)}
    if not RECIPES[name]:
        assert list(rates.values()) == [.75] and training.loader.batch(0)["images"].shape[1:] == (1, 8, 8)
        return
    assert {.1, .2} <= {round(p, 6) for p in rates.values()} and any("attn_drop" in n for n in rates)
    assert training.loader.batch(0)["labels"].shape == (64, 10)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", RECIPES)
def test_layouts_follow(name, dtype):
    layouts = cover(list(RECIPES).index(name))[dtype]
    answer = verify(recipe(name), layouts, steps=4, dtype=dtype, progress=False)
    assert answer.ok, f"\n{answer}"


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype,acc", [("float64", 1), ("float64", 2), ("float32", 1), ("float32", 2)])
@pytest.mark.parametrize("name", RECIPES)
def test_layouts_follow_for_24_steps(name, dtype, acc, record_property):
    layouts = ["1", *(option(layout, acc) for layout in LAYOUTS)]
    answer = verify(recipe(name, 1437), layouts, steps=24, dtype=dtype, progress=False)
    for result in answer.results: record_property(result.layout, f"margin {result.margin:.2g} {result.worst}")
    assert answer.ok, f"\n{answer}"
