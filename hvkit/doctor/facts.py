"""The state of this host and this Python, without judgement: ``hvkit.doctor.findings`` judges.

Of environment variables, facts hold names only, never values. The only values are numbers of
threads.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import psutil

from hvkit.doctor.horovod import Horovod, horovod
from hvkit.doctor.software import MpiLauncher, Packages, compilers, mpi_launchers_here, packages
from hvkit.errors import LaunchError
from hvkit.host.commands import run
from hvkit.host.cpus import allowance, free_memory
from hvkit.host.gpus import Gpus, gpus
from hvkit.host.launcher_variables import launched
from hvkit.host.network import Interface, addresses_of, interfaces
from hvkit.host.rank_settings import RankSetting, rank_settings

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


@dataclass(frozen=True)
class Facts:
    """The state of this host and this Python.

    Attributes:
        python: the interpreter.
        addresses: the addresses of the hostname.
        threads: numbers of threads that environment variables set.
        environment: names of other variables that change how ranks run.
        set_by_ranks: what ranks started here set themselves.
        launched: why hvkit takes this process for a rank; ``None`` if it does not.
    """

    hostname: str
    python: str
    system: System
    packages: Packages
    horovod: Horovod
    launchers: tuple[MpiLauncher, ...]
    compilers: dict[str, str | None]
    cores: Cores
    memory: Memory
    shared_memory: SharedMemory | None
    limits: Limits
    gpus: Gpus
    addresses: tuple[str, ...]
    interfaces: tuple[Interface, ...]
    ssh: Ssh
    threads: dict[str, str]
    environment: tuple[str, ...]
    set_by_ranks: tuple[RankSetting, ...]
    launched: str | None


@dataclass(frozen=True)
class System:
    """The operating system, its kernel, processor and C library."""

    system: str
    kernel: str
    machine: str
    libc: str


@dataclass(frozen=True)
class Cores:
    """Numbers of logical CPUs.

    Attributes:
        usable: those that this process may run on.
        host: all of the host's.
        limit: the CPU time that the container or batch system grants, as a number of CPUs;
            ``None`` without a limit.
    """

    usable: int
    host: int
    limit: float | None


@dataclass(frozen=True)
class Memory:
    """Bytes of memory that this process may use, and how many of them are free."""

    total: int
    available: int


@dataclass(frozen=True)
class SharedMemory:
    """Size of /dev/shm in bytes, and how many of them are free."""

    size: int
    free: int


@dataclass(frozen=True)
class Limits:
    """Limits of a process; ``None`` for no limit.

    Attributes:
        open_files: files open at once.
        locked_memory: bytes locked into memory, which InfiniBand needs.
        infiniband: whether this host has InfiniBand.
    """

    open_files: int | None
    locked_memory: int | None
    infiniband: bool


@dataclass(frozen=True)
class Ssh:
    """OpenSSH on this host.

    Attributes:
        client: its version; ``None`` if there is none.
        server: the path of sshd; ``None`` if it is not installed.
        running: whether an sshd runs.
    """

    client: str | None
    server: str | None
    running: bool


def gather() -> Facts:
    """Collect all facts; the slow ones, which start programs, in parallel."""
    with ThreadPoolExecutor() as pool:
        found_horovod = pool.submit(horovod)
        found_gpus = pool.submit(gpus)
        found_launchers = pool.submit(mpi_launchers_here)
        found_compilers = pool.submit(compilers)
        found_addresses = pool.submit(own_addresses)
        found_ssh = pool.submit(ssh)
        return Facts(
            hostname=socket.gethostname(),
            python=sys.executable,
            system=system(),
            packages=packages(),
            horovod=found_horovod.result(),
            launchers=found_launchers.result(),
            compilers=found_compilers.result(),
            cores=cores(),
            memory=memory(),
            shared_memory=shared_memory(),
            limits=limits(),
            gpus=found_gpus.result(),
            addresses=found_addresses.result(),
            interfaces=tuple(interfaces()),
            ssh=found_ssh.result(),
            threads=thread_settings(os.environ),
            environment=setting_names(os.environ),
            set_by_ranks=tuple(rank_settings(os.environ)),
            launched=rank_of(os.environ),
        )


def system() -> System:
    """The operating system."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    kernel = f"{platform.system()} {platform.release()}"
    return System(name, kernel, platform.machine(), " ".join(platform.libc_ver()))


def cores() -> Cores:
    """The logical CPUs."""
    return Cores(len(os.sched_getaffinity(0)), os.cpu_count() or 1, allowance().cpus)


def memory() -> Memory:
    """The memory."""
    total = int(psutil.virtual_memory().total)
    return Memory(min(total, allowance().memory or total), free_memory())


def shared_memory(folder: Path = Path("/dev/shm")) -> SharedMemory | None:
    """The file system through which processes of a host share memory; ``None`` if missing."""
    if not folder.is_dir():
        return None
    found = os.statvfs(folder)
    return SharedMemory(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def limits(devices: Path = Path("/sys/class/infiniband")) -> Limits:
    """The limits that matter to ranks."""
    return Limits(
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        locked_memory=_soft_limit(resource.RLIMIT_MEMLOCK),
        infiniband=devices.is_dir() and any(devices.iterdir()),
    )


def own_addresses() -> tuple[str, ...]:
    """The addresses of this host's name; empty if it does not resolve within two seconds."""
    found: list[str] = []

    def resolve() -> None:
        found.extend(map(str, addresses_of(socket.gethostname())))

    # The resolver has no time limit of its own: an unreachable name server takes half a minute.
    resolver = Thread(target=resolve, daemon=True)
    resolver.start()
    resolver.join(_SECONDS_TO_RESOLVE)
    return tuple(found)


def ssh() -> Ssh:
    """OpenSSH's client and server."""
    output = run(["ssh", "-V"])
    version = re.match(r"[^\s,]+", output.text) if output else None
    server = shutil.which("sshd") or shutil.which("sshd", path=_SBIN)
    names = (process.info["name"] for process in psutil.process_iter(["name"]))
    return Ssh(version[0] if version else None, server, any(name == "sshd" for name in names))


def thread_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The numbers of threads that variables set; ``?`` for a value that is not a number."""
    return {
        name: value if re.fullmatch(r"\d{1,6}(,\d{1,6})*", value) else "?"
        for name in _THREADS
        if (value := environ.get(name)) is not None
    }


def setting_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the other variables that change how ranks start or communicate."""
    return tuple(
        sorted(
            name
            for name in environ
            if (name in _SETTINGS or name.startswith(_PREFIXES)) and name not in _THREADS
        )
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
