"""Data sets on disk: small files of each real format, read as torchvision reads them, downloaded once, diagnosed."""
import gzip
import hashlib
import io
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset
from torchvision import datasets as theirs
from torchvision.datasets import utils as downloads
from torchvision.transforms import v2

from libai_wb.cli import main
from libai_wb.data.catalog import inspect_dataset
from libai_wb.data.datasets import (FASHION_FOLDER, UnreadableSample, as_fields, check_fields,
                                    check_map_style, digits, fashion_mnist)
from libai_wb.data.folders import cifar10, cifar100, download_dataset, imagenet, mnist, one_at_a_time
from libai_wb.data.loaders import TrainLoader, fetch_rows
from libai_wb.data.splits import split_dataset
from libai_wb.mesh.processes import forkserver

RNG = np.random.default_rng(0)
TENSOR = v2.Compose([v2.RandomCrop(8), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def md5(path): return hashlib.md5(path.read_bytes()).hexdigest()


# Files of the real formats

def write_idx(path, x):
    "An idx file of bytes, packed if its name says so."
    data = b"\0\0\x08" + bytes([x.ndim]) + struct.pack(f">{x.ndim}I", *x.shape) + x.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_mnist(folder, suffix=""):
    "The four files, 12 samples to train on and 5 others."
    for part, n in (("train", 12), ("t10k", 5)):
        write_idx(folder/f"{part}-images-idx3-ubyte{suffix}", RNG.integers(0, 256, (n, 28, 28)).astype(np.uint8))
        write_idx(folder/f"{part}-labels-idx1-ubyte{suffix}", (np.arange(n) % 10).astype(np.uint8))


def write_cifar(root, kind):
    "Python 2 pickles of 3 rows each, as published."
    folder, classes = root/kind.base_folder, 10 if kind is theirs.CIFAR10 else 100
    folder.mkdir(parents=True)
    labels = "labels" if classes == 10 else "fine_labels"
    for k, (name, _) in enumerate(kind.train_list + kind.test_list):
        rows = {"data": RNG.integers(0, 256, (3, 3072)).astype(np.uint8), labels: [k, classes - 1, 0]}
        (folder/name).write_bytes(pickle.dumps(rows, protocol=2))
    meta = {kind.meta["key"]: [f"class {i}" for i in range(classes)]}
    (folder/kind.meta["filename"]).write_bytes(pickle.dumps(meta, protocol=2))


def trust_cifar(patch, folder, kind):
    "Make the checksums of the small files the published ones."
    for which in ("train_list", "test_list"):
        patch.setattr(kind, which, [[n, md5(folder/n)] for n, _ in getattr(kind, which)])
    patch.setattr(kind, "meta", kind.meta | dict(md5=md5(folder/kind.meta["filename"])))


def noise(): return Image.fromarray(RNG.integers(0, 256, (40, 50, 3)).astype(np.uint8))


def write_tree(root, **splits):
    "JPEGs of noise: split → class folder → number."
    for split, classes in splits.items():
        for name, n in classes.items():
            (folder := root/split/name).mkdir(parents=True)
            for i in range(n): noise().save(folder/f"{i}.JPEG")


# Reading

@pytest.mark.parametrize("train", [True, False])
def test_mnist_equals_torchvision(tmp_path, train):
    write_mnist(tmp_path/"MNIST"/"raw")
    want, got = theirs.MNIST(tmp_path, train=train), mnist(tmp_path, train)
    assert np.array_equal(got.images[:, 0], want.data) and np.array_equal(got.labels, want.targets)
    x = got.fetch([1, 0])["images"]
    torch.testing.assert_close(x[1, 0], (want.data[0] / 255 - .1307) / .3081)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_cifar_equals_torchvision(tmp_path, monkeypatch, name, train):
    kind, ours = getattr(theirs, name), dict(CIFAR10=cifar10, CIFAR100=cifar100)[name]
    write_cifar(tmp_path, kind)
    trust_cifar(monkeypatch, tmp_path/kind.base_folder, kind)
    want, got = kind(tmp_path, train=train), ours(tmp_path, train)
    assert len(got) == len(want) > 0 and got.class_names == tuple(want.classes)
    for i, (image, label) in enumerate(want):
        assert np.array_equal(got.images[i].transpose(1, 2, 0), np.asarray(image)) and got.labels[i] == label
    x = got.fetch(range(len(got)))["images"]
    usual = dict(CIFAR10=((.4914, .4822, .4465), (.2470, .2435, .2616)),
                 CIFAR100=((.5071, .4865, .4409), (.2673, .2564, .2762)))[name]
    torch.testing.assert_close(x[0], v2.functional.normalize(torch.from_numpy(got.images[0]) / 255, *usual))


def test_a_transform_gets_what_torchvisions_gets(tmp_path, monkeypatch):
    kind = theirs.CIFAR10
    write_cifar(tmp_path, kind), write_mnist(tmp_path/"MNIST"/"raw")
    trust_cifar(monkeypatch, tmp_path/kind.base_folder, kind)
    for want, got in ((kind(tmp_path, transform=TENSOR), cifar10(tmp_path, transform=TENSOR)),
                      (theirs.MNIST(tmp_path, transform=TENSOR), mnist(tmp_path, transform=TENSOR))):
        for i in (0, 7):
            torch.manual_seed(i), (one := as_fields(want[i]))
            torch.manual_seed(i), (two := as_fields(got[i]))
            assert torch.equal(one["images"], two["images"]) and one["labels"] == two["labels"]


def test_a_foreign_pickle_is_not_opened(tmp_path):
    class Bomb:
        "Leaves a file behind when it is unpickled."
        def __reduce__(self): return os.mkdir, (str(tmp_path/"boom"),)
    write_cifar(tmp_path, theirs.CIFAR100)
    (tmp_path/"cifar-100-python"/"train").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="CIFAR-100 is damaged: train, test, meta in"): cifar100(tmp_path)
    assert not (tmp_path/"boom").exists()


def test_one_damaged_file_is_named(tmp_path, monkeypatch):
    kind = theirs.CIFAR10
    write_cifar(tmp_path, kind)
    trust_cifar(monkeypatch, folder := tmp_path/kind.base_folder, kind)
    (folder/"data_batch_3").write_bytes((folder/"data_batch_3").read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged: data_batch_3 in"): cifar10(tmp_path)
    (folder/"data_batch_3").unlink()
    with pytest.raises(ValueError, match="missing: no data_batch_3 in"): cifar10(tmp_path, train=False)


# Downloads, from a server in this process

class Quiet(SimpleHTTPRequestHandler):
    "Serves a folder without a word."
    def log_message(self, *args): pass


@pytest.fixture
def away(tmp_path, monkeypatch):
    "A folder on a web server."
    (folder := tmp_path/"away").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=.05), daemon=True).start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown(), server.server_close()


