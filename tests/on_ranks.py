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


def leave_out_of_meshes(config, items, folder, on_four=None):
    """Two ranks run a folder's tests; four, whose Horovod knows groups, all or those of files."""
    groups = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"
    if hvkit.size() == 2 or (hvkit.size() == 4 and groups and on_four is None):
        return
    names = on_four if on_four and hvkit.size() == 4 and groups else ()
    left = [item for item in items if item.path.parent == folder and item.path.name not in names]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


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
