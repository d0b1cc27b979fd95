"""The fixture that makes hosts, and which tests `make test` leaves out."""

import contextlib
import os

import pytest
from rig import Rig, missing


@pytest.fixture(scope="session")
def _machine():
    """A machine that can hold a rig; with HVKIT_REQUIRE_CLUSTER=1 any other is a failure."""
    lacks = "; ".join(missing())
    if lacks and os.environ.get("HVKIT_REQUIRE_CLUSTER") == "1":
        pytest.fail(f"no hosts on this machine: {lacks}")
    if lacks:
        pytest.skip(f"no hosts on this machine: {lacks}")


@pytest.fixture(name="rig")
def _rig(_machine):
    """``rig(names, **options)`` makes a ``Rig`` that ends with the test."""
    with contextlib.ExitStack() as rigs:
        yield lambda names, **options: rigs.enter_context(Rig(names, **options))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave the tests of the hosts themselves to `make test-all`: all other tests here use them."""
    for item in items:
        if item.path.stem.startswith(("test_rig", "test_on_rig")):
            item.add_marker(pytest.mark.every_combination)
