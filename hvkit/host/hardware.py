"""This host's CPUs, GPUs and memory, a container's limits, and what each rank uses of them."""

import csv
import ctypes
import math
import os
import resource
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

from hvkit.errors import LaunchError
from hvkit.host.system import run

_CPUS = Path("/sys/devices/system/cpu")


def cores(cpus: Collection[int], topology: Path = _CPUS) -> list[frozenset[int]]:
    """Group logical CPUs into cores, each with its hardware threads, neighbours side by side.

    If the kernel's folder lacks a CPU, that CPU counts as a core of its own.
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
    """The number of CPUs, or the limit of CPU time if that is lower: at least 1."""
    return cpus if limit is None else min(cpus, max(1, math.ceil(limit)))


def cpus_of_rank(
    cores: Sequence[frozenset[int]], local_rank: int, local_size: int
) -> frozenset[int] | None:
    """The logical CPUs that a rank is bound to; ``None`` for no binding.

    Ranks get neighbouring cores, as evenly as possible. A single rank on a host is not bound, nor
    are more ranks than cores.
    """
    if local_size == 1 or local_size > len(cores):
        return None
    first = local_rank * len(cores) // local_size
    end = (local_rank + 1) * len(cores) // local_size
    return frozenset().union(*cores[first:end])


class CgroupLimits(NamedTuple):
    """Limits of the control groups of this process; ``None`` where there is none."""

    cpus: float | None  # CPU time per wall-clock time, such as 1.5
    memory: int | None  # bytes


# Where control groups are mounted, and the file that names this process's.
_ROOT, _GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroup_limits(root: Path = _ROOT, groups: Path = _GROUPS) -> CgroupLimits:
    """The tightest limits among this process's control groups and their parents, version 1 or 2."""
    cpus = [n for n in map(_cpus, _folders(root, groups, "cpu")) if n is not None]
    memory = [n for n in map(_memory, _folders(root, groups, "memory")) if n is not None]
    return CgroupLimits(min(cpus, default=None), min(memory, default=None))


def free_memory(root: Path = _ROOT, groups: Path = _GROUPS) -> int:
    """Bytes of memory that are free on this host, and within the limits of its control groups.

    Files in ``/dev/shm`` count as memory in both; the cache of files on disks does not.
    """
    left = [
        limit - _used(folder)
        for folder in _folders(root, groups, "memory")
        if (limit := _memory(folder)) is not None
    ]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def _used(folder: Path) -> int:
    """Bytes that a control group uses, without the cache that Linux drops when memory is short."""
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
    numbers = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
    return (used or 0) - int(numbers.get("total_inactive_file", numbers.get("inactive_file", 0)))


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
    return int(quota) / int(period) if quota.isdecimal() and int(period or 0) else None


def _memory(folder: Path) -> int | None:
    return _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")


def _number(file: Path) -> int | None:
    """The number in a file; None also for "max" and -1, which mean no limit."""
    text = _read(file)
    return int(text) if text.isdecimal() else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def threads_of_rank(local_size: int, usable_cpus: int, host_cpus: int, limit: float | None) -> int:
    """CPU threads for one of ``local_size`` ranks on a host, at least 1.

    If the affinity mask has fewer CPUs than the host, the launcher has bound the rank to its part,
    and the rank uses all of it. ``limit`` is the container's, for all of its ranks together.
    """
    cpus = usable_cpus if usable_cpus < host_cpus else max(1, usable_cpus // local_size)
    return within_limit(cpus, None if limit is None else limit / local_size)


def soft_limit(of: int) -> int | None:
    """How much this process may use of what ``resource`` limits; ``None`` for no limit."""
    value = resource.getrlimit(of)[0]
    return None if value == resource.RLIM_INFINITY else value


_MIB = 1024**2
_QUERY = "index,name,memory.total,driver_version"


@dataclass(frozen=True)
class Gpu:
    """A GPU, with its memory in bytes."""

    index: int
    name: str
    memory: int | None
    driver: str


class Gpus(NamedTuple):
    """The report of ``nvidia-smi`` and the driver."""

    found: tuple[Gpu, ...]
    failure: str | None  # the error of an nvidia-smi that fails
    driver_cuda: str | None  # the newest CUDA version that the driver runs


def gpus() -> Gpus:
    """The GPUs of this host; none without nvidia-smi."""
    output = run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
    if output is None:
        return Gpus((), None, None)
    if output.status != 0:
        text = "it gave no answer" if output.status is None else output.text
        return Gpus((), next(iter(text.splitlines()), "nothing"), None)
    rows = csv.reader(output.stdout.splitlines(), skipinitialspace=True)
    found = tuple(
        # nvidia-smi prints [N/A] for GPUs that share the host's memory.
        Gpu(int(index), name, int(memory) * _MIB if memory.isdecimal() else None, driver)
        for index, name, memory, driver in (row for row in rows if len(row) == 4)
        if index.isdecimal()
    )
    return Gpus(found, None, _driver_cuda())


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs of this host ranks with this environment may use.

    CUDA_VISIBLE_DEVICES lists numbers, or names of GPUs and of parts of them; CUDA reads it up to
    the first that does not exist.
    """
    found = len(gpus().found)
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not found:
        return found

    def exists(word: str) -> bool:
        return int(word) < found if word.isdecimal() else word.startswith(("GPU-", "MIG-"))

    return len(list(takewhile(exists, map(str.strip, listed.split(",")))))


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
    """
    if visible_gpus <= 1:
        return 0 if visible_gpus else None
    if local_size > visible_gpus:
        raise LaunchError(
            f"{local_size} ranks on a host with {visible_gpus} GPUs: start at most {visible_gpus} "
            "ranks there (slots in the hostfile), or hide the GPUs: CUDA_VISIBLE_DEVICES= "
            "(`hvkit run -x CUDA_VISIBLE_DEVICES=`)"
        )
    return local_rank
