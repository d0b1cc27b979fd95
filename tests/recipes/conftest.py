"""The fixture that starts a recipe, in less time."""

from functools import partial

import launching
import pytest
from quick_start import quick_start  # noqa: F401


@pytest.fixture
def start(tmp_path):
    """``launching.start``, which records in a folder of the test."""
    return partial(launching.start, output_dir=tmp_path / "run")
