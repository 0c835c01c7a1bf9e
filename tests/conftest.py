"""What every test file shares: tests marked `gpu` are skipped without one, those marked `full` say so in the report."""
import pytest


def pytest_collection_modifyitems(items):
    "Skip the `gpu` tests where there is no GPU and mark the `full` ones for scripts/check.py."
    for item in items:
        if item.get_closest_marker("full"): item.user_properties.append(("full", "true"))
        if item.get_closest_marker("gpu"):
            import torch
            if not torch.cuda.is_available(): item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
