"""What every test file shares: tests marked `gpu` are skipped without one, those marked `full` say so in the report."""
import importlib.util
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    "Skip the `gpu` tests where there is no GPU and mark the `full` ones for scripts/check.py."
    for item in items:
        if item.get_closest_marker("full"): item.user_properties.append(("full", "true"))
        if item.get_closest_marker("gpu"):
            import torch
            if not torch.cuda.is_available(): item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def load_script():
    "Import a script by its path in the repository."
    def load(path):
        file = Path(__file__).resolve().parents[1]/path
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return load
