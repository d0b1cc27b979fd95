"""This host's CPUs, GPUs and memory, a container's limits, and what each rank uses of them."""

import csv
import ctypes
import math
import os
import resource
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from hvkit.errors import LaunchError
from hvkit.host.system import run

_CPUS = Path("/sys/devices/system/cpu")


def cores(cpus: Collection[int], topology: Path = _CPUS) -> list[frozenset[int]]:
    """Group logical CPUs into cores, each with its hardware threads, neighbours side by side.

    If the kernel's folder lacks a CPU, that CPU counts as a core of its own.

    Args:
        cpus: numbers of logical CPUs.
        topology: the kernel's folder that describes them.
    """
    found: dict[tuple[int, int, int], set[int]] = {}
    for cpu in sorted(cpus):
        folder = topology / f"cpu{cpu}" / "topology"
        package, die = (_number(folder / f"{level}_id") for level in ("physical_package", "die"))
        core = _number(folder / "core_id")
        key = (package or 0, die or 0, cpu if core is None else core)
        found.setdefault(key, set()).add(cpu)
    return [frozenset(found[key]) for key in sorted(found)]


def usable_cores() -> int:
    """The cores that this process may use; in a container at most its CPU time limit."""
    return within_limit(len(cores(os.sched_getaffinity(0))), cgroup_limits().cpus)


def usable_cpus() -> int:
    """The logical CPUs that this process may use; in a container at most its CPU time limit."""
    return within_limit(len(os.sched_getaffinity(0)), cgroup_limits().cpus)


def within_limit(cpus: int, limit: float | None) -> int:
    """The number of CPUs, or the limit of CPU time if that is lower: at least 1.

    Args:
        cpus: the number of CPUs.
        limit: CPU time per wall-clock time, for instance 1.5; ``None`` for no limit.
    """
    return cpus if limit is None else min(cpus, max(1, math.ceil(limit)))