def publish(away, name):
    "Attributes of torchvision's class that make it download from the folder `away`."
    folder, url = away
    kind = getattr(theirs, name)
    if name == "CIFAR10":
        write_cifar(folder, kind)
        with tarfile.open(folder/"c.tar.gz", "w:gz") as tar: tar.add(folder/kind.base_folder, kind.base_folder)
        sums = {n: md5(folder/kind.base_folder/n) for n, _ in [*kind.train_list, *kind.test_list]}
        return dict(url=f"{url}c.tar.gz", tgz_md5=md5(folder/"c.tar.gz"),
                    **{k: [[n, sums[n]] for n, _ in getattr(kind, k)] for k in ("train_list", "test_list")},
                    meta=kind.meta | dict(md5=md5(folder/kind.base_folder/kind.meta["filename"])))
    write_mnist(folder, ".gz")
    return dict(mirrors=[url], resources=[(n, md5(folder/n)) for n, _ in kind.resources])


OURS = dict(MNIST=mnist, CIFAR10=cifar10, FashionMNIST=fashion_mnist)
NAMES = dict(MNIST="mnist", CIFAR10="cifar10", FashionMNIST="fashion_mnist")


@pytest.mark.parametrize("name", OURS)
def test_download(tmp_path, away, monkeypatch, name):
    for k, v in publish(away, name).items(): monkeypatch.setattr(getattr(theirs, name), k, v)
    download_dataset(NAMES[name], home := tmp_path/"home")
    assert len(OURS[name](home, train=True)) > len(OURS[name](home, train=False)) > 0
    assert inspect_dataset(NAMES[name], home).complete
    monkeypatch.setattr(downloads, "_urlretrieve", None)  # whoever downloads again fails
    (home/f".{NAMES[name]}.lock").unlink()
    download_dataset(NAMES[name], home)
    assert not (home/f".{NAMES[name]}.lock").exists()  # a complete ROOT may be read-only


