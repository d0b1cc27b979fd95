"""Environment variables that change how ranks run: their names, and never their values.

The only values shown are numbers of threads.
"""

import re
from collections.abc import Mapping

from hvkit.errors import LaunchError
from hvkit.host.rank_variables import launched

_THREADS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
)
_NAMES = {
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_LAUNCH_BLOCKING"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "MPI_HOME", "MPI_ROOT"),
    *("OPAL_PREFIX", "KERAS_BACKEND", "XLA_FLAGS", "OMP_PROC_BIND", "KMP_AFFINITY"),
    *("GOMP_CPU_AFFINITY", "HYDRA_HOST_FILE", "TF_CONFIG", "TF_XLA_FLAGS", "TF_USE_LEGACY_KERAS"),
}
_PREFIXES = (
    *("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "I_MPI_", "MPIR_CVAR_", "HOROVOD_", "HVKIT_"),
    *("NCCL_", "UCX_", "FI_", "GLOO_", "PYTORCH_"),
)


def thread_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The numbers of threads that are set; what is no number is shown as ``?``."""
    return {
        name: value if re.fullmatch(r"\d{1,6}(,\d{1,6})*", value) else "?"
        for name in _THREADS
        if (value := environ.get(name)) is not None
    }


def setting_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the other variables that change how programs are started or how ranks talk."""
    return tuple(
        sorted(
            name
            for name in environ
            if (name in _NAMES or name.startswith(_PREFIXES)) and name not in _THREADS
        )
    )


def rank_of(environ: Mapping[str, str]) -> str | None:
    """What makes hvkit take this process for a rank; ``None`` if nothing does."""
    try:
        found = launched(environ)
    except LaunchError as error:
        return str(error)
    return f"one of {found.size}, started by {found.launcher}" if found else None
