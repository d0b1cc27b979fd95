"""Which environment variables ranks on other hosts get: a rule, so that secrets stay at home."""

from collections.abc import Iterable, Mapping

# What finds programs and modules, and what the layers below hvkit read.
_NAMES = {
    *("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TZ", "LANG"),
    *("CUBLAS_WORKSPACE_CONFIG", "XLA_FLAGS", "TQDM_DISABLE", "NO_COLOR", "MALLOC_ARENA_MAX"),
}
_PREFIXES = (
    *("HVKIT_", "HOROVOD_", "NCCL_", "UCX_", "FI_", "OMPI_MCA_", "MPIR_CVAR_", "GLOO_"),
    *("TORCH", "PYTORCH_", "TF_", "KERAS_", "CUDA_", "OMP_", "KMP_", "GOMP_", "MKL_"),
    *("OPENBLAS_", "NUMEXPR_", "PYTHON", "LC_", "HF_", "WANDB_"),
)
# Words that mark a secret, wherever in the name or between its underscores.
_SECRET = ("TOKEN", "SECRET", "PASSW", "PASSPHRASE", "CREDENTIAL", "APIKEY")
_SECRET_WORDS = {"KEY", "KEYS", "AUTH", "PASS"}
# These belong to the process that has them.
_OWN = {"HVKIT_RANK", "PYTHONSTARTUP", "PYTHONINSPECT"}

GPU_LISTS = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        *("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    }
)
"""Variables that list GPUs of the one host that they are set on: another host has its own."""


def forwarded(environ: Mapping[str, str], asked: Iterable[str] = ()) -> tuple[str, ...]:
    """Names of the variables that go to other hosts, sorted.

    What looks like a secret is not among them, nor is a list of this host's GPUs, unless it is
    asked for by name.

    Args:
        environ: the launcher's environment.
        asked: names that the user wants forwarded; those that are not set have no effect.
    """
    names = {name for name in environ if _follows_the_rule(name)}
    return tuple(sorted(names | (set(asked) & environ.keys())))


def _follows_the_rule(name: str) -> bool:
    if name in _OWN or name in GPU_LISTS or any(word in name.upper() for word in _SECRET):
        return False
    if not _SECRET_WORDS.isdisjoint(name.upper().split("_")):
        return False
    return name in _NAMES or name.startswith(_PREFIXES)
