"""The tasks of Spark's job: each finds its rank's position, and starts hvkit's agent for the rank.

The agent's command is this module again (``python -m hvkit.spark.task``), which calls the function.

Horovod's Gloo finds the other ranks in a store of addresses, which it reads and writes by HTTP,
without any proof of who it is. So each task answers the HTTP of its own rank, on the loopback
interface and for processes of its own user only, and passes it on to the store in rank 0's task,
over a connection on which both ends have proven that they know a key (``hvkit.connections``)::

    rank ── HTTP, loopback ── Front ── TCP, authenticated ── Store, in rank 0's task
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path

from hvkit import threads
from hvkit.communication.encoding import decode, encode
from hvkit.connections import Connection, Listener, connect
from hvkit.errors import LaunchError
from hvkit.host.network import name_of_interface
from hvkit.host.rank_variables import without_rank_variables
from hvkit.launching.supervision.protocol import agent_command

# Seconds that ranks may be apart when Horovod starts. The supervisor notices lost hosts sooner, and
# the watcher ranks that do not come.
_GLOO_WAITS = "1800"
# Environment variable of ranks: the folder with the files that Spark has shipped, if any.
_FILES = "HVKIT_SPARK_FILES"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RankPosition:
    """A rank's numbers, as Horovod names them."""

    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def positions(hosts: Sequence[str]) -> list[RankPosition]:
    """The positions of ranks on these hosts, by task; the ranks of a host follow each other."""
    sizes = Counter(hosts)  # in the order of first mention
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    seen: Counter[str] = Counter()
    found = []
    for host in hosts:
        local = seen[host]
        seen[host] += 1
        # Ranks with the same local rank are one on each of these hosts.
        across = [each for each, size in sizes.items() if size > local]
        cross = across.index(host), len(across)
        found.append(RankPosition(starts[host] + local, local, sizes[host], *cross))
    return found


@dataclass(frozen=True)
class RankTask:
    """The function of a barrier stage: runs a rank until it ends."""

    agent: Mapping[str, str]  # the variables with which agents find their supervisor
    environ: Mapping[str, str]  # further ones, of the ranks
    key: bytes  # of the ranks' rendezvous
    command: Sequence[str]  # what the agent runs

    def __call__(self, _: Iterable[object]) -> Iterator[int]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        number = context.partitionId()
        addresses = [each.address.rpartition(":")[0] for each in context.getTaskInfos()]
        hosts = context.allGather(_this_host())
        ranks = positions(hosts)
        position = ranks[number]
        first = next(task for task, each in enumerate(ranks) if each.rank == 0)
        address = socket.gethostbyname(addresses[number])
        interface = _interface(hosts[number], addresses[number], address)
        with ExitStack() as stack:
            port = ""
            if number == first:
                store = stack.enter_context(closing(Store(address, self.key)))
                port = json.dumps([address, store.port])
            found = json.loads(context.allGather(port)[first])
            front = stack.enter_context(closing(Front(found, self.key)))
            subprocess.run(
                agent_command((sys.executable, *self.command)),
                env={
                    **without_rank_variables(os.environ),
                    **_gpus(context),
                    **self.environ,
                    **_shipped({**os.environ, **self.environ}),
                    **self.agent,
                    **_variables(position, len(ranks), hosts[number], interface, front.port),
                },
                stdin=subprocess.DEVNULL,
                check=False,  # the agent reports how the rank has ended
            )
        yield position.rank


def _interface(host: str, name: str, address: str) -> str:
    """The network interface with the address to which an executor's name resolves."""
    if (found := name_of_interface(address)) is None:
        raise LaunchError(
            f"no network interface of {host} has the address {address}, to which the name of its "
            f"Spark executor, {name}, resolves: give the name the address of an interface, in DNS "
            "or /etc/hosts, or set SPARK_LOCAL_IP to one before Spark starts on this host"
        )
    return found


