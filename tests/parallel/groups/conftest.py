import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
from group_frameworks import Keras, PyTorch
from ranks import keras_in_float64

import hvkit
from hvkit.mesh import divide


def pytest_collection_modifyitems(config, items):
    """These tests divide four ranks, whose Horovod was started for that, into two groups."""
    if hvkit.size() != 4 or os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") != "1":
        here = os.path.dirname(__file__)
        left = [item for item in items if not str(item.path).startswith(here)]
        config.hook.pytest_deselected(items=[each for each in items if each not in left])
        items[:] = left


@pytest.fixture(params=[PyTorch, Keras], ids=lambda each: each.__name__)
def framework(request):
    """Where models train in float64."""
    keras.backend.clear_session()
    with keras_in_float64():
        yield request.param


@pytest.fixture
def group(request, framework):
    """This rank's group, of two ranks; its framework's Horovod carries what both send."""
    return divide(getattr(request, "param", [(0, 2), (1, 3)]), framework.name)
