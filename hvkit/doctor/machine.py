"""System, cores, memory and limits of this host, as this process sees them."""

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvkit.build.builder import free_memory
from hvkit.host.cpus import allowance


@dataclass(frozen=True)
class System:
    """The operating system, its kernel, processor and C library."""

    system: str
    kernel: str
    machine: str
    libc: str


@dataclass(frozen=True)
class Cores:
    """Logical CPUs.

    Attributes:
        usable: those that this process may run on.
        host: those of the host.
        limit: the time of so many that the container or batch system grants; ``None`` for all.
    """

    usable: int
    host: int
    limit: float | None


@dataclass(frozen=True)
class Memory:
    """Bytes of memory that this process may use, and of those the ones that are free."""

    total: int
    available: int


@dataclass(frozen=True)
class SharedMemory:
    """Bytes that /dev/shm holds, and of those the ones that are free."""

    size: int
    free: int


@dataclass(frozen=True)
class Limits:
    """Limits of a process; ``None`` for no limit.

    Attributes:
        open_files: files open at once.
        locked_memory: bytes kept from being swapped, which InfiniBand needs.
        infiniband: whether this host has InfiniBand.
    """

    open_files: int | None
    locked_memory: int | None
    infiniband: bool


def system() -> System:
    """What runs here."""
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
    """The memory file system that processes of a host share data in; ``None`` if there is none."""
    if not folder.is_dir():
        return None
    found = os.statvfs(folder)
    return SharedMemory(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def limits(devices: Path = Path("/sys/class/infiniband")) -> Limits:
    """The limits that matter to ranks."""
    return Limits(
        open_files=_soft(resource.RLIMIT_NOFILE),
        locked_memory=_soft(resource.RLIMIT_MEMLOCK),
        infiniband=devices.is_dir() and any(devices.iterdir()),
    )


def _soft(kind: int) -> int | None:
    value = resource.getrlimit(kind)[0]
    return None if value == resource.RLIM_INFINITY else value
