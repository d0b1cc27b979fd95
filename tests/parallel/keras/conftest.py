import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest


@pytest.fixture(autouse=True)
def _seeded():
    keras.backend.clear_session()
    # TensorFlow never frees a graph. Without this, each collection would look at all of them.
    gc.freeze()
    keras.utils.set_random_seed(0)
