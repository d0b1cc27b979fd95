"""One pytest run on several ranks: every rank runs the same tests in the same order.

A rank that fails a test would leave the others waiting for it, so its report is printed and the
whole run ends at once. One that hangs is shown and ended after pytest's faulthandler_timeout.
"""

import gc
import os
import threading

import pytest

import hvkit


def pytest_addoption(parser):
    parser.addoption(
        "--without-averaging",
        action="store_true",
        help="take the averaging out of hvkit and expect every test to fail",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if hvkit.size() == 1 and not config.option.collectonly:
        pytest.exit(
            "tests/parallel needs several ranks: mpirun -np 2 python -m pytest tests/parallel",
            returncode=2,
        )
    if hvkit.rank() != 0:
        config.pluginmanager.unregister(name="terminalreporter")


def pytest_collection_modifyitems(config, items):
    if hvkit.size() > 2:
        covered = [item for item in items if item.get_closest_marker("two_ranks")]
        config.hook.pytest_deselected(items=covered)
        items[:] = [item for item in items if item not in covered]
    if config.option.without_averaging:
        for item in items:
            item.add_marker(pytest.mark.xfail(strict=True, raises=AssertionError))


def pytest_collection_finish():
    """Leave the frameworks out of later garbage collections: Keras tests collect often."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _averaging_taken_out(request, monkeypatch):
    if not request.config.option.without_averaging:
        return
    from hvkit.adapters import fingerprints
    from hvkit.adapters.keras.gradients.averager import GradientAverager
    from hvkit.adapters.keras.weights.agreements import Network
    from hvkit.adapters.pytorch.gradients.buckets import Bucket

    monkeypatch.setattr(GradientAverager, "__call__", lambda self, gradients, *_: gradients)
    monkeypatch.setattr(Network, "_mean", lambda self, vector, *_: vector)
    monkeypatch.setattr(Bucket, "launch", lambda self, wire: setattr(self, "handle", 0))
    monkeypatch.setattr(Bucket, "wait", lambda self, wire: setattr(self, "handle", None))
    # What ranks compare would notice before the tests do.
    monkeypatch.setattr(fingerprints, "judge", lambda *_, **__: "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End a run that hangs, after every rank has shown where: pytest's faulthandler_timeout."""
    limit = float(item.config.getini("faulthandler_timeout"))
    end = threading.Timer(limit + 5, os._exit, [1])
    if limit:
        end.start()
    try:
        return (yield)
    finally:
        end.cancel()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        where = f"rank {hvkit.rank()} of {hvkit.size()}: {item.nodeid} failed in {report.when}"
        text = f"\n{where}\n{report.longreprtext}\n" + "".join(
            f"\n{title}\n{content}" for title, content in report.sections
        )
        os.write(2, text.encode())
        os._exit(1)
    return report
