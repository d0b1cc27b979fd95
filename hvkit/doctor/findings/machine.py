"""Memory, cores and limits that are too tight for ranks."""

import math
import re
from collections.abc import Iterator

from hvkit.doctor.facts import Facts
from hvkit.doctor.findings.finding import Finding, note, problem
from hvkit.doctor.machine import Limits, SharedMemory

_MIB = 1024**2
_SMALL_SHARED_MEMORY = 256 * _MIB
_LITTLE_FREE = 64 * _MIB
_MEMORY_OF_A_RANK = 1024 * _MIB
_FEW_FILES = 1024


def machine_findings(facts: Facts) -> Iterator[Finding]:
    """What this host, or the container, does not give."""
    yield from _shared_memory(facts.shared_memory)
    yield from _cores(facts)
    yield from _limits(facts.limits)
    if facts.memory.available < _MEMORY_OF_A_RANK:
        yield note(
            f"only {facts.memory.available / _MIB:.0f} MiB of memory are free; each rank takes "
            "about 1 GiB before it has any data",
            "end what else runs here, or raise the container's memory limit",
        )


def _shared_memory(found: SharedMemory | None) -> Iterator[Finding]:
    fix = (
        "Docker: `--shm-size=2g` or `--ipc=host`; Kubernetes: an emptyDir with `medium: Memory` at "
        "/dev/shm; elsewhere as root: `mount -o remount,size=2g /dev/shm`"
    )
    use = "ranks and data loaders pass data through it and die of a bus error where it is full"
    if found is None:
        yield problem(f"there is no /dev/shm; {use}", fix)
    elif found.size < _SMALL_SHARED_MEMORY:
        yield problem(f"/dev/shm holds only {found.size / _MIB:.0f} MiB; {use}", fix)
    elif found.free < _LITTLE_FREE:
        yield problem(
            f"/dev/shm is full: {found.free / _MIB:.0f} of {found.size / _MIB:.0f} MiB are free; "
            f"{use}",
            "remove what runs that were killed left in /dev/shm",
        )


def _cores(facts: Facts) -> Iterator[Finding]:
    cpus = facts.cores.usable
    if facts.cores.limit is not None:
        # What a container has the time of; it may see more.
        cpus = min(cpus, max(1, math.ceil(facts.cores.limit)))
    for name, value in facts.threads.items():
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", value):
            yield note(
                f"{name} is set, but not to a positive number", f"set it to one, or `unset {name}`"
            )
        elif int(value.partition(",")[0]) > cpus:
            yield note(
                f"{name}={value} is more than the {cpus} cores that can be used",
                f"`unset {name}`: hvkit then gives each rank its share",
            )


def _limits(limits: Limits) -> Iterator[Finding]:
    if limits.infiniband and limits.locked_memory is not None:
        yield problem(
            f"a process may lock only {limits.locked_memory / 1024:.0f} KiB of memory, and "
            "InfiniBand, which this host has, needs to lock all that it sends",
            "`ulimit -l unlimited`; for good, `memlock unlimited` in /etc/security/limits.conf, "
            "and LimitMEMLOCK=infinity for the batch system's daemon",
        )
    if limits.open_files is not None and limits.open_files < _FEW_FILES:
        yield note(
            f"a process may open only {limits.open_files} files; data loaders and connections "
            "between many ranks need more",
            "`ulimit -n 4096`",
        )
