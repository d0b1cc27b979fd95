import os
import sys

import pytest
from ranks import keras_in_float64

# The backend is one of the process: `make parallel` runs this folder by itself.
if os.environ.get("KERAS_BACKEND") != "torch":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _seeded_and_without_tensorflow():
    import keras
    from keras_models import seeded

    keras.backend.clear_session()
    seeded(0)
    yield
    assert "tensorflow" not in sys.modules


@pytest.fixture
def double_precision():
    with keras_in_float64():
        yield
