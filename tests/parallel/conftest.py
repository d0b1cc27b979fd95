import os
from importlib.metadata import version

import pytest
from on_ranks import (  # noqa: F401
    pytest_collection_finish,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    show_rank_0_alone,
)

import hvkit


def pytest_ignore_collect(collection_path):
    """JAX joins the ranks before anything else: `make parallel` runs its folder by itself."""
    is_jax = os.environ.get("KERAS_BACKEND") == "jax"
    return True if collection_path.name == "jax" and not is_jax else None


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if hvkit.size() == 1 and not config.option.collectonly:
        pytest.exit(
            "tests/parallel needs several ranks: mpirun -np 2 python -m pytest tests/parallel",
            returncode=2,
        )
    show_rank_0_alone(config)


def pytest_collection_modifyitems(config, items):
    if hvkit.size() > 2:
        covered = [item for item in items if item.get_closest_marker("two_ranks")]
        config.hook.pytest_deselected(items=covered)
        items[:] = [item for item in items if item not in covered]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """Skip what PyTorch 2.8 lacks, for hvkit's own reason: no other PyTorch may give it."""
    try:
        return (yield)
    except hvkit.HvkitError as error:
        if "need PyTorch 2.9 or newer" in str(error) and version("torch").startswith("2.8."):
            pytest.skip(str(error))
        raise
