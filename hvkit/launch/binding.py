"""Which cores of its host a rank keeps to."""

from collections.abc import Collection, Sequence
from pathlib import Path

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
