"""How the workers of a sharded DataLoader start: not by a fork where MPI runs over InfiniBand.

An InfiniBand adapter writes into memory that MPI has registered with it. After a fork, pages of
that memory may be the child's, and the parent waits for data that arrives elsewhere, or crashes;
see ibv_fork_init(3) and Open MPI's FAQ on fork and OpenFabrics. A server of multiprocessing's, a
process of its own that knows nothing of MPI, can fork without harm.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvkit import runtime
from hvkit.errors import LaunchError
from hvkit.main_rank import warn_once

ADAPTERS = Path("/sys/class/infiniband")

_NONE = object()


def active_adapter(adapters: Path) -> str | None:
    """An InfiniBand (or RoCE) adapter with a port that is in use; None if there is none.

    Args:
        adapters: the kernel's folder with one for each adapter.
    """
    for port in sorted(adapters.glob("*/ports/*/state")):
        try:
            state = port.read_text()  # "4: ACTIVE"
        except OSError:  # an adapter that is being taken out
            continue
        if state.split()[-1:] == ["ACTIVE"]:
            return port.parents[2].name
    return None


def adapter_that_forbids_forks(loader: Any) -> str | None:
    """The adapter because of which this loader's workers must not be forked.

    None where they are not forked anyway, where MPI does not run or not over InfiniBand, and where
    the user has chosen how they start.
    """
    default = multiprocessing.get_all_start_methods()[0]
    method = multiprocessing.get_start_method(allow_none=True) or default
    if loader.num_workers == 0 or loader.multiprocessing_context or method != "fork":
        return None
    adapter = active_adapter(ADAPTERS) if runtime.uses_mpi() else None
    if adapter is not None:
        _say(adapter)
    return adapter


def _say(adapter: str) -> None:
    warn_once(
        "forkserver",
        f"MPI may use the InfiniBand adapter {adapter}, beside which forks are not safe: workers "
        'of DataLoaders start by multiprocessing\'s forkserver; multiprocessing_context="fork" in '
        "the DataLoader forks them",
    )


def started(begin: Callable[[], Iterator[Any]], adapter: str | None) -> Iterator[Any]:
    """What ``begin`` gives, whose workers start afresh because of this adapter, if there is one.

    Raises:
        LaunchError: they cannot start so; it names the way out.
    """
    if adapter is None:
        return begin()
    try:
        batches = begin()
    except Exception as error:  # of pickling, or of a pipe that the worker's end closed
        raise _cannot_start(error, adapter) from error
    return _with_first(batches, adapter)


def _with_first(batches: Iterator[Any], adapter: str) -> Iterator[Any]:
    try:
        first = next(batches, _NONE)
    except RuntimeError as error:
        # PyTorch's words for a worker that has ended. What a dataset raises there comes as it is.
        if "exited unexpectedly" not in str(error):
            raise
        raise _cannot_start(error, adapter) from error
    if first is not _NONE:
        yield first
        yield from batches


def _cannot_start(error: Exception, adapter: str) -> LaunchError:
    return LaunchError(
        f"the DataLoader's workers could not start: {type(error).__name__}: {error}. They are not "
        f"forked here, since MPI may use the InfiniBand adapter {adapter}, but start afresh "
        "(multiprocessing's forkserver): put what the script runs under "
        'if __name__ == "__main__", and let dataset, collate_fn and worker_init_fn be what '
        "pickles: classes and functions of a module, no lambdas and nothing that is defined in a "
        'function. Where the network is known to bear forks, pass multiprocessing_context="fork" '
        "to the DataLoader"
    )
