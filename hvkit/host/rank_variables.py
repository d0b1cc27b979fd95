"""The environment variables of a rank: those that its launcher sets, and those that the rank sets.

A rank sets variables before it starts Horovod, each for a reason. It changes none that is set
already. Open MPI's settings in files of the user or the site take precedence, too.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hvkit.errors import LaunchError
from hvkit.host import mca, run_reports
from hvkit.host.hardware import cgroup_limits
from hvkit.host.network import within_host
from hvkit.host.system import program

# Variable with the world size, and the launcher that sets it. Slurm's comes last: an mpirun inside
# a batch script inherits the script's own.
_SIZE_VARIABLES = (
    ("HOROVOD_SIZE", "horovodrun"),
    ("OMPI_COMM_WORLD_SIZE", "mpirun"),
    ("PMI_SIZE", "mpiexec"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
)

# Variables with rank, local rank and local size. Hydra (MPICH, Intel MPI) sets the last three.
_POSITION_VARIABLES = (
    ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

# Together these distinguish a launch from another one inside it.
_LAUNCH_VARIABLES = (
    *("PMIX_NAMESPACE", "PMI_PORT", "PMI_JOBID", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID"),
)

# Variables with the rank; Slurm's comes last, as above.
_RANK_VARIABLES = (*(names[0] for names in _POSITION_VARIABLES), "SLURM_PROCID")


class Launched(NamedTuple):
    """The world size that a launcher announced, and the launcher's name."""

    size: int
    launcher: str


def launched(environ: Mapping[str, str]) -> Launched | None:
    """The launcher that started this process, or None.

    A process that somebody starts in the shell of ``srun --pty`` is one process, as in any other
    shell, whatever the number of that step's tasks.
    """
    for variable, launcher in _SIZE_VARIABLES:
        value = environ.get(variable)
        # In a shell of ``srun --pty``, the shell itself is the task.
        in_shell = "SLURM_PTY_PORT" in environ and environ.get("SLURM_TASK_PID") != str(os.getpid())
        if value is None or (launcher == "srun" and in_shell):
            continue
        if not value.isdecimal() or int(value) < 1:
            raise LaunchError(f"{variable} must be a positive integer, got {value!r}")
        return Launched(int(value), launcher)
    if (size := environ.get("WORLD_SIZE", "1")) != "1":
        other = {"RANK", "MASTER_ADDR"} <= environ.keys() and "a launcher of torch.distributed"
        if who := "torchrun" if "TORCHELASTIC_RUN_ID" in environ else other:
            raise LaunchError(
                f"{who} started this process (WORLD_SIZE={size}), but hvkit's ranks communicate "
                "over MPI: start the script with `hvkit run -np N script.py`, `mpirun -np N ...` "
                "or `horovodrun -np N ...`; or unset WORLD_SIZE to train in one process"
            )
    return None


class LaunchedRank(NamedTuple):
    """A launched process's rank, local rank, and the number of ranks on its host."""

    rank: int
    local_rank: int
    local_size: int


