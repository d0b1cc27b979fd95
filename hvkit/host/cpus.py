"""The CPUs of this host: its cores, what a container may use of them, and each rank's share."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_CPUS = Path("/sys/devices/system/cpu")


def cores(cpus: Collection[int], topology: Path = _CPUS) -> list[frozenset[int]]:
    """The cores among logical CPUs, each with its hardware threads, neighbours side by side.

    Where the kernel does not tell, each logical CPU is a core.

    Args:
        cpus: numbers of logical CPUs.
        topology: the kernel's folder about them.
    """
    found: dict[tuple[int, int, int], set[int]] = {}
    for cpu in sorted(cpus):
        place = topology / f"cpu{cpu}" / "topology"
        package, die = (_number(place / f"{level}_id") for level in ("physical_package", "die"))
        core = _number(place / "core_id")
        key = (package or 0, die or 0, cpu if core is None else core)
        found.setdefault(key, set()).add(cpu)
    return [frozenset(found[key]) for key in sorted(found)]


def share(
    cores: Sequence[frozenset[int]], local_rank: int, local_size: int
) -> frozenset[int] | None:
    """The logical CPUs of one of the ranks of a host; ``None`` for no binding.

    Ranks get neighbouring cores, as equally many as can be. There is no binding where a rank has
    the host for itself, or where there are more ranks than cores.

    Args:
        cores: the host's cores, as :func:`cores` gives them.
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
        cpus: time of so many CPUs, for instance 1.5.
        memory: bytes.
    """

    cpus: float | None
    memory: int | None


def allowance(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Allowance:
    """The tightest limits of this process's control group and those above it, version 1 or 2.

    Args:
        root: where control groups are mounted.
        own: the file that names those of this process.
    """
    cpus = [limit for folder in _folders(root, own, "cpu") if (limit := _cpus(folder)) is not None]
    memory = [
        limit for folder in _folders(root, own, "memory") if (limit := _memory(folder)) is not None
    ]
    return Allowance(min(cpus, default=None), min(memory, default=None))


def _folders(root: Path, own: Path, controller: str) -> Iterable[Path]:
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        # Inside of a container the path may be that outside: the root is its own group then.
        group = PurePosixPath(path.lstrip("/"))
        for place in (group, *group.parents):
            yield top / place


def _cpus(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    # Without a limit they say "max" and -1.
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
        usable_cpus: the size of this process's affinity mask. If it is smaller than the host, the
            launcher has bound the rank to its share already and all of it is used.
        host_cpus: the number of the host's CPUs.
        limit: time of so many CPUs that the ranks of this host have together, as containers are
            given it, for instance 1.5; ``None`` for all of it.
    """
    share = usable_cpus if usable_cpus < host_cpus else max(1, usable_cpus // local_size)
    return share if limit is None else min(share, max(1, math.ceil(limit / local_size)))
