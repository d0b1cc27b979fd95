import contextlib
from pathlib import Path

import keras
import pytest
from cases import cases
from on_ranks import leave_out_of_meshes
from ranks import keras_in_float64

import hvkit


def pytest_collection_modifyitems(config, items):
    leave_out_of_meshes(config, items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def _cleared():
    keras.backend.clear_session()


@pytest.fixture(params=cases(["float64", "float32"] if hvkit.size() == 2 else ["float64"]))
def precision(request):
    """The largest relative difference from one process."""
    with keras_in_float64() if request.param == "float64" else contextlib.nullcontext():
        yield 1e-6 if request.param == "float32" else 1e-12


@pytest.fixture
def float64():
    with keras_in_float64():
        yield