def test_what_a_killed_download_left_is_replaced(tmp_path, away, monkeypatch):
    for k, v in publish(away, "MNIST").items(): monkeypatch.setattr(theirs.MNIST, k, v)
    want = mnist(tmp_path/"home", download=True).images
    cut = tmp_path/"home"/"MNIST"/"raw"/"train-images-idx3-ubyte"
    cut.write_bytes(cut.read_bytes()[:500])
    with pytest.raises(ValueError, match="cut short"): mnist(tmp_path/"home")
    assert np.array_equal(mnist(tmp_path/"home", download=True).images, want)


def _download_at_once(name, changes, root, log, start):
    "In a process: download slowly, and note each file that is fetched."
    os.environ["no_proxy"] = "127.0.0.1"
    slow = downloads._urlretrieve
    def fetch(url, filename, **kw):
        with open(log, "a") as f: f.write(f"{url}\n")
        time.sleep(.3)
        slow(url, filename, **kw)
    downloads._urlretrieve = fetch
    for k, v in changes.items(): setattr(getattr(theirs, name), k, v)
    start.wait(60)
    assert len(OURS[name](root, download=True)) == 12


def test_two_processes_download_once(tmp_path, away):
    changes, log, context = publish(away, "MNIST"), tmp_path/"log", forkserver()
    start = context.Barrier(2)
    ranks = [context.Process(target=_download_at_once, args=("MNIST", changes, tmp_path/"home", log, start))
             for _ in range(2)]
    for r in ranks: r.start()
    for r in ranks: r.join(90)
    assert [r.exitcode for r in ranks] == [0, 0]
    assert len(log.read_text().split()) == 4


def _hold(path, held):
    with one_at_a_time(path): held.set(), time.sleep(60)


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    context = forkserver()
    holder = context.Process(target=_hold, args=(tmp_path/"lock", held := context.Event()))
    holder.start()
    assert held.wait(60)
    with pytest.raises(ValueError, match="Another process has held"), one_at_a_time(tmp_path/"lock", .1): pass
    os.kill(holder.pid, signal.SIGKILL), holder.join(30)
    with one_at_a_time(tmp_path/"lock", 5): pass


@pytest.mark.parametrize("name, changes", [
    ("MNIST", dict(mirrors=["http://127.0.0.1:1/", "file:///no/such/mirror/"])),  # nobody listens on port 1
    ("CIFAR10", dict(url="http://127.0.0.1:1/c.tar.gz")),
    ("CIFAR10", dict(url="http://no-such-host.invalid/c.tar.gz"))])
def test_no_network(tmp_path, monkeypatch, name, changes, capsys):
    monkeypatch.setenv("no_proxy", "*")
    for k, v in changes.items(): monkeypatch.setattr(getattr(theirs, name), k, v)
    with pytest.raises(ValueError, match="could not be downloaded .*where there is no network bring ROOT/") as e:
        OURS[name](tmp_path, download=True)
    assert "\n" not in str(e.value)
    assert main(["data", NAMES[name], str(tmp_path), "--download"]) == 1
    assert "problem" in capsys.readouterr().out


def test_a_changed_archive_is_refused(tmp_path, away, monkeypatch):
    for k, v in publish(away, "CIFAR10").items(): monkeypatch.setattr(theirs.CIFAR10, k, v)
    (away[0]/"c.tar.gz").write_bytes(b"a login page")
    with pytest.raises(ValueError, match="CIFAR-10 could not be downloaded .*corrupted"):
        download_dataset("cifar10", tmp_path)


# Image trees

@pytest.fixture
def tree(tmp_path):
    "Three classes; nested folders, odd suffixes, colour modes and files that are no images."
    write_tree(tmp_path, train=dict(ant=3, bee=2, cow=4), val=dict(ant=1, bee=1, cow=2))
    bee = tmp_path/"train"/"bee"
    (bee/"deeper").mkdir()
    Image.new("L", (30, 300), 77).save(bee/"deeper"/"grey.PNG")
    Image.new("CMYK", (300, 30), (9, 99, 9, 9)).save(bee/"cmyk.jpg")
    Image.new("RGBA", (20, 20), (1, 2, 3, 4)).save(bee/"alpha.webp")
    (bee/"notes.txt").write_text("no image"), (tmp_path/"train"/"loose.JPEG").touch()
    return tmp_path


