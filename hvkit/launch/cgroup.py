"""What the container or batch system lets this process have."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


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
