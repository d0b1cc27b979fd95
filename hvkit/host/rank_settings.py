"""The environment variables that a rank sets before it starts Horovod, each with its reason.

Variables that are set already do not change. Open MPI's settings in files of the user or the site
take precedence, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hvkit.host import mca
from hvkit.host.allocator import variables_to_keep_freed_memory
from hvkit.host.commands import program
from hvkit.host.network import within_host

_STALL = "HOROVOD_STALL_"


@dataclass(frozen=True)
class RankSetting:
    """A variable, its value, and why a rank sets it."""

    variable: str
    value: str
    reason: str


def rank_settings(environ: Mapping[str, str]) -> list[RankSetting]:
    """The variables that a rank with this environment sets."""
    return [each for each in _wanted(environ) if each.variable not in environ]


def _wanted(environ: Mapping[str, str]) -> Iterator[RankSetting]:
    yield RankSetting(
        "HVKIT_BLOCKING_WAITS",
        "1",
        "Horovod's threads sleep while they wait, so that the framework can use their core",
    )
    yield RankSetting(
        "HVKIT_OWN_COLLECTIVES",
        "1",
        "large tensors in host memory are reduced in rings and in segments, which keep links busy "
        "with the fewest bytes; 0 leaves them to MPI, for one that sums inside the network",
    )
    yield RankSetting(
        "OMPI_MCA_mpi_yield_when_idle",
        "1",
        "a rank that waits inside MPI lets others run; Open MPI would keep the core busy",
    )
    if not any(name.startswith(_STALL) for name in environ):
        yield RankSetting(
            f"{_STALL}CHECK_DISABLE",
            "1",
            "hvkit names the lines of the script where ranks wait; Horovod would name tensors",
        )
    for variable, value in variables_to_keep_freed_memory(environ):
        yield RankSetting(
            variable,
            value,
            "a rank keeps up to this many bytes that PyTorch frees, for the next step's tensors; "
            "otherwise Linux would provide new memory in each step, page by page",
        )
    mpirun = program("mpirun")
    names = within_host()
    if names and not mca.place_set(mca.RANKS, environ, mpirun):
        # Open MPI's own default excludes the first two. It warns of names that do not exist, so
        # add only those that do. `hvkit run` chooses the network itself.
        yield RankSetting(
            f"{mca.RANKS.prefix}btl_tcp_if_exclude",
            ",".join(["127.0.0.1/8", "sppp", *names]),
            "these networks stay within a host; if docker0 has one address on two hosts, their "
            "ranks wait for each other forever",
        )
    if not mca.place_set(mca.TRANSPORTS, environ, mpirun):
        # The two-sided messages of libfabric's networks (``mtl``) are another part of Open MPI.
        yield RankSetting(
            f"{mca.TRANSPORTS.prefix}btl",
            "^ofi",
            "hvkit does not use libfabric's one-sided messages; if no network supports them, Open "
            "MPI waits for a second before it gives up on them",
        )