def _variables(
    position: RankPosition, size: int, host: str, interface: str, port: int
) -> dict[str, str]:
    """The variables that Horovod's own launcher would set for a rank on Gloo."""
    values = {
        **{name.upper(): number for name, number in vars(position).items()},
        "HOSTNAME": host,
        "SIZE": size,
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": _LOOPBACK,
        "GLOO_RENDEZVOUS_PORT": port,
        "GLOO_IFACE": interface,
        "GLOO_TIMEOUT_SECONDS": os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", _GLOO_WAITS),
    }
    return {f"HOROVOD_{name}": str(value) for name, value in values.items()}


def _shipped(environ: Mapping[str, str]) -> dict[str, str]:
    """How a rank with this environment finds the modules and files that Spark has shipped."""
    from pyspark import SparkFiles

    given = environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(dict.fromkeys(each for each in [*given, *sys.path] if each))
    root = SparkFiles.getRootDirectory()
    has_files = os.path.isdir(root) and bool(os.listdir(root))
    return {"PYTHONPATH": path} | ({_FILES: root} if has_files else {})


def _gpus(context: object) -> dict[str, str]:
    """The GPUs that Spark has given to this task; nothing if it schedules none."""
    resources = context.resources()  # type: ignore[attr-defined]
    gpu = resources.get("gpu")
    return {} if gpu is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpu.addresses)}


def _this_host() -> str:
    """A text that no other host has."""
    started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}-{started}"


class Store:
    """Values by path, which ``Front`` reads and writes."""

    def __init__(self, address: str, key: bytes) -> None:
        self._values: dict[str, bytes] = {}
        self._listener = Listener(address, key)
        self.port = self._listener.port
        threads.start("hvkit-store", self._listener.serve, self._serve)

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connected: socket.socket) -> None:
        connection = Connection(connected)
        with closing(connection), contextlib.suppress(OSError):
            while True:
                method, path, value = decode(connection.receive()[1])
                if method == "PUT":
                    self._values[path] = value
                elif method == "DELETE":
                    self._values.pop(path, None)
                connection.send(0, encode(self._values.get(path)))


class Front:
    """Answers the HTTP of the ranks of this process, from the store at an address and port."""

    def __init__(self, store: tuple[str, int], key: bytes) -> None:
        address, port = store
        self._store = Connection(connect([address], port, key))
        self._one = threading.Lock()
        self._server = ThreadingHTTPServer((_LOOPBACK, 0), _handler_for(self))
        self.port: int = self._server.server_address[1]
        threads.start("hvkit-rendezvous", self._server.serve_forever)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._store.close()

    def request(self, method: str, path: str, value: bytes) -> bytes | None:
        """Pass a request on; the value of the path after it, None if there is none."""
        with self._one:
            self._store.send(0, encode((method, path, value)))
            found: bytes | None = decode(self._store.receive()[1])
            return found


def _handler_for(front: Front) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            if not _is_of_this_user(self.client_address[1], front.port):
                self.send_error(403)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = front.request(self.command, self.path, body)
            content = found if self.command == "GET" else b""
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        do_GET = do_PUT = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: Gloo sends a hundred requests a second."""

    return Handler


def _is_of_this_user(port: int, server: int) -> bool:
    """Whether a connection from this port of the loopback interface belongs to this user.

    /proc/net/tcp has a line for each socket: its own address, the other one, and in the eighth
    field the number of its user.
    """
    wanted = _in_proc(port), _in_proc(server)
    fields = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any((each[1], each[2]) == wanted and int(each[7]) == os.getuid() for each in fields)


def _in_proc(port: int) -> str:
    """A port of 127.0.0.1 as /proc/net/tcp writes it: the address in the host's byte order."""
    (number,) = struct.unpack("=I", socket.inet_aton(_LOOPBACK))
    return f"{number:08X}:{port:04X}"


def main() -> None:
    """Call the function; ``pyspark.SparkFiles`` finds files as in Spark's own tasks."""
    # Not at the top: Spark's tasks do not need it.
    from hvkit.functions import rank

    if root := os.environ.pop(_FILES, ""):
        from pyspark import SparkFiles

        SparkFiles._root_directory = root
        SparkFiles._is_running_on_worker = True
    rank.main()


if __name__ == "__main__":
    main()
