"""Code that was written in a notebook: it trains in any layout, stays with the run, and opens where the notebook is gone.

One kernel defines a model, a data set and a transform over several cells; a fresh process in another folder opens its
runs. Everything is gloo on the loopback device.
"""
import json
import re
import subprocess
import sys
from textwrap import dedent

import pytest
from kernels import LOAD, new_kernel, nothing_left  # noqa: F401

pytestmark = pytest.mark.timeout(240)
CELLS = ["""
import numpy as np, torch
import sklearn.datasets
from torch import nn
import torch.nn.functional as F
from libai_wb import Run, evaluate, load_recipe, train, verify
from libai_wb.config import LazyCall
from libai_wb.layers import Linear
from libai_wb.mesh.topology import ModelFacts, Unit
""", """
SCALE, WIDTHS = 2., dict(hidden=32)
SHIFT = torch.tensor(.5)
def squash(x): return F.gelu(x) * SCALE
""", """%%distributed -n 2 --local
from torch import nn
class Base(nn.Module):
    def forward(self, images, ids=None, step=None):
        x = images
        for unit in self.units(): x = unit.call(x, ids, step)
        return x
    def units(self):
        blocks = [Unit(f"blocks.{i}", self.block(str(i)), (f"blocks.{i}",)) for i in range(2)]
        return [Unit("stem", self.start, ("stem",)), *blocks, Unit("head", self.end, ("head",))]
    def block(self, key): return lambda x, ids, step: x + self.blocks[key](x)
""", """
class Block(nn.Sequential):
    def forward(self, x): return self[1](squash(self[0](x)))
class Net(Base):
    "Made of pieces of other cells."
    def __init__(self, classes=10, width=WIDTHS["hidden"], in_chans=1, img_size=8):
        super().__init__()
        self.stem, self.head = Linear(64, width), Linear(width, classes)
        cut = lambda: Block(Linear(width, 4 * width, parallel="col"), Linear(4 * width, width, parallel="row"))
        self.blocks = nn.ModuleDict({str(i): cut() for i in range(2)})
    def start(self, x, ids, step): return self.stem(x.flatten(1) - SHIFT)
    def end(self, x, ids, step): return self.head(x)
    def predict(self, output): return output
    def facts(self): return ModelFacts(depth=2, heads=1, classes=10, width=32, hidden=128)
""", """
@fastcore.basics.patch
def loss(self: Net, output, batch): return F.cross_entropy(output, batch["labels"], reduction="none")
""", """
class Digits(torch.utils.data.Dataset):
    def __init__(self, transform, rows=slice(0, 256)):
        self.x, self.y = (a[rows] for a in sklearn.datasets.load_digits(return_X_y=True))
        self.transform = transform
    def __len__(self): return len(self.y)
    def __getitem__(self, i): return dict(images=self.transform(self.x[i]), labels=int(self.y[i]))

def augment(x): return plain(x + np.random.randn(64))
def plain(x): return torch.tensor(np.asarray(x) / 16).float().view(1, 8, 8)
""", """
cfg = load_recipe("vit_nano_digits", ["train.train_iter=4", "train.output_dir=out", "train.global_batch_size=16",
                                      "optim.lr=1e-2"])
cfg.model, cfg.optim.params.overrides = LazyCall(Net)(), {}
cfg.dataloader.train.dataset = LazyCall(Digits)(transform=augment)
cfg.dataloader.test.dataset = LazyCall(Digits)(transform=plain)
def losses(run): return [round(x, 5) for x in run.metrics.loss.dropna().tolist()]
"""]
FRESH = """
import json, sys
import torch
from libai_wb import Run, evaluate, train
from libai_wb.cli import main
from libai_wb.config.call import instantiate
run, home = Run(sys.argv[1]), sys.argv[2]
model, x = run.model(), torch.linspace(0, 1, 128).view(2, 1, 8, 8)
again = train(run.config, out=f"{home}/again", progress=False)
quick = ["train.train_iter=1", "train.evaluation.enabled=false"]
by_path = train(run.path/"config.yaml", "dp2", out=f"{home}/by_path", overrides=quick, progress=False, timeout=100)
codes = [main(["eval", str(run.path), "--json", f"{home}/eval.json"]), main(["info", str(run.path/"config.yaml")])]
print("ANSWER", json.dumps(dict(
    logits=model(x).tolist(), metrics=evaluate(run, progress=False).metrics, codes=codes, name=type(model).__name__,
    losses=[again.metrics.loss.dropna().tolist(), by_path.metrics.loss.dropna().tolist()],
    sample=instantiate(run.config.dataloader.test.dataset)[0]["images"].sum().item(), best=run.predict(x).classes.tolist(),
    main=[name for name in vars(sys.modules["__main__"]) if name in ("Net", "Base", "squash")])))
"""
BESIDE = """
import json
from libai_wb import Run
from libai_wb.config.call import instantiate
sample = instantiate(Run("odd").config.dataloader.test.dataset)[0]["images"].sum().item()
print(json.dumps([list(Run("good").model().extra().shape), sample]))
"""


