"""The CPUs of this host, each rank's share, and what a container may use of CPUs and memory."""

import math
import os
import resource
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

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
    return within_limit(len(cores(os.sched_getaffinity(0))), allowance().cpus)


def usable_cpus() -> int:
    """The logical CPUs that this process may use; in a container at most its CPU time limit."""
    return within_limit(len(os.sched_getaffinity(0)), allowance().cpus)


def within_limit(cpus: int, limit: float | None) -> int:
    """The number of CPUs, or the limit of CPU time if that is lower: at least 1.

    Args:
        cpus: the number of CPUs.
        limit: CPU time per wall-clock time, for instance 1.5; ``None`` for no limit.
    """
    return cpus if limit is None else min(cpus, max(1, math.ceil(limit)))


def share(
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
class Allowance:
    """Limits of the control groups of this process; ``None`` where there is none.

    Attributes:
        cpus: CPU time per wall-clock time, for instance 1.5.
        memory: bytes.
    """

    cpus: float | None
    memory: int | None


_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def allowance(root: Path = _ROOT, own: Path = _OWN) -> Allowance:
    """The tightest limits among this process's control groups and their parents, version 1 or 2.

    Args:
        root: the mount point of the control groups.
        own: the file that names those of this process.
    """
    cpus = [limit for folder in _folders(root, own, "cpu") if (limit := _cpus(folder)) is not None]
    memory = [
        limit for folder in _folders(root, own, "memory") if (limit := _memory(folder)) is not None
    ]
    return Allowance(min(cpus, default=None), min(memory, default=None))


def free_memory(root: Path = _ROOT, own: Path = _OWN) -> int:
    """Bytes of memory that are free on this host, and within the limits of its control groups.

    Files in ``/dev/shm`` count as memory in both; the cache of files on disks does not.

    Args:
        root, own: as for ``allowance``.
    """
    left = [
        limit - _used(folder)
        for folder in _folders(root, own, "memory")
        if (limit := _memory(folder)) is not None
    ]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def _used(folder: Path) -> int:
    """What a control group uses, without the cache that Linux drops when memory is short."""
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    numbers = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
    cache = numbers.get("total_inactive_file") or numbers.get("inactive_file") or "0"
    return int(used or 0) - int(cache)


def _folders(root: Path, own: Path, controller: str) -> Iterable[Path]:
    for line in _read(own).splitlines():
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
