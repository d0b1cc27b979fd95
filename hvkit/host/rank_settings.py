"""The environment variables that a rank sets before it starts Horovod, each with its reason.

Variables that are set already do not change. Open MPI's settings in files of the user or the site
take precedence, too.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hvkit.host import mca
from hvkit.host.commands import program
from hvkit.host.cpus import allowance
from hvkit.host.network import within_host

_STALL = "HOROVOD_STALL_"

# The parameter of the C library's mallopt that each variable sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": _TRIM_THRESHOLD,
    "MALLOC_MMAP_THRESHOLD_": _MMAP_THRESHOLD,
}
# The part of the host's memory that a rank keeps when PyTorch frees it. mallopt takes a C int.
_SHARE = 16
_MOST = (1 << 31) - 1
# Older versions accept no higher threshold for single tensors.
_OLDER_MOST = 1 << 25


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
    for variable, value in _to_keep_freed_memory(environ):
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


def _to_keep_freed_memory(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables, with values, that let a rank keep a 16th of the host's memory, 2 GiB at most.

    The GNU C library returns freed memory to Linux: what exceeds 64 MiB in total, and tensors above
    32 MiB at once. The next step in host memory then gets new pages from Linux, which fills each
    with zeros. That takes a tenth of the step or more, and differs between processes. TensorFlow
    does not need this.

    Yields nothing if the user has configured the allocator, or with another C library.
    """
    chosen = any(name.startswith("MALLOC_") for name in environ)
    if chosen or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "") or not _has_gnu_library():
        return
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kept = min(min(host, allowance().memory or host) // _SHARE, _MOST)
    for variable in _ALLOCATOR:
        yield variable, str(kept)


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Apply the variables to this process: the C library itself reads them only at its start."""
    if not _has_gnu_library():
        return
    mallopt = ctypes.CDLL(None).mallopt
    for variable, option in _ALLOCATOR.items():
        value = environ.get(variable, "")
        if value.isdecimal() and int(value) <= _MOST:
            done = mallopt(option, int(value))
            if not done and option == _MMAP_THRESHOLD:
                mallopt(option, min(int(value), _OLDER_MOST))


def _has_gnu_library() -> bool:
    try:
        return "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (AttributeError, ValueError, OSError):  # not a name that this system knows
        return False
