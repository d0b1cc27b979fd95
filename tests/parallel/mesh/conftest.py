import os

import pytest
import torch
from ranks import shared_folder

import hvkit
from hvkit.frameworks.pytorch.divided_state import process_group
from hvkit.frameworks.pytorch.model_parallel.tensor import streams


def pytest_collection_modifyitems(config, items):
    """Two ranks are a pipeline; four, whose Horovod knows groups, are two pipelines."""
    groups = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"
    if hvkit.size() == 2 or (hvkit.size() == 4 and groups):
        return
    here = os.path.dirname(__file__)
    left = [item for item in items if not str(item.path).startswith(here)]
    config.hook.pytest_deselected(items=[each for each in items if each not in left])
    items[:] = left


@pytest.fixture(autouse=True, scope="module")
def torch_distributed():
    """Other tests run without it."""
    process_group.start()
    yield
    process_group.stop()


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
    monkeypatch.setattr(streams, "SMALLEST", 0)
