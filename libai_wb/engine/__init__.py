"Training: one step, one loop with hooks, one run in one folder. Each name is imported when it is first used."
import importlib

_WHERE = {
    "TrainStep": "step", "build_training": "build", "load_recipe": "build", "read_metrics": "events",
    "CallbackHook": "hooks", "CheckpointHook": "hooks", "EvalHook": "hooks", "HookBase": "hooks", "MetricsHook": "hooks",
    "ProgressHook": "hooks", "latest": "checkpoint", "load_weights": "checkpoint", "save_weights": "checkpoint",
    "load_pretrained": "checkpoint", "save_pretrained": "checkpoint", "Evaluation": "inference", "evaluate": "inference",
    "predict": "inference", "PictureReader": "prediction", "Predictions": "prediction", "classify": "prediction",
    "Trainer": "trainer", "TrainerBase": "trainer", "Run": "runs", "DefaultTrainer": "default", "train": "default",
}
__all__ = sorted(_WHERE)


def __getattr__(name):
    if name not in _WHERE: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
