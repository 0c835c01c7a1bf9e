"""What `%%distributed` says about GPUs, as far as a machine without one can show it: torch is made to count one."""
import pytest
from kernels import new_kernel, nothing_left, ranks_of  # noqa: F401

pytestmark = pytest.mark.timeout(120)
ONE_GPU = "import torch\ntorch.cuda.device_count = lambda: 1\n"  # imported by every Python process that starts


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    "A kernel whose ranks see one GPU."
    (tmp_path/"sitecustomize.py").write_text(ONE_GPU)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with new_kernel(tmp_path) as kernel: yield kernel


def test_more_ranks_than_gpus_are_refused_in_one_sentence(kernel):
    name, value, trace = kernel.run("%%distributed -n 2\n1", timeout=90).error
    assert name == "LaunchError" and trace == f"LaunchError: {value}" and "\n" not in value
    assert "2 ranks were asked for and 1 GPU is visible" in value and value.endswith("--share-gpu to debug over gloo.")
    assert ranks_of(kernel.pid) == []
