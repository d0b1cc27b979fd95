"""One pytest run on several ranks: every rank runs the same tests in the same order.

A rank that fails a test would leave the others waiting for it, so its report is printed and the
whole run ends at once. One that hangs is shown and ended after pytest's faulthandler_timeout.
"""

import gc
import os
import threading

import lighter_keras  # noqa: F401
import pytest

import hvkit


def show_rank_0_alone(config):
    """Have only rank 0 report; call in ``pytest_configure``."""
    if hvkit.rank() != 0:
        config.pluginmanager.unregister(name="terminalreporter")


def pytest_collection_finish():
    """Leave the frameworks out of later garbage collections: Keras tests collect often."""
    gc.freeze()


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