@pytest.mark.parametrize("split", ["train", "val"])
def test_imagenet_equals_torchvision(tree, split):
    plain = v2.Compose([v2.Resize((16, 16)), v2.ToImage()])
    want, got = theirs.ImageFolder(tree/split, transform=plain), imagenet(tree, split, transform=plain)
    assert len(got) == len(want) and got.class_names == tuple(want.classes) and got.labels.tolist() == want.targets
    for i in range(len(want)):
        assert torch.equal(got[i]["images"], want[i][0]) and got[i]["labels"] == want[i][1]
    facts = inspect_dataset("imagenet", tree).splits[split]
    counts = np.bincount(want.targets)
    assert facts == (len(want), 3, counts.min(), counts.max())


def test_the_usual_pictures(tree):
    val, train = imagenet(tree, "val"), imagenet(tree, "train")
    image = Image.open(val.samples[0][0]).convert("RGB")  # 50×40: the shorter side becomes 256
    x = np.asarray(image.resize((320, 256), Image.BICUBIC).crop((48, 16, 272, 240)), dtype=np.float32) / 255
    want = (x - np.float32([.485, .456, .406])) / np.float32([.229, .224, .225])
    np.testing.assert_allclose(val[0]["images"].numpy(), want.transpose(2, 0, 1), atol=1e-5)
    assert torch.equal(val[0]["images"], val[0]["images"]) and type(val[0]["images"]) is torch.Tensor
    torch.manual_seed(0)
    pictures = [train[0]["images"] for _ in range(3)]
    assert all(p.shape == (3, 224, 224) for p in pictures) and not torch.equal(*pictures[:2])


def test_trees_train(tree):
    batch = TrainLoader(imagenet(tree, "val"), 4, shuffle=False).batch(0)
    assert batch["images"].shape == (4, 3, 224, 224) and batch["labels"].tolist() == [0, 1, 2, 2]
    check_fields(imagenet(tree), ["images", "labels", "ids", "weight"])


def broken_png():
    noise().save(data := io.BytesIO(), "PNG")
    return data.getvalue()[:60] + b"\xff" * 200


DAMAGE = {"cut short": lambda p: p.write_bytes(p.read_bytes()[:700]), "empty": lambda p: p.write_bytes(b""),
          "no image": lambda p: p.write_text("<html>404</html>"), "broken png": lambda p: p.write_bytes(broken_png()),
          "gone": Path.unlink, "a folder": lambda p: (p.unlink(), p.mkdir())}


@pytest.mark.parametrize("how", DAMAGE)
def test_an_unreadable_image_is_named(tree, how):
    data = imagenet(tree, "val")
    DAMAGE[how](path := Path(data.samples[2][0]))
    with pytest.raises(UnreadableSample, match=r"Sample 2, .*val/cow/0\.JPEG, cannot be read \(.+\); fetch") as e:
        data[2]
    assert (e.value.sample, e.value.path) == (2, str(path)) and data[3] and "\n" not in str(e.value)


def test_a_mistake_in_a_transform_is_no_unreadable_image(tree):
    with pytest.raises(ZeroDivisionError): imagenet(tree, transform=lambda image: 1 / 0)[0]


def test_flat_validation_images(tmp_path, capsys):
    write_tree(tmp_path, train=dict(ant=1))
    write_tree(tmp_path, **{"val": {"": 3}})
    assert len(imagenet(tmp_path)) == 1  # train alone is well
    with pytest.raises(ValueError, match="val is flat: it holds 3 images such as 0.JPEG .*ILSVRC2012_devkit"):
        imagenet(tmp_path, "val")
    assert main(["data", "imagenet", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "is flat" in out and "1 samples, 1 classes" in out


# What a dataset may be

def test_torchvisions_own_datasets_need_no_wrapper(tmp_path):
    write_mnist(tmp_path/"MNIST"/"raw")
    data = theirs.MNIST(tmp_path, transform=v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]))
    check_map_style(data), check_fields(data, ["images", "labels"])
    assert fetch_rows(data, [3, 11])["labels"].tolist() == [3, 1]
    with pytest.raises(ValueError, match="'images' of a sample is a PIL image.*v2.ToImage"):
        fetch_rows(theirs.MNIST(tmp_path), [0])