def cpus_of_rank(
    cores: Sequence[frozenset[int]], local_rank: int, local_size: int
) -> frozenset[int] | None:
    """The logical CPUs that a rank is bound to; ``None`` for no binding.

    Ranks get neighbouring cores, as evenly as possible. A single rank on a host is not bound, nor
    are more ranks than cores.

    Args:
        cores: the host's cores, from ``cores``.
        local_rank: the rank's number on its host.
        local_size: the number of ranks on that host.
    """
    if local_size == 1 or local_size > len(cores):
        return None
    first = local_rank * len(cores) // local_size
    end = (local_rank + 1) * len(cores) // local_size
    return frozenset().union(*cores[first:end])


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of the control groups of this process; ``None`` where there is none.

    Attributes:
        cpus: CPU time per wall-clock time, for instance 1.5.
        memory: bytes.
    """

    cpus: float | None
    memory: int | None


_ROOT, _GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroup_limits(root: Path = _ROOT, groups: Path = _GROUPS) -> CgroupLimits:
    """The tightest limits among this process's control groups and their parents, version 1 or 2.

    Args:
        root: the mount point of the control groups.
        groups: the file that names this process's control groups.
    """
    cpus = [n for n in map(_cpus, _folders(root, groups, "cpu")) if n is not None]
    memory = [n for n in map(_memory, _folders(root, groups, "memory")) if n is not None]
    return CgroupLimits(min(cpus, default=None), min(memory, default=None))


def free_memory(root: Path = _ROOT, groups: Path = _GROUPS) -> int:
    """Bytes of memory that are free on this host, and within the limits of its control groups.

    Files in ``/dev/shm`` count as memory in both; the cache of files on disks does not.

    Args:
        root, groups: as for ``cgroup_limits``.
    """
    left = [
        limit - _used(folder)
        for folder in _folders(root, groups, "memory")
        if (limit := _memory(folder)) is not None
    ]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def _used(folder: Path) -> int:
    """Bytes that a control group uses, without the cache that Linux drops when memory is short."""
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    numbers = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
    cache = numbers.get("total_inactive_file") or numbers.get("inactive_file") or "0"
    return int(used or 0) - int(cache)


def _folders(root: Path, groups: Path, controller: str) -> Iterable[Path]:
    for line in _read(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        # In a container this may be the path outside of it; the root is its own group then.
        group = PurePosixPath(path.lstrip("/"))
        for each in (group, *group.parents):
            yield top / each


def _cpus(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    # "max" and -1 mean no limit.
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _memory(folder: Path) -> int | None:
    limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    return int(limit) if limit.isdecimal() else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def threads_of_rank(local_size: int, usable_cpus: int, host_cpus: int, limit: float | None) -> int:
    """CPU threads for one of ``local_size`` ranks on a host, at least 1.

    Args:
        local_size: the number of ranks on this host.
        usable_cpus: the size of this process's affinity mask. If that is less than the host's
            CPUs, the launcher has bound the rank to its share, and the rank uses all of it.
        host_cpus: the number of the host's CPUs.
        limit: the container's limit for all ranks of this host together, in CPUs, for instance
            1.5; ``None`` for no limit.
    """
    share = usable_cpus if usable_cpus < host_cpus else max(1, usable_cpus // local_size)
    return within_limit(share, None if limit is None else limit / local_size)


def soft_limit(of: int) -> int | None:
    """How much this process may use of what ``resource`` limits, such as RLIMIT_NOFILE.

    ``None`` for no limit.
    """
    value = resource.getrlimit(of)[0]
    return None if value == resource.RLIM_INFINITY else value


_MIB = 1024**2
_QUERY = "index,name,memory.total,driver_version"


@dataclass(frozen=True)
class Gpu:
    """A GPU: its number, name, memory in bytes (``None`` if unknown) and driver version."""

    index: int
    name: str
    memory: int | None
    driver: str


@dataclass(frozen=True)
class Gpus:
    """The report of ``nvidia-smi`` and the driver.

    Attributes:
        found: the GPUs.
        failure: the error of an nvidia-smi that fails; ``None`` if it works or is not installed.
        driver_cuda: the newest CUDA version that the driver runs; ``None`` without a driver.
    """

    found: tuple[Gpu, ...]
    failure: str | None
    driver_cuda: str | None


def gpus() -> Gpus:
    """The GPUs of this host; none without nvidia-smi."""
    output = run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
    if output is None:
        return Gpus((), None, None)
    if output.status != 0:
        text = "it gave no answer" if output.status is None else output.text
        return Gpus((), next(iter(text.splitlines()), "nothing"), None)
    return Gpus(read_query(output.stdout), None, _driver_cuda())


def read_query(text: str) -> tuple[Gpu, ...]:
    """The GPUs in nvidia-smi's output."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == 4]
    return tuple(
        # nvidia-smi prints [N/A] for GPUs that share the host's memory.
        Gpu(int(index), name, int(memory) * _MIB if memory.isdecimal() else None, driver)
        for index, name, memory, driver in rows
        if index.isdecimal()
    )


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs of this host ranks with this environment may use.

    Args:
        environ: with ``CUDA_VISIBLE_DEVICES``, CUDA's list: numbers, or names of GPUs and of parts
            of them; it ends before the first that does not exist.
    """
    found = len(gpus().found)
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not found:
        return found
    visible = 0
    for word in map(str.strip, listed.split(",")):
        exists = int(word) < found if word.isdecimal() else word.startswith(("GPU-", "MIG-"))
        if not exists:
            break
        visible += 1
    return visible


def _driver_cuda() -> str | None:
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    # 12080 is 12.8.
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if status == 0 else None


def gpu_of_rank(local_rank: int, local_size: int, visible_gpus: int) -> int | None:
    """Index of the GPU for this rank, or None on a host without GPUs.

    If the launcher shows each rank a single GPU (``CUDA_VISIBLE_DEVICES``, Slurm's
    ``--gpus-per-task``), the rank takes that one.

    Raises:
        LaunchError: the host has several GPUs, but fewer than ranks.
    """
    if visible_gpus == 0:
        return None
    if visible_gpus == 1:
        return 0
    if local_size > visible_gpus:
        raise LaunchError(
            f"{local_size} ranks on a host with {visible_gpus} GPUs: start at most {visible_gpus} "
            "ranks there (slots in the hostfile), or hide the GPUs: CUDA_VISIBLE_DEVICES= "
            "(`hvkit run -x CUDA_VISIBLE_DEVICES=`)"
        )
    return local_rank
