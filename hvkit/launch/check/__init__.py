"""Whether hosts are ready for ranks: each examines itself, and all try to reach each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from hvkit.launch.check.asking import Examined, examine
from hvkit.launch.check.meeting import Met, meet
from hvkit.launch.check.problems import Problem, problems
from hvkit.launch.hosts import Host
from hvkit.launch.shells import shell_of

__all__ = ["Checked", "Problem", "check"]


@dataclass(frozen=True)
class Checked:
    """What was found out about hosts.

    Attributes:
        examined: what each host told about itself, in the order of the hosts.
        interfaces: by host, the interface over which it reached others; hosts that reached none
            are not in it.
        problems: what is wrong.
    """

    examined: tuple[Examined, ...]
    interfaces: dict[str, str]
    problems: tuple[Problem, ...]


def check(hosts: Sequence[Host], system: str | None = None) -> Checked:
    """Examine every host, and try the way between every two of them. It takes up to minutes.

    Args:
        hosts: all of them.
        system: the batch system that gave the hosts, as in ``Allocation``.
    """
    shell = shell_of(system)
    examined = examine(hosts, shell)
    there = [one.host for one in examined if one.facts is not None]
    met = meet(there, shell) if len(there) > 1 else Met()
    interfaces = {
        reach.source: f"{reach.interface} {reach.own_address}"
        for reach in reversed(met.reaches)
        if reach.interface is not None
    }
    return Checked(tuple(examined), interfaces, tuple(problems(examined, met)))