def test_streams_are_refused():
    class Stream(IterableDataset):
        def __len__(self): return 10
        def __iter__(self): return iter([(0., 1)] * 10)
    with pytest.raises(ValueError, match="neither the order.*nor where a run resumes, nor a rank's share"):
        check_map_style(Stream())


def test_digits_as_pictures():
    tensor = v2.PILToTensor()
    one, many = digits(transform=tensor), digits()
    assert torch.equal(one[5]["images"].float() / 255, torch.from_numpy(many.images[5]).mul(255).round() / 255)


# Parts

def test_parts_need_nothing_but_philox_and_a_sort():
    "Another program finds the parts from the hash of their name, a raw Philox stream and a stable sort."
    seed = int.from_bytes(hashlib.blake2b(b"#1\x1fsplit", digest_size=8).digest(), "big") >> 1
    raw = np.random.Philox(seed).random_raw(10).tolist()
    order = sorted(range(10), key=raw.__getitem__)
    assert [p.ids.tolist() for p in split_dataset(range(10), .3, seed=1)] == [sorted(order[:7]), sorted(order[7:])]
    assert [p.ids.tolist() for p in split_dataset(range(10), [2, 7, 1], seed=1)][2] == order[9:] == [3]


@pytest.mark.parametrize("n", [4, 10, 97])
@pytest.mark.parametrize("parts", [.34, 1, [.5, .25, .25], [1 / 3] * 3])
def test_every_sample_is_in_one_part(n, parts):
    found = split_dataset(range(n), parts, seed=n)
    assert sorted(i for p in found for i in p) == list(range(n)) and all(len(p) for p in found)
    assert all(np.array_equal(p.ids, q.ids) for p, q in zip(found, split_dataset(range(n), parts, seed=n)))


def test_a_part_trains_as_quickly_as_the_whole():
    train, held = split_dataset(digits(), .1)
    assert hasattr(train, "fetch") and len(held) == 144
    batch = TrainLoader(held, 16).batch(3)
    assert torch.equal(batch["images"], digits().fetch(held.ids[batch["ids"]])["images"])


# The verb

def test_the_verb_on_real_files(tmp_path, capsys):
    if not FASHION_FOLDER.exists(): pytest.skip("Debian package dataset-fashion-mnist is not installed")
    assert main(["data", "fashion_mnist", "--json", str(tmp_path/"f.json")]) == 0
    assert "60,000 samples, 10 classes, 6,000 to 6,000 per class" in capsys.readouterr().out
    answer = json.loads((tmp_path/"f.json").read_text())
    assert answer["complete"] and len(answer["files"]) == 4
    assert answer["splits"]["test"] == dict(samples=10_000, classes=10, smallest=1000, largest=1000)


def test_the_verb_from_a_shell(tree):
    script = [sys.executable, "-m", "libai_wb.cli", "data", "imagenet"]
    done = subprocess.run([*script, tree], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "ImageNet: complete" in done.stdout, done
    assert "9 samples" not in done.stdout and "12 samples, 3 classes, 3 to 5 per class" in done.stdout
    assert "12 files" in done.stdout and not done.stderr


def test_the_verb_says_what_is_missing(tmp_path, capsys):
    for name in ("mnist", "cifar10", "cifar100", "imagenet"):
        assert main(["data", name]) == main(["data", name, str(tmp_path)]) == 1
        assert f"libai-wb data {name} ROOT" in capsys.readouterr().out
    assert main(["data", "imagenet", str(tmp_path), "--download"]) == 2
    assert "image-net.org" in capsys.readouterr().err


def test_the_verb_has_help_and_a_list(capsys):
    with pytest.raises(SystemExit): main(["data", "--help"])
    assert "example: libai-wb data cifar10" in capsys.readouterr().out
    assert main(["data"]) == 0
    assert "ROOT/{train,val}/CLASS/*.JPEG" in capsys.readouterr().out
