"""One seed and one global batch give one training run, in every parallel layout."""
__version__ = "0.1.0"

import importlib

# Imported when first used, so that `import libai_wb` costs no torch.
_PUBLIC = {
    "train": "engine.default", "Run": "engine.runs", "load_recipe": "engine.build", "TrainStep": "engine.step",
    "verify": "align.verification", "create_model": "models.registry", "list_models": "models.registry",
    "parallelize": "mesh.parallelize", "ParallelLayout": "mesh.topology", "make_mesh": "mesh.launch",
    "run_ranks": "mesh.launch", "make_invariant": "layers.foreign", "evaluate": "engine.inference",
    "predict": "engine.inference", "load_pretrained": "engine.checkpoint", "save_pretrained": "engine.checkpoint",
    "list_runs": "engine.table", "advise": "engine.advice", "estimate_memory": "engine.memory",
    "watch": "notebook.watching",
}


def __getattr__(name):
    if name not in _PUBLIC: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__(): return sorted([*globals(), *_PUBLIC])


def load_ipython_extension(ip):
    "`%load_ext libai_wb`"
    from libai_wb.notebook.commands import load
    load(ip)


def unload_ipython_extension(ip):
    "`%unload_ext libai_wb`"
    from libai_wb.notebook.commands import unload
    unload(ip)
