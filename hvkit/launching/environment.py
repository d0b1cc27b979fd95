"""The launcher's environment: which variables ranks on other hosts get, and which stay here."""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import psutil

from hvkit.errors import UsageError
from hvkit.host.mca import WITHOUT_TOOLS
from hvkit.host.rank_variables import without_rank_variables
from hvkit.host.run_reports import RUN_NAME
from hvkit.launching.launchers import Launcher
from hvkit.launching.ssh import SLURM
from hvkit.launching.supervision.protocol import KEY_VARIABLE, SUPERVISOR_VARIABLE
from hvkit.log import logger

# The variables from which an agent knows its supervisor.
SUPERVISION = (SUPERVISOR_VARIABLE, KEY_VARIABLE)

# Variables that the launcher itself needs: kept also where it sends its whole environment.
_SLURM_PREFIXES = ("SLURM_", "SLURMD_", "OMPI_", "PRTE_", "PMIX_")
_LOCAL = ("HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "SSH_AUTH_SOCK")

# Ranks on other hosts get these variables: they find programs and modules, or configure software
# below hvkit.
_FORWARDED = {
    *("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TZ", "LANG"),
    *("CUBLAS_WORKSPACE_CONFIG", "XLA_FLAGS", "TQDM_DISABLE", "NO_COLOR", "MALLOC_ARENA_MAX"),
}
_HYPERPARAMETER = "SM_HP_"
_FORWARDED_PREFIXES = (
    *("HVKIT_", "HOROVOD_", "NCCL_", "UCX_", "FI_", "OMPI_MCA_", "MPIR_CVAR_", "GLOO_"),
    *("TORCH", "PYTORCH_", "TF_", "KERAS_", "CUDA_", "OMP_", "KMP_", "GOMP_", "MKL_"),
    *("OPENBLAS_", "NUMEXPR_", "PYTHON", "LC_", "HF_", "WANDB_"),
    # SageMaker's folders and hyperparameters.
    *("SM_CHANNEL", _HYPERPARAMETER, "SM_INPUT_DIR", "SM_MODEL_DIR", "SM_OUTPUT"),
    *("SM_HOSTS", "SM_NUM_"),
)
# A name with one of these is a secret's: anywhere in the name, or as a whole word.
_SECRET = re.compile(
    "TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|(?<![A-Z0-9])(KEYS?|AUTH|PASS)(?![A-Z0-9])"
)
# Lists of GPUs, which apply only to the host where they are set.
GPU_LISTS = {
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
}
# The others are for this process only.
_NOT_FORWARDED = GPU_LISTS | {"HVKIT_RANK", "PYTHONSTARTUP", "PYTHONINSPECT"}


def launcher_environment(
    variables: Mapping[str, str | None], interfaces: Sequence[str]
) -> dict[str, str]:
    for name, value in variables.items():
        if value is None and name not in os.environ:
            raise UsageError(f"-x {name}: it is not set here: write -x {name}=VALUE")
    environ = without_rank_variables(os.environ)
    for name in (*SUPERVISION, RUN_NAME):
        # Set if this run was started inside another one.
        environ.pop(name, None)
    if interfaces:
        # NCCL reads = as "exactly these names"; without it, eth1 would match eth10, too.
        environ.setdefault("NCCL_SOCKET_IFNAME", "=" + ",".join(interfaces))
    environ.setdefault(*WITHOUT_TOOLS)
    environ.update({name: value for name, value in variables.items() if value is not None})
    return environ


def given_environment() -> dict[str, str]:
    """The environment that this process was started with."""
    environ = dict(os.environ)
    # In the C locale Python sets this itself (PEP 538).
    if "LC_CTYPE" not in psutil.Process().environ():
        environ.pop("LC_CTYPE", None)
    return environ


def forwarded(environ: Mapping[str, str], chosen: Iterable[str] = ()) -> tuple[str, ...]:
    """Names of the environment variables that ranks on other hosts get, sorted.

    Variables that look like secrets and lists of this host's GPUs are left out, unless the user
    names them.
    """
    named = {n for n in environ if n in _FORWARDED or n.startswith(_FORWARDED_PREFIXES)}
    names = {name for name in named - _NOT_FORWARDED if not is_secret(name)}
    return tuple(sorted(names | (set(chosen) & environ.keys())))


def is_secret(name: str) -> bool:
    return _SECRET.search(name.upper()) is not None


def name_absent_hyperparameters(environ: Mapping[str, str], names: Collection[str]) -> None:
    """Log SageMaker's hyperparameters that are not sent: they would differ on other hosts."""
    for name in sorted(environ.keys() - {*names}):
        if name.startswith(_HYPERPARAMETER):
            logger.warning(
                "%s stays on this host, since its name looks like a secret's: -x %s sends it to "
                "the ranks on other hosts, too",
                *(name, name),
            )


def sendable(
    environ: Mapping[str, str], names: Collection[str], launcher: Launcher, system: str | None
) -> dict[str, str]:
    """The launcher's environment, without secrets if all of it goes to other hosts."""
    if launcher.sends_all:
        kept: tuple[str, ...] = ()
    elif system == SLURM:
        # In Slurm, srun starts Open MPI's daemons and sends its whole environment.
        kept = _SLURM_PREFIXES
    else:
        return dict(environ)
    return {
        name: value
        for name, value in environ.items()
        if name in names or name in _LOCAL or name.startswith(kept)
    }
