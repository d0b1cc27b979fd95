from pathlib import Path

import pytest
import torch
from on_ranks import leave_out_of_meshes
from ranks import shared_folder

from hvkit.frameworks.pytorch.model_parallel.tensor import sequence_parallel
from hvkit.frameworks.pytorch.torch_distributed import start, stop

# The files in which two axes of two ranks each show what one axis does not.
ON_FOUR = [
    *("test_data_axis.py", "test_mesh_rounds.py", "test_shard_axis.py", "test_steps_in_mesh.py"),
    "test_tensor_in_mesh.py",
]


def pytest_collection_modifyitems(config, items):
    leave_out_of_meshes(config, items, Path(__file__).parent, ON_FOUR)


@pytest.fixture(autouse=True, scope="module")
def torch_distributed():
    """Other tests run without it."""
    start()
    yield
    stop()


@pytest.fixture
def folder(tmp_path_factory):
    """One folder for all ranks."""
    return shared_folder(tmp_path_factory)


@pytest.fixture(autouse=True)
def _in_float64():
    """Where rounding hides nothing."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _small_activations(monkeypatch):
    """Are divided along the sequence, too."""
    monkeypatch.setattr(sequence_parallel, "SMALLEST", 0)
