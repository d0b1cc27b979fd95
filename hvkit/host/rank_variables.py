"""Reads from the environment whether, and by what, this process was launched as a rank."""

from collections.abc import Mapping
from dataclasses import dataclass

from hvkit.errors import LaunchError

# Variable with the world size, and the launcher that sets it. Slurm's is looked at last:
# an mpirun started inside a batch script inherits the script's own.
_SIZE_VARIABLES = (
    ("HOROVOD_SIZE", "horovodrun"),
    ("OMPI_COMM_WORLD_SIZE", "mpirun"),
    ("PMI_SIZE", "mpiexec"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
)

# Variables with rank, local rank and local size; Hydra's are MPICH's and Intel MPI's.
_PLACE_VARIABLES = (
    ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

# What tells one launch from another that is nested in it.
_LAUNCH_VARIABLES = (
    *("PMIX_NAMESPACE", "PMI_PORT", "PMI_JOBID", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


@dataclass(frozen=True)
class Launched:
    """A launched process: the world size that the launcher announced, and its name."""

    size: int
    launcher: str


def launched(environ: Mapping[str, str]) -> Launched | None:
    """What the launcher announced, or None if no launcher started this process.

    Raises:
        LaunchError: the announced size is not a positive integer, or the launcher is one whose
            ranks Horovod cannot see (torchrun).
    """
    for variable, launcher in _SIZE_VARIABLES:
        value = environ.get(variable)
        if value is None:
            continue
        if not value.isdecimal() or int(value) < 1:
            raise LaunchError(f"{variable} must be a positive integer, got {value!r}")
        return Launched(int(value), launcher)
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("WORLD_SIZE", "1") != "1":
        raise LaunchError(
            f"started by torchrun with WORLD_SIZE={environ['WORLD_SIZE']}, but hvkit's ranks talk "
            "over MPI: start the script with `horovodrun -np N python ...` or `mpirun -np N ...`"
        )
    return None


@dataclass(frozen=True)
class Place:
    """Which rank a launched process is, and which of how many on its host."""

    rank: int
    local_rank: int
    local_size: int


def place(environ: Mapping[str, str]) -> Place | None:
    """The place that the launcher announced, or None if no launcher started this process."""
    for variables in _PLACE_VARIABLES:
        if all(environ.get(variable, "").isdecimal() for variable in variables):
            return Place(*(int(environ[variable]) for variable in variables))
    return None


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what launchers told about another place, as a shell may keep."""
    sizes = {variable for variable, _ in _SIZE_VARIABLES}
    told = sizes.union(*_PLACE_VARIABLES) - {"SLURM_STEP_NUM_TASKS"}
    return {name: value for name, value in environ.items() if name not in told}


def launch_id(environ: Mapping[str, str]) -> str:
    """What all processes of one launch have in common, and those nested in it do not."""
    return " ".join(environ.get(variable, "-") for variable in _LAUNCH_VARIABLES)
