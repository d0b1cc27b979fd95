"""Slurm: ``SLURM_JOB_NODELIST`` names the hosts.

How many slots each has, by the first of these that is set:

1. ``SLURM_TASKS_PER_NODE``, which follows ``--ntasks`` and ``--ntasks-per-node``: ``2(x3),1``;
2. ``SLURM_GPUS_ON_NODE``, one slot for each GPU, as many on every host as on this one;
3. ``SLURM_JOB_CPUS_PER_NODE``, one slot for each CPU.
"""

import re
from collections.abc import Mapping

from hvkit.errors import HostfileError, LaunchError
from hvkit.launch.allocation.counting import Found, checked, wrong
from hvkit.launch.allocation.nodelist import expanded
from hvkit.launch.hosts import Host, count

NAME = "Slurm"

_NODES = "SLURM_JOB_NODELIST"
_GPUS = "SLURM_GPUS_ON_NODE"
_PER_NODE = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
_TIMES = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def hosts(environ: Mapping[str, str]) -> Found | None:
    """The hosts of the job and the variable that names them; ``None`` outside of Slurm.

    Raises:
        LaunchError: a variable is not what Slurm writes, or the numbers of hosts differ.
    """
    nodelist = environ.get(_NODES)
    if nodelist is None:
        return None
    try:
        names = expanded(nodelist)
    except ValueError as error:
        raise wrong(_NODES, nodelist, f"must be a list such as gpu[01-03,7]; it {error}") from None
    names = [checked(name, _NODES, nodelist) for name in names]
    slots = _slots(environ, len(names))
    return _NODES, tuple(
        Host(name, slots=number) for name, number in zip(names, slots, strict=True)
    )


def _slots(environ: Mapping[str, str], size: int) -> list[int]:
    tasks, cpus = _PER_NODE
    if tasks in environ:
        return _per_node(environ, tasks, size)
    if environ.get(_GPUS, "0") != "0":
        return [_number(environ[_GPUS], _GPUS, environ[_GPUS])] * size
    if cpus in environ:
        return _per_node(environ, cpus, size)
    raise LaunchError(
        f"{_NODES} names hosts, but none of {tasks}, {_GPUS} and {cpus} says how many ranks they "
        "take: submit the job with --ntasks-per-node"
    )


def _per_node(environ: Mapping[str, str], variable: str, size: int) -> list[int]:
    """The numbers of a list such as ``2(x3),1``."""
    value = environ[variable]
    numbers: list[int] = []
    for piece in value.split(","):
        match = _TIMES.fullmatch(piece)
        if match is None:
            raise wrong(variable, value, "must be a list such as 2(x3),1")
        times = _number(match[2] or "1", variable, value)
        numbers += [_number(match[1], variable, value)] * times
    if len(numbers) != size:
        raise wrong(variable, value, f"is for {len(numbers)} hosts, but {_NODES} names {size}")
    return numbers


def _number(text: str, variable: str, value: str) -> int:
    try:
        return count(text, "each number")
    except HostfileError as error:
        raise wrong(variable, value, f"is wrong ({error})") from None
