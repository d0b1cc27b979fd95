"""Hostfiles written."""

from collections.abc import Sequence

from hvkit.launch.hostfile.option import address, slots_of
from hvkit.launch.hosts import Host


def write_openmpi(hosts: Sequence[Host]) -> str:
    """The hosts as a hostfile of Open MPI; an IPv6 address without brackets, as it wants them."""
    return "".join(f"{_openmpi(host)}\n" for host in hosts)


def write_mpich(hosts: Sequence[Host]) -> str:
    """The hosts as a hostfile of MPICH. It has no ``max_slots``.

    Raises:
        LaunchError: a host has no number of slots.
    """
    return "".join(f"{_mpich(host)}\n" for host in hosts)


def _openmpi(host: Host) -> str:
    words = [f"{host.user}@{host.name}" if host.user else host.name]
    if host.slots is not None:
        words.append(f"slots={host.slots}")
    if host.max_slots is not None:
        words.append(f"max_slots={host.max_slots}")
    return " ".join(words)


def _mpich(host: Host) -> str:
    # With the user before the name, MPICH would take both for the name that ranks connect to.
    user = f" user={host.user}" if host.user else ""
    return f"{address(Host(host.name))}:{slots_of(host)}{user}"
