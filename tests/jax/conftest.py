import os

os.environ["KERAS_BACKEND"] = "jax"

import pytest

import hvkit

hvkit.init("jax")  # before anything makes an array

from on_ranks import (  # noqa: F401
    pytest_collection_finish,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    show_rank_0_alone,
)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if hvkit.size() == 1 and not config.option.collectonly:
        pytest.exit(
            "tests/jax needs several ranks: mpirun -np 2 python -m pytest tests/jax", returncode=2
        )
    show_rank_0_alone(config)
