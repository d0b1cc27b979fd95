"""The engine of a JAX script: it starts JAX's own processes, and carries hvkit's messages.

JAX trains on several processes by itself, once they know each other: arrays are divided or
replicated over the devices of all of them, and XLA puts collectives into compiled functions,
through NCCL on GPUs and gloo on CPUs. So here Horovod is neither started nor needed. Waits inside
XLA end with the process.

hvkit's messages, such as the arrays of ``hvkit.allreduce``, and the address at which JAX's
processes find each other, are sent from host memory: by MPI under a launcher with MPI.
``--launcher gloo`` and Spark start ranks without MPI, but with a store of addresses for Horovod's
Gloo. There the ranks put their addresses and the key that admits them, so everyone who can read the
store can take part in the run, as with Gloo itself; on Spark, the store serves the ranks of the run
only.
"""

from __future__ import annotations

import atexit
import functools
import http.client
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hvkit.errors import HorovodNotFoundError, LaunchError, RankLostError
from hvkit.host.hardware import gpu_of_rank, visible_gpus
from hvkit.host.network import addresses_for_others
from hvkit.host.rank_variables import launched, launched_rank
from hvkit.log import in_short
from hvkit.transport.engines import Engine, ProcessSet, cpu_threads, in_collective
from hvkit.transport.mailbox import TcpMailbox, load_mpi, pauses
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

# The store of addresses that Horovod's launcher and hvkit's Spark tasks have for Gloo.
_STORE = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_STORE_WAITS = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_POLL_STORE_EVERY = 0.05

# Tags over TCP.
_DATA = 0
_END = 1
_RECEIVED = 2

# Bytes of a broadcast over TCP from which a rank waits until the others have received it. Arrays
# that arrive early are in their memory: so these may be many small ones, but only one large one.
_LARGE = 1 << 20


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
        self._ranks = ranks = of_this_launch()
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
        arguments = [options[name] for name in ("root_rank", "op") if name in options]
        function: Any = getattr(self._ranks, collective)
        with in_collective(within):
            result: NDArray[Any] = function(np.ascontiguousarray(array), *arguments)
        return result


def of_this_launch() -> MpiCollectives | TcpCollectives:
    if all(os.environ.get(each) for each in _STORE):
        return TcpCollectives()
    return MpiCollectives()


class MpiCollectives:
    """This rank's numbers, and collectives on flat arrays that all ranks call in one order.

    They go through mpi4py, which starts MPI unless it runs already.
    """

    library = "mpi4py"
    uses_mpi = True

    def __init__(self) -> None:
        self._mpi = _started_mpi()
        self._communicator = self._mpi.COMM_WORLD.Dup()
        # Another one, so that the barrier of a rank at its end matches no collective of the others.
        self._of_the_end = self._communicator.Dup()
        host = self._communicator.Split_type(self._mpi.COMM_TYPE_SHARED)
        self.rank, self.size = self._communicator.rank, self._communicator.size
        self.local_rank, self.local_size = host.rank, host.size

    def broadcast(self, array: NDArray[Any], root: int) -> NDArray[Any]:
        """Return rank ``root``'s array; every rank passes one of the same length."""
        data = array.copy()
        self._wait(self._communicator.Ibcast(data, root=root))
        return data

    def allreduce(self, array: NDArray[Any], op: str) -> NDArray[Any]:
        """Reduce by ``"sum"``, ``"min"`` or ``"max"`` an array of one length and dtype."""
        result = np.empty_like(array)
        operation = getattr(self._mpi, op.upper())
        self._wait(self._communicator.Iallreduce(array, result, op=operation))
        return result

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return all ranks' bytes, one after the other in rank order; lengths may differ."""
        length = np.array([array.size], np.int64)
        lengths = np.empty(self.size, np.int64)
        self._wait(self._communicator.Iallgather(length, lengths))
        result = np.empty(lengths.sum(), array.dtype)
        starts = np.cumsum(lengths) - lengths
        into = [result, (lengths.tolist(), starts.tolist())]
        self._wait(self._communicator.Iallgatherv(array, into))
        return result

    def wait_for_the_end(self) -> None:
        """Wait until all ranks call this, whatever else they may have called before.

        If another rank has died, the launcher ends this one.
        """
        request = self._of_the_end.Ibarrier()
        while not request.Test():
            time.sleep(0.01)

    def close(self) -> None:
        """Nothing to do: MPI closes at the end of the process."""

    def _wait(self, request: Any) -> None:
        for pause in pauses():
            if request.Test():
                return
            if pause and rank_errors.run_ends():
                raise rank_errors.lost(calls.current_call())
            time.sleep(pause)


def _started_mpi() -> Any:
    mpi = load_mpi()
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


