"""What is to be started, and where: the same for every launcher."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvkit.errors import LaunchError
from hvkit.launch.hosts import Host


@dataclass(frozen=True)
class Job:
    """Ranks, the hosts that they run on and what they run.

    Attributes:
        hosts: the hosts that get ranks, in the order of ranks; ``slots`` is how many each gets.
        command: what every rank runs.
        forwarded: names of the environment variables that all ranks get from the launcher's.
        networks: the networks between the hosts, ``10.0.0.0/24``; empty where the launcher is to
            choose, as on one host.
        interfaces: the names of the interfaces in these networks.
        daemon_networks: the networks for the launcher's own connections, which also lead to the
            host that it is started on.
        networks_asked_for: whether the user has named the networks or interfaces.
        environ: the launcher's environment.
        crowded: whether a host has more ranks than cores.
    """

    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    forwarded: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    daemon_networks: tuple[str, ...] = ()
    networks_asked_for: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    crowded: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(host.slots or 0 for host in self.hosts)


def placed(hosts: Sequence[Host], size: int | None) -> tuple[Host, ...]:
    """The hosts that get ranks, each with as many slots as it gets ranks.

    Ranks fill the slots of a host before they go to the next, as with mpirun.

    Args:
        hosts: where ranks may run; each with its number of slots.
        size: how many ranks; ``None`` for one in each slot.

    Raises:
        LaunchError: there are fewer slots than ranks.
    """
    slots = sum(host.slots or 0 for host in hosts)
    left = slots if size is None else size
    if left > slots:
        listed = ", ".join(f"{host.name} {host.slots}" for host in hosts)
        raise LaunchError(
            f"-np {left} is more than the {slots} slots of the hosts ({listed}): start at most "
            f"-np {slots}, or give more slots"
        )
    chosen: list[Host] = []
    for host in hosts:
        ranks = min(host.slots or 0, left)
        if ranks:
            chosen.append(replace(host, slots=ranks))
        left -= ranks
    return tuple(chosen)
