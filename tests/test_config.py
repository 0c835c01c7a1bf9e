"""Configurations on disk: several files, other working directories, other processes."""
import builtins
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from textwrap import dedent

import pytest

from libai_wb.config import FrozenError, LazyCall, LazyConfig, diff, freeze, instantiate, portable, register
from libai_wb.config.call import NAMES


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return path


@pytest.fixture
def recipe(tmp_path):
    "A recipe of three files in folders that are no packages"
    write(tmp_path / "configs/common/train.py", """
        train = dict(seed=1, lr=1e-3, out="run")
        """)
    write(tmp_path / "configs/common/parts/model.py", """
        from libai_wb.config import LazyCall
        from fractions import Fraction
        from ..train import train
        model = LazyCall(Fraction)(numerator=3, denominator="${train.seed}")
        """)
    return write(tmp_path / "configs/recipe.py", """
        from .common.train import train
        from .common.parts.model import model
        train.seed = 4
        sampler = dict(betas=(0.9, 0.95), shape=[{"a": 1}, 2])
        """)


def python(code, cwd, *options, ok=True):
    "Run `code` in another process whose working directory is `cwd`; what it printed"
    done = subprocess.run([sys.executable, *options, "-c", dedent(code)], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) is ok, done.stderr
    return done.stdout if ok else done.stderr


def test_import_is_light():
    heavy = ["torch", "numpy", "cloudpickle", "pandas", "IPython"]
    out = python(f"import sys, libai_wb.config; print([m for m in {heavy} if m in sys.modules])", "/")
    assert out.strip() == "[]"


def test_recipe_loads_from_any_directory_and_its_yaml_reloads(recipe, tmp_path):
    cfg = LazyConfig.load(recipe)
    assert sorted(cfg) == ["model", "sampler", "train"]
    assert instantiate(cfg.model) == Fraction(3, 4)
    LazyConfig.save(cfg, tmp_path / "run/config.yaml")
    other = tmp_path / "elsewhere"
    other.mkdir()
    out = python(f"""
        from libai_wb.config import LazyConfig, diff, instantiate
        cfg = LazyConfig.load({str(tmp_path / "run/config.yaml")!r})
        print(instantiate(cfg.model), repr(diff(cfg, LazyConfig.load("../configs/recipe.py"))))
        """, other)
    assert out.strip() == "3/4 no difference"


def test_edits_do_not_leak_into_another_load(recipe):
    first = LazyConfig.load(recipe)
    first.train.seed = 99
    assert LazyConfig.load(recipe).train.seed == 4
    assert LazyConfig.load(recipe.parent / "common/train.py").train.seed == 1
    assert [(c.key, c.old, c.new) for c in diff(LazyConfig.load(recipe), first)] == [("train.seed", 4, 99)]


def test_a_changed_file_is_read_again(recipe):
    LazyConfig.load(recipe)
    write(recipe.parent / "common/train.py", "train = dict(seed=7, lr=2)\n")
    assert LazyConfig.load(recipe).train.lr == 2


def test_failures_leave_import_alone_and_threads_do_not_mix(tmp_path):
    before = builtins.__import__
    for k in range(6):
        write(tmp_path / f"d{k}/leaf.py", f"x = dict(k={k})\n")
        write(tmp_path / f"d{k}/main.py", "import time\nfrom .leaf import x\ntime.sleep(.01)\nfrom .leaf import x as y\n" + "1 / 0\n" * (k == 5))
    def one(k):
        try: return LazyConfig.load(tmp_path / f"d{k % 6}/main.py").y.k
        except ZeroDivisionError: return 5
    with ThreadPoolExecutor(6) as pool: found = list(pool.map(one, range(24), timeout=60))
    assert found == [k % 6 for k in range(24)] and builtins.__import__ is before


def test_reading_yaml_runs_nothing(tmp_path):
    marker = tmp_path / "ran"
    for tag in ("!!python/object/apply:pathlib.Path.touch", "!!python/object/new:os.system", "!!python/name:os.system"):
        with pytest.raises(ValueError, match="cannot be loaded"):
            LazyConfig.load(write(tmp_path / "evil.yaml", f"a: {tag} ['touch {marker}']\n"))
    cfg = LazyConfig.load(write(tmp_path / "sly.yaml", f"a: {{_target_: os.system, command: 'touch {marker}'}}\n"))
    with pytest.raises(ValueError, match="'os.system' at config path 'a' is outside the allowed modules"):
        instantiate(cfg.a, allow=("libai_wb", "torch"))
    assert not marker.exists()
    assert instantiate(cfg.a) == 0 and marker.exists()           # without the list it does run: the control


