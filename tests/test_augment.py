"Augmentation by sample: one picture for (seed, epoch, sample) with torchvision's, timm's and plain Python transforms."
import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import rand_augment_transform
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms as v1
from torchvision.transforms import v2

from libai_wb.config.call import LazyCall, instantiate
from libai_wb.data.augment import ImageMode, image_transform
from libai_wb.data.seeding import GENERATORS, fetch_sample, find_generators, keep_generators, seed_generators

RECIPE = dict(input_size=32, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=.25, re_mode="pixel",
              interpolation="bicubic", color_jitter=.4)


def speckle(x):
    "Plain Python with all three generators."
    x = x.copy() if isinstance(x, Image.Image) else x
    for _ in range(3): x.putpixel((random.randrange(20), np.random.randint(20)), (int(torch.randint(256, ())), 0, 0))
    return x


def tensor(*pieces): return v2.Compose([*pieces, v2.PILToTensor()])


TRANSFORMS = dict(
    resized_crop=(tensor(v2.RandomResizedCrop(16)), {"torch"}),
    rand_augment=(tensor(v2.RandAugment()), {"torch"}),
    auto_augment=(tensor(v2.AutoAugment()), {"torch"}),
    trivial=(tensor(v2.TrivialAugmentWide()), {"torch"}),
    erasing=(v2.Compose([v2.PILToTensor(), v2.RandomErasing(p=1.)]), {"torch"}),
    v1=(v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.RandomApply([v1.ColorJitter(.4, .4)]),
                    v1.ToTensor(), v1.RandomErasing(1.)]), {"torch"}),
    timm=(create_transform(**RECIPE), {"torch", "numpy", "random"}),
    augmix=(create_transform(**RECIPE | dict(auto_augment="augmix-m5-w4-d2")), {"torch", "numpy", "random"}),
    recipe=(image_transform(16, auto_augment="rand-m9-mstd0.5-inc1", erasing=.5), {"torch", "numpy", "random"}),
    python=(tensor(speckle), {"torch", "numpy", "random"}),
)


class Pictures:
    "Twelve noisy pictures of 20 × 24 pixels."
    def __init__(self, transform, form=lambda image, i: dict(images=image, labels=i)):
        self.transform, self.form = transform, form
        self.pictures = np.random.default_rng(0).integers(0, 256, (12, 20, 24, 3)).astype(np.uint8)
    def __len__(self): return 12
    def __getitem__(self, i): return self.form(self.transform(Image.fromarray(self.pictures[i])), i)


def fetch(data, use, ids, epoch=0, between=lambda: None, **kw):
    "Images by sample, fetched in the order of `ids`."
    found = {}
    with keep_generators():
        for i in ids:
            between()
            found[i] = fetch_sample(data, i, use, 0, "augment", epoch, i, **kw)["images"]
    return found


def scramble():
    "What a worker, another library or a printed figure does to the global generators."
    torch.manual_seed(random.randrange(2**31)); np.random.rand(random.randrange(9)); random.seed(np.random.bytes(4))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_one_picture_for_a_sample(name):
    transform, draws = TRANSFORMS[name]
    data = Pictures(transform)
    use = find_generators(data)
    assert set(use) == draws
    alone = fetch(data, use, range(12))
    for other in (fetch(data, use, [7, 3, 11, 0, 5]), fetch(data, use, range(11, -1, -1), between=scramble),
                  fetch(Subset(data, range(12)), use, [4, 4, 9], check=True),
                  fetch(ConcatDataset([data]), use, [2, 2], between=lambda: data[1])):
        for i, image in other.items(): assert torch.equal(image, alone[i]), i
    later = fetch(data, use, range(12), epoch=1)
    assert sum(torch.equal(alone[i], later[i]) for i in range(12)) <= 3  # a policy may leave a picture as it is


@pytest.mark.parametrize("name", TRANSFORMS)
def test_samples_draw_different_numbers(name):
    "Twelve times the same picture, hardly ever changed the same way."
    data = Pictures(TRANSFORMS[name][0])
    data.pictures[:] = data.pictures[0]
    found = {x.numpy().tobytes() for x in fetch(data, find_generators(data), range(12)).values()}
    assert len(found) >= 7


@pytest.mark.parametrize("name", ["timm", "python"])
def test_global_generators_are_as_before(name):
    data = Pictures(TRANSFORMS[name][0])
    with keep_generators():
        scramble()
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        use = find_generators(data)
        fetch(data, use, range(3), check=True)
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[2]
        assert (np.random.get_state()[1] == before[1]).all()


class Seeded:
    "A dataset of pictures that seeds its samples itself, for PyTorch's own loader."
    def __init__(self, data, use): self.data, self.use = data, use
    def __len__(self): return len(self.data)
    def __getitem__(self, i): return fetch_sample(self.data, i, self.use, 0, "augment", 0, i)["images"]


def test_real_workers_give_the_same_pictures():
    data = Pictures(TRANSFORMS["timm"][0])
    use = find_generators(data)
    alone = fetch(data, use, range(12))
    got = list(DataLoader(Seeded(data, use), batch_size=4, num_workers=2, shuffle=False, timeout=60))
    assert torch.equal(torch.cat(got), torch.stack(list(alone.values())))


# The check

class Own:
    "A transform with a generator of its own."
    def __init__(self): self.rng = np.random.default_rng(0)
    def __call__(self, x): return x + self.rng.random()


class Sometimes:
    "A transform that draws from NumPy once in a hundred times: too seldom to be seen at set-up."
    def __call__(self, x): return x * np.random.rand() if torch.rand(()) < .01 else x


def fields(x, i):
    "An object with fields, as LiBai's `Instance`."
    item = type("Fields", (), {})()
    item.images, item.labels = x, i
    return item


