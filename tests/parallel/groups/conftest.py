import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest

import hvkit
from hvkit.communication.division import divide


def pytest_collection_modifyitems(config, items):
    """These tests divide four ranks, whose Horovod was started for that, into two groups."""
    if hvkit.size() != 4 or os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") != "1":
        here = os.path.dirname(__file__)
        left = [item for item in items if not str(item.path).startswith(here)]
        config.hook.pytest_deselected(items=[each for each in items if each not in left])
        items[:] = left


@pytest.fixture
def group(request):
    """This rank's group, of two ranks; its framework's Horovod carries what both send."""
    return divide(getattr(request, "param", [(0, 2), (1, 3)]), request.module.FRAMEWORK)
