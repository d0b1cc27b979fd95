"""The environment variables that a launcher sets for a rank."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hvkit.errors import LaunchError
from hvkit.host import run_reports

# Variable with the world size, and the launcher that sets it. Slurm's comes last: an mpirun inside
# a batch script inherits the script's own.
_SIZE_VARIABLES = (
    ("HOROVOD_SIZE", "horovodrun"),
    ("OMPI_COMM_WORLD_SIZE", "mpirun"),
    ("PMI_SIZE", "mpiexec"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
)

# Variables with rank, local rank and local size. Hydra (MPICH, Intel MPI) sets the last three.
_PLACE_VARIABLES = (
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
_RANK_VARIABLES = (*(names[0] for names in _PLACE_VARIABLES), "SLURM_PROCID")


@dataclass(frozen=True)
class Launched:
    """The world size that a launcher announced, and the launcher's name."""

    size: int
    launcher: str


def launched(environ: Mapping[str, str]) -> Launched | None:
    """The launcher that started this process, or None.

    A process that somebody starts in the shell of ``srun --pty`` is one process, as in any other
    shell, whatever the number of that step's tasks.

    Raises:
        LaunchError: the announced size is not a positive integer, or torchrun or the like started
            the process, whose ranks Horovod cannot see.
    """
    for variable, launcher in _SIZE_VARIABLES:
        value = environ.get(variable)
        if value is None or (launcher == "srun" and _in_a_shell_of_srun(environ)):
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


def _in_a_shell_of_srun(environ: Mapping[str, str]) -> bool:
    """Whether this process runs below a task of ``srun --pty``, and is not that task."""
    return "SLURM_PTY_PORT" in environ and environ.get("SLURM_TASK_PID") != str(os.getpid())


@dataclass(frozen=True)
class LaunchedRank:
    """A launched process's rank, local rank, and the number of ranks on its host."""

    rank: int
    local_rank: int
    local_size: int


def place(environ: Mapping[str, str]) -> LaunchedRank | None:
    """The place that a launcher announced, or None."""
    for variables in _PLACE_VARIABLES:
        if all(environ.get(variable, "").isdecimal() for variable in variables):
            return LaunchedRank(*(int(environ[variable]) for variable in variables))
    return None


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables of another launch, which a shell may have inherited."""
    sizes = {variable for variable, _ in _SIZE_VARIABLES}
    stale = sizes.union(*_PLACE_VARIABLES) - {"SLURM_STEP_NUM_TASKS"}
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
