"""The state of this host and this Python, without judgement: ``hvkit.doctor.findings`` judges.

Facts are one dict, which ``hvkit doctor --json`` prints. It contains names of environment
variables, but no values except numbers of threads.
"""

import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from hvkit.doctor.horovod import horovod
from hvkit.doctor.software import (
    compilers,
    mpi_launchers_here,
    tensorflows,
    torch_cuda,
    unmet_requirements,
    versions,
)
from hvkit.errors import LaunchError
from hvkit.host.commands import run
from hvkit.host.cpus import allowance, free_memory
from hvkit.host.gpus import gpus
from hvkit.host.launcher_variables import launched
from hvkit.host.network import addresses_of, interfaces
from hvkit.host.rank_settings import rank_settings

FORMAT = 1

_THREADS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
)
_SETTINGS = {
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_LAUNCH_BLOCKING"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "MPI_HOME", "MPI_ROOT"),
    *("OPAL_PREFIX", "KERAS_BACKEND", "XLA_FLAGS", "OMP_PROC_BIND", "KMP_AFFINITY"),
    *("GOMP_CPU_AFFINITY", "HYDRA_HOST_FILE", "TF_CONFIG", "TF_XLA_FLAGS", "TF_USE_LEGACY_KERAS"),
}
_PREFIXES = (
    *("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "I_MPI_", "MPIR_CVAR_", "HOROVOD_", "HVKIT_"),
    *("NCCL_", "UCX_", "FI_", "GLOO_", "PYTORCH_"),
)
_SECONDS_TO_RESOLVE = 2.0
# For users without sbin on PATH.
_SBIN = "/usr/sbin:/usr/local/sbin:/sbin"


def gather() -> dict[str, Any]:
    """Collect all facts; the slow ones, which start programs, in parallel.

    ``hvkit.doctor.report.json_report`` describes them. It leaves out those whose names start with
    ``_``, which only the findings need:

    - ``_tensorflows``: every package that contains TensorFlow, with its version.
    - ``_unmet``: requirements of packages that are not met.
    - ``_cannot_build``: why hvkit cannot build Horovod here; ``None`` if it can.
    - ``_gpu_failure``: the error of an nvidia-smi that fails.
    - ``_launched``: why hvkit takes this process for a rank; ``None`` if it does not.
    - ``_first_line`` of a launcher: what its ``--version`` prints, if that does not show its MPI.
    """
    with ThreadPoolExecutor() as pool:
        found_horovod = pool.submit(horovod)
        found_gpus = pool.submit(gpus)
        found_launchers = pool.submit(mpi_launchers_here)
        found_compilers = pool.submit(compilers)
        found_addresses = pool.submit(own_addresses)
        found_ssh = pool.submit(ssh)
        total = int(psutil.virtual_memory().total)
        return {
            "format": FORMAT,
            "hostname": socket.gethostname(),
            "versions": versions(),
            "python": sys.executable,
            "platform": system(),
            "horovod": found_horovod.result()[0],
            "mpi": next(iter(found_launchers.result()), None),
            "launchers": found_launchers.result(),
            "compilers": found_compilers.result(),
            "cores": {
                "usable": len(os.sched_getaffinity(0)),
                "host": os.cpu_count() or 1,
                "limit": allowance().cpus,
            },
            "memory": {
                "total": min(total, allowance().memory or total),
                "available": free_memory(),
            },
            "shared_memory": shared_memory(),
            "gpus": [asdict(gpu) for gpu in found_gpus.result().found],
            "driver_cuda": found_gpus.result().driver_cuda,
            "torch_cuda": torch_cuda(),
            "ssh": found_ssh.result(),
            "addresses": found_addresses.result(),
            "interfaces": [asdict(one) for one in interfaces()],
            "threads": thread_settings(os.environ),
            "environment": setting_names(os.environ),
            "set_by_ranks": [asdict(each) for each in rank_settings(os.environ)],
            "limits": {
                "open_files": _soft_limit(resource.RLIMIT_NOFILE),
                "locked_memory": _soft_limit(resource.RLIMIT_MEMLOCK),
            },
            "infiniband": infiniband(),
            "_tensorflows": tensorflows(),
            "_unmet": unmet_requirements(),
            "_cannot_build": found_horovod.result()[1],
            "_gpu_failure": found_gpus.result().failure,
            "_launched": rank_of(os.environ),
        }


def system() -> dict[str, str]:
    """The operating system, its kernel, processor and C library."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return {
        "system": name,
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
    }


def shared_memory(folder: Path = Path("/dev/shm")) -> dict[str, int] | None:
    """The file system through which processes of a host share memory; ``None`` if missing."""
    if not folder.is_dir():
        return None
    found = os.statvfs(folder)
    return {"size": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def infiniband(devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether this host has InfiniBand."""
    return devices.is_dir() and any(devices.iterdir())


def own_addresses() -> list[str]:
    """The addresses of this host's name; empty if it does not resolve within two seconds."""
    found: list[str] = []

    def resolve() -> None:
        found.extend(map(str, addresses_of(socket.gethostname())))

    # The resolver has no time limit of its own: an unreachable name server takes half a minute.
    resolver = Thread(target=resolve, daemon=True)
    resolver.start()
    resolver.join(_SECONDS_TO_RESOLVE)
    return list(found)


def ssh() -> dict[str, Any]:
    """OpenSSH's client and server."""
    output = run(["ssh", "-V"])
    version = re.match(r"[^\s,]+", output.text) if output else None
    names = (process.info["name"] for process in psutil.process_iter(["name"]))
    return {
        "client": version[0] if version else None,
        "server": shutil.which("sshd") or shutil.which("sshd", path=_SBIN),
        "running": any(name == "sshd" for name in names),
    }


def thread_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The numbers of threads that variables set; ``?`` for a value that is not a number."""
    return {
        name: value if re.fullmatch(r"\d{1,6}(,\d{1,6})*", value) else "?"
        for name in _THREADS
        if (value := environ.get(name)) is not None
    }


def setting_names(environ: Mapping[str, str]) -> list[str]:
    """Names of the other variables that change how ranks start or communicate."""
    return sorted(
        name
        for name in environ
        if (name in _SETTINGS or name.startswith(_PREFIXES)) and name not in _THREADS
    )


def rank_of(environ: Mapping[str, str]) -> str | None:
    """Why hvkit takes this process for a rank; ``None`` if it does not."""
    try:
        found = launched(environ)
    except LaunchError as error:
        return str(error)
    return f"one of {found.size}, started by {found.launcher}" if found else None


def _soft_limit(kind: int) -> int | None:
    value = resource.getrlimit(kind)[0]
    return None if value == resource.RLIM_INFINITY else value