def launched_rank(environ: Mapping[str, str]) -> LaunchedRank | None:
    """The rank; None unless a launcher has announced rank, local rank and local size."""
    for variables in _POSITION_VARIABLES:
        if all(environ.get(variable, "").isdecimal() for variable in variables):
            return LaunchedRank(*(int(environ[variable]) for variable in variables))
    return None


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables of another launch, which a shell may have inherited."""
    sizes = {variable for variable, _ in _SIZE_VARIABLES}
    stale = sizes.union(*_POSITION_VARIABLES) - {"SLURM_STEP_NUM_TASKS"}
    return {name: value for name, value in environ.items() if name not in stale}


def launch_id(environ: Mapping[str, str]) -> str:
    """A text that is the same for all processes of a launch, and differs for nested launches."""
    return " ".join(environ.get(variable, "-") for variable in _LAUNCH_VARIABLES)


def rank_id(environ: Mapping[str, str]) -> str | None:
    """A text that the rank and the processes that it starts have, and no other process.

    None if the variables do not distinguish launches, as with MPICH without ``hvkit run``.
    """
    known = (*_LAUNCH_VARIABLES, run_reports.VARIABLE)
    launch = [environ[variable] for variable in known if variable in environ]
    ranks = [environ[variable] for variable in _RANK_VARIABLES if variable in environ]
    return " ".join([*launch, *ranks[:1]]) if launch and ranks else None


_STALL = "HOROVOD_STALL_"
# Variables that a rank sets to 1, with the reason.
_SWITCHED_ON = {
    "HVKIT_BLOCKING_WAITS": "Horovod's threads sleep while they wait, so that the framework can "
    "use their core",
    "HVKIT_OWN_COLLECTIVES": "large tensors in host memory are reduced in rings and in segments, "
    "which keep links busy with the fewest bytes; 0 leaves them to MPI, for one that sums inside "
    "the network",
    "OMPI_MCA_mpi_yield_when_idle": "a rank that waits inside MPI lets others run; Open MPI would "
    "keep the core busy",
    f"{_STALL}CHECK_DISABLE": "hvkit names the lines of the script where ranks wait; Horovod would "
    "name tensors",
}

# The parameter of the C library's mallopt that each variable sets.
_MMAP_THRESHOLD = -3
_ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": _MMAP_THRESHOLD}
# The part of the host's memory that a rank keeps when PyTorch frees it. mallopt takes a C int.
_KEPT_PART = 16
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
    user_set_stall = any(name.startswith(_STALL) for name in environ)
    for variable, reason in _SWITCHED_ON.items():
        if not (user_set_stall and variable.startswith(_STALL)):
            yield RankSetting(variable, "1", reason)
    if (kept := _kept_memory(environ)) is not None:
        for variable in _ALLOCATOR:
            yield RankSetting(
                variable,
                str(kept),
                "a rank keeps up to this many bytes that PyTorch frees, for the next step's "
                "tensors; otherwise Linux would provide new memory in each step, page by page",
            )
    mpirun = program("mpirun")
    names = within_host()
    if names and not mca.where_set(mca.RANKS, environ, mpirun):
        # Open MPI's own default excludes the first two. It warns of names that do not exist, so
        # add only those that do. `hvkit run` chooses the network itself.
        yield RankSetting(
            f"{mca.RANKS.prefix}btl_tcp_if_exclude",
            ",".join(["127.0.0.1/8", "sppp", *names]),
            "these networks stay within a host; if docker0 has one address on two hosts, their "
            "ranks wait for each other forever",
        )
    if not mca.where_set(mca.TRANSPORTS, environ, mpirun):
        # The two-sided messages of libfabric's networks (``mtl``) are another part of Open MPI.
        yield RankSetting(
            f"{mca.TRANSPORTS.prefix}btl",
            "^ofi",
            "hvkit does not use libfabric's one-sided messages; if no network supports them, Open "
            "MPI waits for a second before it gives up on them",
        )


def _kept_memory(environ: Mapping[str, str]) -> int | None:
    """Freed bytes that a rank may keep: a 16th of the host's memory, 2 GiB at most.

    The GNU C library returns freed memory to Linux: what exceeds 64 MiB in total, and tensors above
    32 MiB at once. The next step in host memory then gets new pages from Linux, which fills each
    with zeros. That takes a tenth of the step or more, and differs between processes. TensorFlow
    does not need this.

    None if the user has configured the allocator, or with another C library.
    """
    chosen = any(name.startswith("MALLOC_") for name in environ)
    if chosen or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "") or not _has_gnu_library():
        return None
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(min(host, cgroup_limits().memory or host) // _KEPT_PART, _MOST)


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
    except (ValueError, OSError):  # not a name that this system knows
        return False