def ok(kernel, code):
    "Run a cell that must pass; training on a busy machine takes its time."
    answer = kernel.run(code, timeout=150)
    assert not answer.error, answer.error
    return answer


def fresh(code, *args, cwd, ok=True):
    "What a new process prints; it knows nothing of the notebook."
    done = subprocess.run([sys.executable, "-c", dedent(code), *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=200)
    assert (done.returncode == 0) is ok, done.stderr
    return done.stdout if ok else done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    "A kernel that has run `CELLS`; its folder is `kernel.folder`."
    folder = tmp_path_factory.mktemp("notebook")
    with new_kernel(folder) as kernel:
        kernel.folder = folder
        ok(kernel, "import fastcore.basics")
        for cell in CELLS: ok(kernel, cell)
        ok(kernel, "%dist stop")
        yield kernel


@pytest.fixture(scope="module")
def runs(kernel):
    "Runs of the notebook's model by layout, the second with 2 loader workers."
    for layout, workers in (("1", 0), ("dp2", 2), ("tp2pp2", 0)):
        ok(kernel, f"cfg.dataloader.train.num_workers = {workers}\ntrain(cfg, {layout!r}, progress=False, timeout=140)")
    ok(kernel, "cfg.dataloader.train.num_workers = 0")
    return {layout: kernel.folder/"out"/f"Net-{layout}" for layout in ("1", "dp2", "tp2pp2")}


def value(kernel, code):
    "The value of an expression in the notebook."
    return json.loads(ok(kernel, f"import json\nprint(json.dumps({code}))").text.splitlines()[-1])


def test_every_layout_trains_what_cells_define(kernel, runs):
    one, *others = [value(kernel, f"losses(Run({str(path)!r}))") for path in runs.values()]
    assert len(one) == 4 and all(other == pytest.approx(one, rel=1e-4) for other in others)


def test_the_source_stays_with_the_run(runs):
    texts = {(path/"code"/"cells.py").read_text() for path in runs.values()}
    assert len(texts) == 1
    text = texts.pop()
    defined = re.findall(r"^(?:class|def) (\w+)", text, re.M)
    assert sorted(defined) == ["Base", "Block", "Digits", "Net", "augment", "loss", "plain", "squash"]
    assert defined.index("Base") < defined.index("Net") < defined.index("loss")
    assert "SCALE = 2.0\n" in text and "SHIFT = torch.tensor(0.5)" in text and "import sklearn.datasets\n" in text
    assert not [f for path in runs.values() for f in path.glob("*.pkl")]


def test_a_fresh_process_opens_the_run(kernel, runs, tmp_path):
    answer = json.loads(fresh(FRESH, runs["1"], tmp_path, cwd=tmp_path).rpartition("ANSWER ")[2])
    path = str(runs["1"])
    here = value(kernel, f"[Run({path!r}).model()(torch.linspace(0, 1, 128).view(2, 1, 8, 8)).tolist(), losses(Run({path!r})), "
                         f"evaluate({path!r}, progress=False).metrics, Digits(plain)[0]['images'].sum().item()]")
    logits, losses, metrics, sample = here
    assert answer["logits"] == [pytest.approx(row, rel=1e-5) for row in logits] and answer["name"] == "Net"
    assert answer["losses"] == [pytest.approx(losses, rel=1e-4), pytest.approx(losses[:1], rel=1e-4)]
    assert answer["metrics"] == metrics == json.loads((tmp_path/"eval.json").read_text())["metrics"]
    assert answer["sample"] == sample and answer["codes"] == [0, 0] and answer["main"] == []
    assert answer["best"] == [max(range(10), key=row.__getitem__) for row in logits]
    first = (runs["1"]/"code"/"cells.py").read_text()
    assert {(tmp_path/run/"code"/"cells.py").read_text() for run in ("again", "by_path")} == {first}


def test_the_notebook_keeps_its_class_until_it_changes(kernel, runs):
    path = f"Run({str(runs['1'])!r})"
    ok(kernel, f"OldNet = Net\nassert type({path}.model()) is Net and {path}.config.model._target_ is Net")
    ok(kernel, "class Net(Base): pass")
    ok(kernel, f"assert type({path}.model()) not in (Net, OldNet) and {path}.model().head.out_features == 10\nNet = OldNet")


MISTAKES = {
    "a name that is nowhere": ("    def extra(self): return wdiths", "'wdiths' (not defined) cannot be found; move what needs"),
    "a value without a line": ("    def extra(self): return START", "'START' (a Tensor that no line of a cell gives again)"),
    "an open file": ("    def extra(self): return FILE", "'FILE' (a TextIOWrapper that no line of a cell gives again)"),
}


@pytest.mark.parametrize("line, sentence", MISTAKES.values(), ids=MISTAKES)
def test_what_cannot_be_found_is_named(kernel, line, sentence):
    ok(kernel, "START, FILE = torch.randn(3), open('notes.txt', 'w')")
    ok(kernel, f"class Bad(Net):\n{line}")
    name, text, _ = kernel.run("bad = cfg.copy()\nbad.model = LazyCall(Bad)()\ntrain(bad, 'dp2', out='bad', progress=False)").error
    assert name == "ValueError" and text.startswith("The source of Bad, Digits, augment, plain cannot be kept") and sentence in text
    assert text.endswith("into a file beside the notebook and import it from there.") and not (kernel.folder/"bad").exists()
    assert not kernel.run("FILE.write('still open'); FILE.close()").error


def test_a_file_beside_the_notebook_and_objects_without_a_name(kernel):
    (kernel.folder/"beside.py").write_text("import torch\nSTART = torch.randn(3)\n")
    ok(kernel, "import beside\nclass Good(Net):\n    def extra(self): return beside.START")
    ok(kernel, "good = cfg.copy()\ngood.model = LazyCall(Good)()\ntrain(good, out='good', progress=False)")
    ok(kernel, "odd = cfg.copy()\nodd.dataloader.test.dataset.transform = lambda x: plain(x) * 3\n"
               "train(odd, out='odd', progress=False)")
    shape, sample = json.loads(fresh(BESIDE, cwd=kernel.folder))
    assert shape == [3] and sample == pytest.approx(3 * value(kernel, "Digits(plain)[0]['images'].sum().item()"))


# Not only notebooks

SCRIPT = """
import torch
from torch import nn
from libai_wb import load_recipe, train
from libai_wb.config import LazyCall
WIDTH = 64
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 10)
    def forward(self, images): return self.linear(images.flatten(1))
if __name__ == "__main__":
    cfg = load_recipe("vit_nano_digits", ["train.train_iter=2"])
    cfg.model, cfg.optim.params.overrides = LazyCall(Net)(), {}
    train(cfg, "dp2", out="run", progress=False, timeout=100)
"""
RECIPE = """
from torch import nn
from libai_wb.config import LazyCall
from .base import model, dataloader, optim, train
WIDTH = 64
def net(): return nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 10))
model = LazyCall(net)()
optim.params.overrides = {}
train.train_iter = 2
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["script", "recipe"])
def test_a_script_or_a_recipe_with_code_of_its_own(tmp_path, kind):
    if kind == "script":
        (tmp_path/"script.py").write_text(SCRIPT)
        cmd = [sys.executable, "script.py"]
    else:
        (tmp_path/"base.py").write_text("from libai_wb.config import get_config\ncfg = get_config('vit_nano_digits.py')\n"
                                        "model, dataloader, optim, train = cfg.model, cfg.dataloader, cfg.optim, cfg.train\n")
        (tmp_path/"recipe.py").write_text(RECIPE)
        cmd = [sys.executable, "-m", "libai_wb.cli", "train", "recipe.py", "--layout", "dp2", "--out", "run"]
    done = subprocess.run(cmd, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "WIDTH = 64" in (tmp_path/"run"/"code"/"cells.py").read_text()
    ask = "import sys, torch; from libai_wb import Run; print(Run(sys.argv[1]).model()(torch.ones(1, 1, 8, 8)).shape)"
    assert fresh(ask, tmp_path/"run", cwd="/") == "torch.Size([1, 10])\n"


@pytest.mark.full
def test_a_notebooks_model_is_verified(kernel):
    assert value(kernel, "verify(cfg, ['dp2', 'tp2', 'pp2', 'dp2tp2'], steps=3, progress=False).ok") is True


@pytest.mark.full
def test_the_console_script_opens_a_run(runs, tmp_path):
    from PIL import Image
    Image.new("L", (8, 8), 100).save(tmp_path/"a.png")
    script = [str(sys.executable).rpartition("/")[0] + "/libai-wb"]
    again = ["train.train_iter=1", "dataloader.train.num_workers=2", "--layout", "dp2", "--out", "again"]
    for words in (["train", runs["1"]/"config.yaml", *again], ["eval", runs["1"], "--layout", "dp2"], ["predict", runs["1"], "a.png", "--topk", "1"],
                  ["verify", runs["tp2pp2"]/"config.yaml", "--layouts", "pp2", "--steps", "2"]):
        done = subprocess.run([*script, *map(str, words)], cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
