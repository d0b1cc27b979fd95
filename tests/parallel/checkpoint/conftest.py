import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
from ranks import shared_folder


@pytest.fixture
def folder(tmp_path_factory):
    """One folder for all ranks."""
    return shared_folder(tmp_path_factory)
