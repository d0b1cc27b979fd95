"""The engine of a JAX script: it starts JAX's own processes, and carries hvkit's messages.

JAX trains on several processes by itself, once they know each other: arrays are divided or
replicated over the devices of all of them, and XLA puts collectives into compiled functions,
through NCCL on GPUs and gloo on CPUs. So here Horovod is neither started nor needed. hvkit's
messages, and the address at which JAX's processes find each other, go through ``host_collectives``.

Waits inside XLA end with the process.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hvkit.errors import LaunchError, RankLostError
from hvkit.host.hardware import gpu_of_rank, visible_gpus
from hvkit.host.network import addresses_for_others
from hvkit.transport import host_collectives
from hvkit.transport.engines import Engine, ProcessSet, cpu_threads, in_collective
from hvkit.watch import calls, rank_errors

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


def _mark_waits_of_jax() -> None:
    """Report to the watcher where the script waits in collectives of JAX's outside of its steps.

    Orbax saves with them, which hangs where only one rank saves. It also calls them in its own
    threads, which may wait while the script continues.
    """
    from jax.experimental import multihost_utils

    def marked(name: str) -> None:
        function = getattr(multihost_utils, name)

        @functools.wraps(function)
        def wait(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            with calls.call(f"multihost_utils.{name}"), calls.waiting():
                return function(*args, **kwargs)

        setattr(multihost_utils, name, wait)

    for name in ("sync_global_devices", "process_allgather", "broadcast_one_to_all"):
        marked(name)


class JaxEngine(Engine):
    """Collectives on arrays in host memory, in addition to JAX's own."""

    def __init__(self) -> None:
        self._ranks = ranks = host_collectives.of_this_launch()
        self.library = ranks.library
        self.hvd: Any = SimpleNamespace(
            rank=lambda: ranks.rank,
            size=lambda: ranks.size,
            local_rank=lambda: ranks.local_rank,
            local_size=lambda: ranks.local_size,
            mpi_enabled=lambda: ranks.uses_mpi,
            is_initialized=lambda: not rank_errors.run_ends(),
            global_process_set=SimpleNamespace(size=lambda: ranks.size),
            Sum="sum",
            Min="min",
            Max="max",
        )
        self._one_host = ranks.local_size == ranks.size

    def shut_down(self) -> None:
        """Nothing to do: each wait checks whether the run ends."""

    def take_device(self, local_rank: int, local_size: int) -> None:
        """Join JAX's processes, with one GPU for this rank if there are any."""
        if self.hvd.size() == 1:
            return
        import jax

        if jax.distributed.is_initialized():
            raise LaunchError(
                "the script has called jax.distributed.initialize() itself: leave it out, and call "
                'hvkit.init("jax"), which does the same for the ranks of every launcher'
            )
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
        _mark_waits_of_jax()
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
            if self.hvd.rank() == 0:
                # A launcher that sees the others end must not take this rank's status.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._end_at_once(stay=self.hvd.rank() == 0)
        # Rank 0 last: its end is that of JAX's service, without which JAX aborts the others.
        import jax

        try:
            self._ranks.wait_for_the_end()
            if self.hvd.rank() > 0:
                jax.distributed.shutdown()
            self._ranks.wait_for_the_end()
        except RankLostError:  # that one says why
            self._end_at_once(stay=True)
        self._ranks.close()

    def _end_at_once(self, stay: bool) -> NoReturn:
        """End not through the interpreter, where JAX and MPI would wait for the other ranks."""
        sys.stdout.flush()
        sys.stderr.flush()
        if stay:
            time.sleep(_SERVICE_STAYS)
        os._exit(1)

    def _call(
        self, collective: str, array: NDArray[Any], within: ProcessSet | None, **options: Any
    ) -> NDArray[Any]:
        array = np.ascontiguousarray(array)
        with in_collective(within):
            if collective == "broadcast":
                return self._ranks.broadcast(array, options["root_rank"])
            if collective == "allreduce":
                return self._ranks.allreduce(array, options["op"])
            assert collective == "allgather", collective
            return self._ranks.allgather(array)