class TcpCollectives:
    """The same over connections between ranks; the store of the launcher has their addresses.

    A sum and an allgather use a ring, so that for a sum each rank sends 2 (n-1)/n of its array. A
    broadcast uses a tree. A large one ends on a rank once all ranks below it have the array.
    """

    library = "the launcher"
    uses_mpi = False

    def __init__(self) -> None:
        announced, here = launched(os.environ), launched_rank(os.environ)
        if announced is None or here is None:
            raise LaunchError(
                f"{' and '.join(_STORE)} are set, but HOROVOD_SIZE, HOROVOD_RANK, "
                "HOROVOD_LOCAL_RANK and HOROVOD_LOCAL_SIZE are not: start the ranks with "
                "`hvkit run --launcher gloo`, or unset them"
            )
        self.rank, self.size = here.rank, announced.size
        self.local_rank, self.local_size = here.local_rank, here.local_size
        store = _LauncherStore()
        if self.rank == 0:
            store.put("key", secrets.token_bytes(32))
        one_host = self.local_size == self.size
        self._mailbox = TcpMailbox(self.rank, store.get("key", "rank 0"), one_host, self._run_ends)
        self._at_its_end = False
        store.put(f"address-{self.rank}", json.dumps(self._mailbox.address).encode())
        self._mailbox.addresses = [
            json.loads(store.get(f"address-{n}", f"rank {n}")) for n in range(self.size)
        ]
        self._next = (self.rank + 1) % self.size
        self._previous = (self.rank - 1) % self.size

    def broadcast(self, array: NDArray[Any], root: int) -> NDArray[Any]:
        data = array.copy()
        # Numbers count from rank `root`. A rank receives from the one whose number lacks its lowest
        # bit, and sends to those whose numbers have one lower bit in addition.
        number = (self.rank - root) % self.size
        bit = 1
        while bit < self.size and not number & bit:
            bit *= 2
        above = (self.rank - bit) % self.size
        if number:
            self._mailbox.receive(data, above, _DATA)
        further = []
        while bit := bit // 2:
            if number + bit < self.size:
                further.append((self.rank + bit) % self.size)
        for requests in [self._mailbox.start_to_send(data, each, _DATA, "") for each in further]:
            self._mailbox.finish(requests)
        if data.nbytes >= _LARGE:
            word = np.zeros(1, np.uint8)
            for each in further:
                self._mailbox.receive(word, each, _RECEIVED)
            if number:
                self._mailbox.send(word, above, _RECEIVED, "")
        return data

    def allreduce(self, array: NDArray[Any], op: str) -> NDArray[Any]:
        add_up = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op]
        result = array.copy()
        parts = np.array_split(result, self.size)
        # At the end rank r has the sum of part r + 1, which then goes around the ring.
        for step in range(self.size - 1):
            into = parts[(self.rank - step - 1) % self.size]
            received = np.empty_like(into)
            self._pass_on(parts[(self.rank - step) % self.size], received, _DATA)
            add_up(into, received, out=into)
        self._around(parts, first=self.rank + 1, tag=_DATA)
        return result

    def allgather(self, array: NDArray[Any]) -> NDArray[Any]:
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = array.size
        self._around(np.split(lengths, self.size), first=self.rank, tag=_DATA)
        result = np.empty(lengths.sum(), array.dtype)
        parts = np.split(result, np.cumsum(lengths)[:-1])
        parts[self.rank][:] = array
        self._around(parts, first=self.rank, tag=_DATA)
        return result

    def wait_for_the_end(self) -> None:
        self._at_its_end = True
        self._around(list(np.zeros((self.size, 1), np.uint8)), first=self.rank, tag=_END)

    def close(self) -> None:
        self._mailbox.close()

    def _run_ends(self) -> bool:
        # At their ends, ranks wait for others that have ended their scripts.
        return not self._at_its_end and rank_errors.run_ends()

    def _around(self, parts: list[NDArray[Any]], first: int, tag: int) -> None:
        """Send parts around the ring until each rank has all; this one begins with ``first``."""
        for step in range(self.size - 1):
            out, into = (first - step) % self.size, (first - step - 1) % self.size
            self._pass_on(parts[out], parts[into], tag)

    def _pass_on(self, out: NDArray[Any], into: NDArray[Any], tag: int) -> None:
        """Send to the next rank while the previous one sends to this one."""
        requests = self._mailbox.start_to_send(out, self._next, tag, "")
        self._mailbox.receive(into, self._previous, tag)
        self._mailbox.finish(requests)


class _LauncherStore:
    """Values by name, which the launcher keeps for the ranks of a run."""

    def __init__(self) -> None:
        self._address, port = (os.environ[each] for each in _STORE)
        self._port = int(port)
        self._words = f"the launcher's store of ranks' addresses, {self._address}:{port},"
        self._until = time.monotonic() + float(os.environ.get(_STORE_WAITS, "30"))

    def put(self, name: str, value: bytes) -> None:
        self._request("PUT", name, value)

    def get(self, name: str, whose: str) -> bytes:
        while (value := self._request("GET", name)) is None:
            if time.monotonic() > self._until:
                raise LaunchError(
                    f"{whose} has not come within {os.environ.get(_STORE_WAITS, '30')} s of this "
                    f"rank's start: set {_STORE_WAITS} to wait for longer"
                )
            time.sleep(_POLL_STORE_EVERY)
        return value

    def _request(self, method: str, name: str, value: bytes | None = None) -> bytes | None:
        """The answer; None for a name without a value."""
        connection = http.client.HTTPConnection(self._address, self._port, timeout=30)
        try:
            connection.request(method, f"/hvkit/{name}", value)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as problem:
            raise LaunchError(f"{self._words} cannot be reached ({in_short(problem)})") from problem
        finally:
            connection.close()
        if answer.status not in (200, 404):
            raise LaunchError(f"{self._words} answers {answer.status} {answer.reason}")
        return content if answer.status == 200 else None
