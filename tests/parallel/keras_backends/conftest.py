"""Tests of Keras on TensorFlow, and on PyTorch where ``KERAS_BACKEND`` says so."""

import gc

import keras
import pytest
from keras_models import seeded
from ranks import keras_in_float64


@pytest.fixture(autouse=True)
def _seeded():
    keras.backend.clear_session()
    # TensorFlow never frees a graph. Without this, each collection would look at all of them.
    gc.freeze()
    seeded(0)


@pytest.fixture
def double_precision():
    with keras_in_float64():
        yield