def test_class_in_main_falls_back_to_a_pickle(tmp_path):
    script = write(tmp_path / "script.py", """
        from libai_wb.config import LazyCall, LazyConfig
        class Net:
            def __init__(self, width): self.width = width
        if __name__ == "__main__": LazyConfig.save({"model": LazyCall(Net)(width=3), "seed": 1}, "run/config.yaml")
        """)
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "cannot hold model._target_ (type): config.yaml.pkl holds them" in done.stderr
    cfg = LazyConfig.load(tmp_path / "run/config.yaml")
    assert cfg.seed == 1 and cfg.model.width == 3 and cfg.model._target_ == "__main__.Net"
    with pytest.raises(ValueError, match="written in a notebook cell or a script of another process"): instantiate(cfg.model)
    assert pickle.loads((tmp_path / "run/config.yaml.pkl").read_bytes())["model"]["width"] == 3
    out = python("""
        import pickle
        from libai_wb.config import instantiate
        print(instantiate(pickle.load(open("run/config.yaml.pkl", "rb"))["model"]).width)
        """, tmp_path)
    assert out.strip() == "3"


def test_function_of_a_config_file_falls_back_to_a_pickle(tmp_path):
    path = write(tmp_path / "c.py", """
        from libai_wb.config import LazyCall
        def double(x): return len(str(x)) + x
        twice = LazyCall(double)(x=2)
        """)
    cfg = LazyConfig.load(path)
    assert instantiate(cfg.twice) == 3
    with pytest.warns(UserWarning, match="cannot hold twice._target_"): LazyConfig.save(cfg, tmp_path / "c.yaml")
    out = python("""
        import pickle
        from libai_wb.config import instantiate
        print(instantiate(pickle.load(open("c.yaml.pkl", "rb")).twice))
        """, tmp_path)
    assert out.strip() == "3"


def test_short_name_is_saved_as_its_path(tmp_path):
    register("ratio_for_test", Fraction)
    try: LazyConfig.save({"a": {"_target_": "ratio_for_test", "numerator": 1}}, tmp_path / "a.yaml")
    finally: del NAMES["ratio_for_test"]
    LazyConfig.save({"a": LazyCall(Fraction)(numerator=1)}, tmp_path / "b.yaml")
    assert (tmp_path / "a.yaml").read_text() == (tmp_path / "b.yaml").read_text()
    assert instantiate(LazyConfig.load(tmp_path / "a.yaml").a) == Fraction(1)


def test_a_full_disk_keeps_the_previous_file(tmp_path, monkeypatch):
    LazyConfig.save({"a": 1}, tmp_path / "c.yaml")
    def full(self, data):
        with open(self, "wb") as f: f.write(data[:2])
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"): LazyConfig.save({"a": 2}, tmp_path / "c.yaml")
    assert LazyConfig.load(tmp_path / "c.yaml").a == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c.yaml"]


def test_torch_objects_survive_the_file(tmp_path):
    torch = pytest.importorskip("torch")
    cfg = {"layer": LazyCall(torch.nn.TransformerEncoderLayer)(
        d_model=8, nhead=2, dtype=torch.float64, activation=torch.nn.functional.gelu, batch_first=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LazyConfig.save(cfg, tmp_path / "t.yaml")
    layer = instantiate(LazyConfig.load(tmp_path / "t.yaml").layer, allow=("torch",))
    assert layer.activation is torch.nn.functional.gelu and layer.linear1.weight.dtype is torch.float64


def test_frozen_config_travels_by_pickle():
    cfg = pickle.loads(pickle.dumps(freeze(LazyCall(Fraction)(numerator=1))))
    assert instantiate(cfg) == 1 and portable(cfg)[0] == {"_target_": "fractions.Fraction", "numerator": 1}
    with pytest.raises(FrozenError, match="is frozen, so 'numerator' cannot change"): cfg.numerator = 2
