import pytest
import torch

from hvkit import main_rank
from hvkit.frameworks.pytorch.torch_distributed import stop


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch):
    """The same random numbers in each test, and nothing logged yet."""
    torch.manual_seed(0)
    monkeypatch.setattr(main_rank, "_logged", set())


@pytest.fixture(scope="module")
def torch_distributed():
    """For a module whose tests start ``torch.distributed``: other tests run without it."""
    yield
    stop()
