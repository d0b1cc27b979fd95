import contextlib
import os

import keras
import pytest
from cases import cases
from ranks import keras_in_float64

import hvkit


def pytest_collection_modifyitems(config, items):
    """Two ranks are a pipeline; four, whose Horovod knows groups, are two pipelines."""
    groups = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"
    if hvkit.size() == 2 or (hvkit.size() == 4 and groups):
        return
    here = os.path.dirname(__file__)
    left = [item for item in items if not str(item.path).startswith(here)]
    config.hook.pytest_deselected(items=[each for each in items if each not in left])
    items[:] = left


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