FORMS = dict(mapping=lambda x, i: dict(images=x, labels=i), pair=lambda x, i: (x, i),
             pil=lambda x, i: (v2.functional.to_pil_image(x.float()), i), array=lambda x, i: [x.numpy(), np.int64(i)],
             nested=lambda x, i: dict(a=[dict(b=(x,))]), fields=fields)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_own_generator_is_named_whatever_the_item(form):
    pieces = [v2.RandomHorizontalFlip(), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    good, bad = (Pictures(v2.Compose([*pieces, *more]), form) for more in ([], [Own()]))
    with keep_generators():
        fetch_sample(good, 2, ("torch",), 0, 2, check=True)
        with pytest.raises(ValueError, match="Sample 2 comes out differently .* first in Own;"):
            fetch_sample(bad, 2, ("torch",), 0, 2, check=True)


def test_a_rare_draw_is_named():
    pieces = [v2.RandomHorizontalFlip(), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), Sometimes()]
    data = Pictures(v2.Compose(pieces))
    use = find_generators(data)
    assert use == ("torch",)
    with keep_generators(), pytest.raises(ValueError, match=r"numpy in Sometimes, .*generators = \('torch', 'numpy'\)"):
        for epoch in range(200): fetch(data, use, range(12), epoch, check=True)
    data.generators = ("numpy",)
    assert find_generators(data) == ("torch", "numpy")
    with keep_generators():
        for epoch in range(20): fetch(data, find_generators(data), range(12), epoch, check=True)


@pytest.mark.parametrize("name", ["v1", "timm", "python"])
def test_an_unseeded_transform_is_named(name):
    named = dict(v1="RandomResizedCrop", timm="RandomResizedCropAndInterpolation", python="speckle")
    with keep_generators(), pytest.raises(ValueError, match=f"in {named[name]}, which"):
        fetch(Pictures(TRANSFORMS[name][0]), (), [3], check=True)


def test_a_policy_inside_a_recipe_is_named():
    data = Pictures(TRANSFORMS["timm"][0])
    with keep_generators(), pytest.raises(ValueError, match="of numpy in RandAugment"):
        fetch(data, ("torch", "random"), [3], check=True)


# LiBai's recipes

def weights_after(data, use, orders):
    "A linear model after one update per order, the rows put back in sequence before each update."
    model = torch.nn.Linear(3 * 32 * 32, 12)
    with torch.no_grad(): model.weight.copy_(torch.linspace(-.01, .01, model.weight.numel()).view_as(model.weight))
    torch.nn.init.zeros_(model.bias)
    for epoch, order in enumerate(orders):
        images = fetch(data, use, order, epoch, between=scramble)
        x = torch.stack([images[i] for i in range(12)]).flatten(1)
        torch.nn.functional.cross_entropy(model(x), torch.arange(12)).backward()
        with torch.no_grad():
            for p in model.parameters(): p -= .01 * p.grad; p.grad = None
    return model.weight.detach()


def test_timms_factory_trains_from_a_config():
    data = instantiate(LazyCall(Pictures)(transform=LazyCall(create_transform)(**RECIPE)))
    use = find_generators(data)
    assert set(use) == set(GENERATORS)
    orders = [np.random.default_rng(e).permutation(12).tolist() for e in range(4)]
    assert torch.equal(weights_after(data, use, orders), weights_after(data, use, [range(12)] * 4))


def test_policies_posterize_to_nothing():
    "Magnitude 10 keeps 0 bits; a Pillow that refuses it stops a recipe at one sample in a thousand."
    policy = rand_augment_transform("rand-m10-n8-inc1", dict(translate_const=4, img_mean=(0, 0, 0)))
    op = next(op for op in policy.ops if op.name == "PosterizeIncreasing")
    op.prob = 1.
    assert not np.asarray(op(Image.new("RGB", (4, 4), (255, 255, 255)))).any()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 28, 224])
@pytest.mark.parametrize("crop", ["resized", "pad", None])
def test_image_transform_takes_any_picture(size, channels, crop):
    pictures = [Image.new("L", (8, 8), 100), Image.new("RGB", (30, 20)), Image.new("P", (300, 40))]
    train = image_transform(size, channels=channels, crop=crop, auto_augment="rand-m9-mstd0.5-inc1", erasing=1.)
    plain = image_transform(size, train=False, channels=channels, crop=crop)
    with keep_generators():
        seed_generators(GENERATORS, size, channels)
        for picture in pictures:
            for tf in (train, plain):
                x = tf(picture)
                assert x.shape == (channels, size, size) and x.dtype == torch.float32 and x.isfinite().all()


def test_evaluation_hides_no_border_unless_asked():
    "R-46: the exact resize sees what the short-side resize and centre crop leave out."
    wide = np.zeros((32, 64, 3), np.uint8)
    wide[:, :8] = 255
    middle, exact = (image_transform(32, train=False, mean=0., std=1., crop_pct=p)(Image.fromarray(wide))
                     for p in (.875, None))
    assert middle.max() < .02 and exact.max() > .98


def test_image_transform_is_torchvisions_own():
    picture = Image.fromarray(Pictures(None).pictures[0])
    mean, std = (.485, .456, .406), (.229, .224, .225)
    ref = v2.Compose([v2.Resize(36, v2.InterpolationMode.BICUBIC), v2.CenterCrop(32), v2.ToImage(),
                      v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
    assert torch.equal(image_transform(32, train=False)(picture), ref(picture).as_subclass(torch.Tensor))
    theirs = create_transform(32, interpolation="bicubic", crop_pct=.875)(picture)
    torch.testing.assert_close(image_transform(32, train=False)(picture), theirs, rtol=0, atol=1e-6)
    assert ImageMode("RGB")(picture) is picture
