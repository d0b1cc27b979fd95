import pytest
import torch

from hvkit.frameworks.pytorch.torch_distributed import stop


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def torch_distributed():
    """For a module whose tests start ``torch.distributed``: other tests run without it."""
    yield
    stop()
