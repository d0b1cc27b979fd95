"""Messages from one rank to another: the one place where mpi4py is imported.

Horovod has collectives only. Where it runs on MPI, messages go through the same MPI, on a
communicator of their own, so that they are never taken for Horovod's. Horovod starts MPI, and ends
it when it is shut down; hvkit does neither. Under horovodrun with Gloo there is no MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvkit.engines import Engine, waiting_for_all_ranks
from hvkit.log import logger

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_communicator: Any = None
_said = False


def can_send(engine: Engine) -> bool:
    """Whether this rank can send messages now: MPI runs, for any number of threads, and mpi4py.

    Args:
        engine: the started Horovod, whose MPI mpi4py takes, since it is the one that is loaded.
    """
    mpi = _mpi() if engine.hvd.mpi_enabled() else None
    # Horovod's own thread is inside MPI all the time.
    return (
        mpi is not None
        and mpi.Is_initialized()
        and not mpi.Is_finalized()
        and mpi.Query_thread() == mpi.THREAD_MULTIPLE
    )


def open_communicator() -> None:
    """Make the communicator, once; a collective, where :func:`can_send` is true on all ranks."""
    global _communicator
    if _communicator is None:
        with waiting_for_all_ranks():
            _communicator = _mpi().COMM_WORLD.Dup()


def send(data: NDArray[np.uint8], to: int) -> None:
    """Send bytes to a rank; returns when it takes them.

    Args:
        data: of shape (n,), n below 2 GiB.
        to: the rank, which calls :func:`receive` for as many bytes.
    """
    with waiting_for_all_ranks():
        _communicator.Send(data, dest=to)


def receive(into: NDArray[np.uint8], source: int) -> None:
    """Wait for bytes from a rank, which has sent as many as the array is long."""
    with waiting_for_all_ranks():
        _communicator.Recv(into, source=source)


def _mpi() -> Any:
    """mpi4py's MPI; None where it cannot be loaded, which is said once."""
    global _said
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if not _said:
            logger.warning(
                f"mpi4py cannot be loaded ({error}): ranks send through Horovod instead; to mend "
                "it: pip install --force-reinstall mpi4py"
            )
        _said = True
        return None
    return MPI
