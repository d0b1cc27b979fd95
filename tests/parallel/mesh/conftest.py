import pytest
import torch

from hvkit.frameworks.pytorch.divided_state import process_group


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def torch_distributed():
    """For a module whose tests start ``torch.distributed``: other tests run without it."""
    process_group.start()
    yield
    process_group.stop()
