import os
import random
import sys

import pytest
from ranks import keras_in_float64

# The backend is one of the process: `make parallel` runs this folder by itself.
if os.environ.get("KERAS_BACKEND") != "torch":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _seeded_and_without_tensorflow():
    import keras
    import torch

    keras.backend.clear_session()
    # Not keras.utils.set_random_seed, which imports TensorFlow where it finds it.
    random.seed(0)
    torch.manual_seed(0)
    yield
    assert "tensorflow" not in sys.modules


@pytest.fixture
def double_precision():
    with keras_in_float64():
        yield
