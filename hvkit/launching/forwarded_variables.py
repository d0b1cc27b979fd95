"""Which environment variables ranks on other hosts get, and which are secrets that stay here."""

import re
from collections.abc import Collection, Iterable, Mapping

from hvkit.launching.allocation import SLURM
from hvkit.launching.launchers import Launcher
from hvkit.log import logger

# Variables that the launcher itself needs: kept also where it sends its whole environment.
_SLURM = ("SLURM_", "SLURMD_", "OMPI_", "PRTE_", "PMIX_")
_LOCAL = ("HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "SSH_AUTH_SOCK")

# Variables that ranks on other hosts get: those that find programs and modules, and those of the
# software below hvkit.
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
# A name with one of these is a secret's: anywhere in the name, and as a whole word.
_SECRET = ("TOKEN", "SECRET", "PASSW", "PASSPHRASE", "CREDENTIAL", "APIKEY")
_SECRET_WORDS = {"KEY", "KEYS", "AUTH", "PASS"}
# Variables that are for this process only.
_OWN = {"HVKIT_RANK", "PYTHONSTARTUP", "PYTHONINSPECT"}
# Lists of GPUs, which apply only to the host where they are set.
GPU_LISTS = {
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
}


def forwarded(environ: Mapping[str, str], chosen: Iterable[str] = ()) -> tuple[str, ...]:
    """Names of the environment variables that ranks on other hosts get, sorted.

    Variables that look like secrets and lists of this host's GPUs are left out, unless the user
    names them.

    Args:
        environ: the launcher's environment.
        chosen: the names that the user wants forwarded; without effect if not set.
    """
    names = {name for name in environ if _forwarded_by_default(name)}
    return tuple(sorted(names | (set(chosen) & environ.keys())))


def _forwarded_by_default(name: str) -> bool:
    if name in _OWN or name in GPU_LISTS or is_secret(name):
        return False
    return name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES)


def is_secret(name: str) -> bool:
    """Whether a variable's name suggests that its value is a secret."""
    upper = name.upper()
    return any(word in upper for word in _SECRET) or not _SECRET_WORDS.isdisjoint(
        re.split("[^A-Z0-9]", upper)
    )


def name_absent_hyperparameters(environ: Mapping[str, str], names: Collection[str]) -> None:
    """Log SageMaker's hyperparameters that are not among the names of the variables that are sent.

    They would differ on other hosts.
    """
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
        kept = _SLURM
    else:
        return dict(environ)
    return {
        name: value
        for name, value in environ.items()
        if name in names or name in _LOCAL or name.startswith(kept)
    }
