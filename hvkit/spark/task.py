"""What each Spark task does: finds its rank's place, and starts hvkit's agent for it.

The agent's command is this module again (``python -m hvkit.spark.task``), which calls the function.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hvkit.host.network import interface_of
from hvkit.host.rank_variables import without_rank_variables
from hvkit.launching.supervision.protocol import agent_command
from hvkit.spark.rendezvous import Front, Store

# Seconds that ranks may be apart when Horovod starts. The supervisor notices lost hosts sooner, and
# the watcher ranks that do not come.
_GLOO_WAITS = "1800"
# Environment variable of ranks: the folder with the files that Spark has shipped, if any.
_FILES = "HVKIT_SPARK_FILES"


@dataclass(frozen=True)
class RankPlace:
    """A rank's numbers, as Horovod names them."""

    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def places(hosts: Sequence[str]) -> list[RankPlace]:
    """The places of tasks on these hosts, by task; the ranks of a host follow each other."""
    sizes = Counter(hosts)  # in the order of first mention
    starts, total = {}, 0
    for host, size in sizes.items():
        starts[host] = total
        total += size
    seen: Counter[str] = Counter()
    found = []
    for host in hosts:
        local = seen[host]
        seen[host] += 1
        # Ranks with the same local rank are one on each of these hosts.
        across = [each for each, size in sizes.items() if size > local]
        place = RankPlace(starts[host] + local, local, sizes[host], across.index(host), len(across))
        found.append(place)
    return found


@dataclass(frozen=True)
class RankTask:
    """The function of a barrier stage: runs a rank until it ends.

    Attributes:
        agent: the variables with which agents find their supervisor.
        environ: further environment variables of the ranks.
        key: of the ranks' rendezvous.
        command: what the agent runs.
    """

    agent: Mapping[str, str]
    environ: Mapping[str, str]
    key: bytes
    command: Sequence[str]

    def __call__(self, _: Iterable[object]) -> Iterator[int]:
        """Run the rank; yields its number."""
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        number = context.partitionId()
        addresses = [each.address.rpartition(":")[0] for each in context.getTaskInfos()]
        hosts = context.allGather(_this_host())
        ranks = places(hosts)
        place = ranks[number]
        first = next(task for task, each in enumerate(ranks) if each.rank == 0)
        address = socket.gethostbyname(addresses[number])
        with ExitStack() as stack:
            port = ""
            if number == first:
                store = Store(address, self.key)
                stack.callback(store.close)
                port = json.dumps([address, store.port])
            found = context.allGather(port)[first]
            front = Front(json.loads(found), self.key)
            stack.callback(front.close)
            subprocess.run(
                agent_command((sys.executable, *self.command)),
                env={
                    **without_rank_variables(os.environ),
                    **_gpus(context),
                    **self.environ,
                    **_shipped({**os.environ, **self.environ}),
                    **self.agent,
                    **_variables(place, len(ranks), hosts[number], address, front.port),
                },
                stdin=subprocess.DEVNULL,
                check=False,  # the agent reports how the rank has ended
            )
        yield place.rank


def _variables(place: RankPlace, size: int, host: str, address: str, port: int) -> dict[str, str]:
    """What Horovod's own launcher would set for a rank on Gloo."""
    own = {
        "HOSTNAME": host,
        "RANK": place.rank,
        "SIZE": size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_SIZE": place.local_size,
        "CROSS_RANK": place.cross_rank,
        "CROSS_SIZE": place.cross_size,
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "GLOO_RENDEZVOUS_PORT": port,
        "GLOO_IFACE": interface_of(address),
        "GLOO_TIMEOUT_SECONDS": os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", _GLOO_WAITS),
    }
    return {f"HOROVOD_{name}": str(value) for name, value in own.items()}


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
