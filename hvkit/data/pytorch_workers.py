"""Starts the workers of PyTorch's ``DataLoader`` without a fork if MPI uses InfiniBand.

An InfiniBand adapter writes into memory that MPI registered with it. After a fork, pages of that
memory may belong to the child; the parent then waits for data that arrives elsewhere, or crashes.
See ibv_fork_init(3) and Open MPI's FAQ on fork and OpenFabrics. The forkserver of multiprocessing,
a process without MPI, can fork safely.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from hvkit import runtime
from hvkit.errors import LaunchError
from hvkit.main_rank import warn_once

ADAPTERS = Path("/sys/class/infiniband")

_NONE = object()


def adapter_that_forbids_forks(loader: DataLoader[Any]) -> str | None:
    """The InfiniBand adapter that makes it unsafe to fork this loader's workers; None if none.

    None also if the workers would not be forked anyway, or the user chose how they start.
    """
    default = multiprocessing.get_all_start_methods()[0]
    method = multiprocessing.get_start_method(allow_none=True) or default
    if loader.num_workers == 0 or loader.multiprocessing_context or method != "fork":
        return None
    adapter = _active_adapter(ADAPTERS) if runtime.uses_mpi() else None
    if adapter is not None:
        _prepare_forkserver(adapter)
    return adapter


def started(begin: Callable[[], Iterator[Any]], adapter: str | None) -> Iterator[Any]:
    """The iterator that ``begin`` returns, with a clear error if forkserver cannot start workers.

    Args:
        begin: starts the workers.
        adapter: the adapter that forbids forks; None if the workers start as the user chose.

    Raises:
        LaunchError: the workers cannot start; the message gives the fix.
    """
    if adapter is None:
        return begin()
    try:
        batches = begin()
    except Exception as error:  # from pickling, or from a pipe that the worker closed
        raise _cannot_start(error, adapter) from error
    return _with_first(batches, adapter)


def _active_adapter(adapters: Path) -> str | None:
    """An InfiniBand (or RoCE) adapter with a port that is in use; None if there is none.

    Args:
        adapters: the kernel's folder, which holds a folder for each adapter.
    """
    for port in sorted(adapters.glob("*/ports/*/state")):
        try:
            state = port.read_text()  # "4: ACTIVE"
        except OSError:  # someone is removing the adapter
            continue
        if state.split()[-1:] == ["ACTIVE"]:
            return port.parents[2].name
    return None


def _prepare_forkserver(adapter: str) -> None:
    # Otherwise each worker would import PyTorch in every epoch, which takes seconds. __main__ is
    # not preloaded, since a script without a guard would run there.
    multiprocessing.set_forkserver_preload(["torch"])
    warn_once(
        "forkserver",
        f"MPI may use the InfiniBand adapter {adapter}, so forks are not safe: multiprocessing's "
        "forkserver starts the workers of DataLoaders; to fork them, pass "
        'multiprocessing_context="fork" to the DataLoader',
    )


def _with_first(batches: Iterator[Any], adapter: str) -> Iterator[Any]:
    try:
        first = next(batches, _NONE)
    except RuntimeError as error:
        # PyTorch's message for a worker that ended. Errors of the dataset pass unchanged.
        if "exited unexpectedly" not in str(error):
            raise
        raise _cannot_start(error, adapter) from error
    if first is not _NONE:
        yield first
        yield from batches


def _cannot_start(error: Exception, adapter: str) -> LaunchError:
    return LaunchError(
        f"the DataLoader's workers could not start: {type(error).__name__}: {error}. They start by "
        "multiprocessing's forkserver instead of a fork, because MPI may use the InfiniBand "
        f'adapter {adapter}: put the script\'s main code under if __name__ == "__main__", and use '
        "a dataset, collate_fn and worker_init_fn that pickle: classes and functions of a module, "
        "not lambdas or anything defined inside a function. If forks are safe on this network, "
        'pass multiprocessing_context="fork" to the DataLoader'
    )
