"`%%distributed`: notebook cells on several ranks; and figures of runs, layouts and samples."
import importlib

# Imported when first used: a rank needs none of it, and a figure needs no kernel.
_PUBLIC = {"Pool": "workers", "RankResult": "results", "DistributedError": "results", "plot_curves": "plots",
           "curves_table": "plots", "draw_mesh": "mesh_figure", "show_samples": "plots", "LossAlign": "loss_align",
           "sweep": "sweeping", "Sweep": "sweeping", "watch": "watching",
           "ParallelConfigWidget": "parallel_config"}


def __getattr__(name):
    if name not in _PUBLIC: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__(): return sorted([*globals(), *_PUBLIC])
