"""Messages from one rank to another: the one place that imports mpi4py.

Horovod has collectives only. Where it runs on MPI, these messages use the same MPI, with a
communicator of their own to keep them apart from Horovod's. Horovod starts and finalises MPI;
hvkit does neither. Under ``horovodrun --gloo`` there is no MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvkit.log import logger
from hvkit.transport.engines import Engine
from hvkit.transport.traffic import count
from hvkit.watch.calls import waiting_for_all_ranks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_communicator: Any = None
_warned = False


def can_send(engine: Engine) -> bool:
    """Whether this rank can send messages: mpi4py loads, and MPI runs with support for threads.

    Args:
        engine: the started Horovod; mpi4py shares its MPI, which is loaded already.
    """
    return not obstacle(engine)


def obstacle(engine: Engine) -> str:
    """Why this rank cannot send messages, and the fix; empty if it can."""
    if not engine.hvd.mpi_enabled():
        return (
            "Horovod runs on Gloo here: start the ranks with `hvkit run` or mpirun, without --gloo"
        )
    if (mpi := load_mpi()) is None:
        return "mpi4py cannot be loaded: pip install --force-reinstall mpi4py"
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return (
            f"mpi4py uses another MPI than Horovod, {_first_line(mpi.Get_library_version())}: "
            "pip install --force-reinstall mpi4py"
        )
    # Horovod's own thread calls MPI all the time, so this one needs THREAD_MULTIPLE.
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        return (
            "MPI runs without support for threads: remove HOROVOD_MPI_THREADS_DISABLE from the "
            "environment, and let hvkit start MPI before anything else does"
        )
    return ""


def _first_line(text: str) -> str:
    return text.split("\n")[0].strip("\0 ")


def open_communicator() -> None:
    """Create the communicator, once; a collective. ``can_send`` must be true on all ranks."""
    global _communicator
    if _communicator is None:
        with waiting_for_all_ranks():
            _communicator = load_mpi().COMM_WORLD.Dup()


def send(data: NDArray[np.uint8], to: int) -> None:
    """Send bytes to a rank that calls ``receive``.

    Args:
        data: of shape (n,), at most 2 GiB.
        to: the receiving rank.
    """
    count("objects", data.nbytes)
    with waiting_for_all_ranks():
        _communicator.Send(data, dest=to)


def receive(into: NDArray[np.uint8], source: int) -> None:
    """Wait for bytes from a rank.

    Args:
        into: of shape (n,), n being the number of bytes that ``source`` sends.
        source: the sending rank.
    """
    with waiting_for_all_ranks():
        _communicator.Recv(into, source=source)


def load_mpi() -> Any:
    """mpi4py's MPI; None, with a warning, if it cannot be loaded."""
    global _warned
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if not _warned:
            logger.warning(
                f"mpi4py cannot be loaded ({error}): ranks send through Horovod instead; to fix "
                "it: pip install --force-reinstall mpi4py"
            )
        _warned = True
        return None
    return MPI
