"""The ranks of a JAX script: MPI for hvkit's own messages, and JAX's own processes for its arrays.

JAX trains on several processes by itself, once they know each other: arrays are divided or
replicated over the devices of all of them, and XLA puts collectives into compiled functions. So
here Horovod is neither started nor needed. mpi4py starts MPI, whose collectives carry hvkit's
objects and checks, and the address at which JAX's processes find each other. XLA then sends arrays
through NCCL on GPUs, and through gloo on CPUs.

Waits in MPI end when another rank ends: they look whether the watcher has a reason to end the run.
Waits inside XLA end with the process.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from hvkit.communication import point_to_point
from hvkit.communication.engines import Engine, cpu_threads, in_collective
from hvkit.errors import HorovodNotFoundError, LaunchError
from hvkit.host.gpus import gpu_of_rank, visible_gpus
from hvkit.host.network import addresses_for_others
from hvkit.watch import calls, rank_errors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hvkit.communication.group import ProcessSet

# Looks at a collective of MPI, and seconds between two: most end within the first looks. A rank
# that waits for long leaves the core to others.
_FIRST_LOOKS = 100
_QUICK_LOOKS = 1000
_LOOK_EVERY = 50e-6
_SELDOM = 1e-3

# Seconds after which JAX's service takes a silent process for dead. hvkit names such ranks itself,
# and a rank may be busy in C code for a while.
_HEARTBEAT = 300

# Seconds for which rank 0 keeps JAX's service after an error. Without the service, JAX aborts the
# other ranks, with a message that explains nothing; meanwhile they end for the reason they got.
_SERVICE_STAYS = 1.0

LATE = (
    'call hvkit.init("jax") right after the imports, before anything makes an array: JAX can only '
    "join other processes as long as it has not looked for its devices"
)


class JaxEngine(Engine):
    """MPI's collectives on arrays in host memory, beside JAX's own.

    Attributes:
        hvd: what other parts of hvkit use of Horovod's libraries.
    """

    library = "mpi4py"

    def __init__(self) -> None:
        self._mpi = _started_mpi()
        self._communicator = self._mpi.COMM_WORLD.Dup()
        # Apart, so that a rank at its end never meets another one's collective.
        self._of_the_end = self._communicator.Dup()
        size, rank = self._communicator.size, self._communicator.rank
        host = self._communicator.Split_type(self._mpi.COMM_TYPE_SHARED)
        self.hvd: Any = SimpleNamespace(
            rank=lambda: rank,
            size=lambda: size,
            local_rank=lambda: host.rank,
            local_size=lambda: host.size,
            mpi_enabled=lambda: True,
            global_process_set=SimpleNamespace(size=lambda: size),
            Sum=self._mpi.SUM,
            Min=self._mpi.MIN,
            Max=self._mpi.MAX,
        )
        self._one_host = host.size == size

    def shut_down(self) -> None:
        """Nothing to do: each wait sees by itself that the run ends."""

    def take_device(self, local_rank: int, local_size: int) -> None:
        """Join JAX's processes, with one GPU for this rank if there are any.

        Raises:
            LaunchError: JAX has looked for its devices already, or there are too few GPUs.
        """
        if self.hvd.size() == 1:
            return
        import jax

        gpu = gpu_of_rank(local_rank, local_size, visible_gpus(os.environ))
        if "OMP_NUM_THREADS" not in os.environ and gpu is None:
            # XLA makes its pool of threads from this number, when it looks for its devices.
            os.environ["NPROC"] = str(cpu_threads(local_size))
        address = self._address_of_service()
        if jax.config.jax_cpu_collectives_implementation is None:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # hvkit handles SIGTERM, and names ranks that have died; JAX's service would abort the
        # others before they can say so.
        jax.config.update("jax_enable_preemption_service", False)
        jax.config.update("jax_enable_recoverability", True)
        try:
            jax.distributed.initialize(
                address,
                coordinator_bind_address=address,  # by default all interfaces
                num_processes=self.hvd.size(),
                process_id=self.hvd.rank(),
                local_device_ids=None if gpu is None else [gpu],
                cluster_detection_method="deactivate",
                heartbeat_timeout_seconds=_HEARTBEAT,
            )
        except RuntimeError as error:
            raise LaunchError(f"JAX cannot join the other ranks ({error}): {LATE}") from error
        # Runs before JAX's own function, which would wait for the others for minutes.
        atexit.register(self._leave)

    def _address_of_service(self) -> str:
        """Where rank 0 will start the service through which JAX's processes find each other."""
        address = np.zeros(256, np.uint8)
        if self.hvd.rank() == 0:
            host = "127.0.0.1" if self._one_host else addresses_for_others()[0]
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
            text = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()
            address[: len(text)] = np.frombuffer(text, np.uint8)
        return self.broadcast(address, 0).tobytes().rstrip(b"\0").decode()

    def _leave(self) -> None:
        """At the end of the script: wait for all ranks, unless this one or another has failed."""
        if getattr(sys, "last_value", None) is not None:
            # Not through the interpreter's end: JAX and MPI would wait for the other ranks.
            sys.stdout.flush()
            sys.stderr.flush()
            if self.hvd.rank() == 0:
                # A launcher that sees the others end must not take this rank's status.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(_SERVICE_STAYS)
            os._exit(1)
        # Rank 0 last: its end is that of JAX's service, without which JAX aborts the others.
        import jax

        self._wait_for_the_end()
        if self.hvd.rank() > 0:
            jax.distributed.shutdown()
        self._wait_for_the_end()

    def _wait_for_the_end(self) -> None:
        request = self._of_the_end.Ibarrier()
        while not request.Test():
            time.sleep(0.01)

    def _call(
        self, collective: str, array: NDArray[Any], within: ProcessSet | None, **options: Any
    ) -> NDArray[Any]:
        with in_collective(within):
            return {
                "broadcast": self._broadcast,
                "allreduce": self._allreduce,
                "allgather": self._allgather,
            }[collective](np.ascontiguousarray(array), options)

    def _broadcast(self, array: NDArray[Any], options: dict[str, Any]) -> NDArray[Any]:
        data = array.copy()
        self._wait(self._communicator.Ibcast(self._bytes(data), root=options["root_rank"]))
        return data

    def _allreduce(self, array: NDArray[Any], options: dict[str, Any]) -> NDArray[Any]:
        result = np.empty_like(array)
        self._wait(self._communicator.Iallreduce(array, result, op=options["op"]))
        return result

    def _allgather(self, array: NDArray[Any], options: dict[str, Any]) -> NDArray[Any]:
        own = np.array([array.size], np.int64)
        lengths = np.empty(self.hvd.size(), np.int64)
        self._wait(self._communicator.Iallgather(own, lengths))
        result = np.empty(lengths.sum(), array.dtype)
        starts = np.cumsum(lengths) - lengths
        into = [result, lengths.tolist(), starts.tolist(), self._mpi.BYTE]
        self._wait(self._communicator.Iallgatherv(self._bytes(array), into))
        return result

    def _bytes(self, array: NDArray[Any]) -> list[Any]:
        return [array, array.nbytes, self._mpi.BYTE]

    def _wait(self, request: Any) -> None:
        """Wait for a collective.

        Raises:
            RankLostError: another rank has ended, or waits in another call.
        """
        looks = 0
        while not request.Test():
            looks += 1
            if looks < _FIRST_LOOKS:
                time.sleep(0)
                continue
            if rank_errors.run_ends():
                raise rank_errors.lost(calls.current_call())
            time.sleep(_LOOK_EVERY if looks < _QUICK_LOOKS else _SELDOM)


def _started_mpi() -> Any:
    """MPI, started by mpi4py unless it runs already.

    Raises:
        HorovodNotFoundError: mpi4py cannot be loaded.
        LaunchError: MPI runs without support for threads, or does not see the other ranks.
    """
    mpi = point_to_point.load_mpi()
    if mpi is None:
        raise HorovodNotFoundError(
            "several ranks were launched, but mpi4py cannot be loaded, through which the ranks of "
            "a JAX script find each other: pip install --force-reinstall mpi4py"
        )
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        atexit.register(mpi.Finalize)
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        raise LaunchError(
            "MPI runs without support for threads: let hvkit start it before anything else does"
        )
    return mpi
