import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest

import hvkit


@pytest.fixture
def folder(tmp_path_factory):
    """One folder for all ranks."""
    mine = tmp_path_factory.mktemp("run") if hvkit.rank() == 0 else None
    return hvkit.broadcast(mine)
