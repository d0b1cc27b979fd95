"""Hosts written for each launcher."""

from collections.abc import Sequence

from hvkit.errors import LaunchError
from hvkit.launch.hostfile.option import hosts_option, slots_of
from hvkit.launch.hosts import Host


def write_openmpi(hosts: Sequence[Host]) -> str:
    """The hosts as a hostfile of Open MPI; an IPv6 address without brackets, as it wants them."""
    return "".join(f"{_openmpi(host)}\n" for host in hosts)


def write_mpich(hosts: Sequence[Host]) -> str:
    """The hosts as a hostfile of MPICH. It has no ``max_slots``.

    Raises:
        LaunchError: a host has no number of slots, or is an IPv6 address, which MPICH cuts at
            its first colon.
    """
    _refuse_ipv6(hosts, "MPICH")
    return "".join(f"{_mpich(host)}\n" for host in hosts)


def write_horovodrun(hosts: Sequence[Host]) -> str:
    """The hosts as a line for ``horovodrun -H``. It has no ``max_slots``.

    Raises:
        LaunchError: a host has no number of slots, is an IPv6 address, or has a user.
    """
    _refuse_ipv6(hosts, "horovodrun")
    for host in hosts:
        if host.user is not None:
            raise LaunchError(
                f"horovodrun does not take {host.user}@{host.name}: set User for {host.name} in "
                "~/.ssh/config and leave the user out"
            )
    return f"{hosts_option(hosts)}\n"


def _refuse_ipv6(hosts: Sequence[Host], launcher: str) -> None:
    for host in hosts:
        if ":" in host.name:
            raise LaunchError(
                f"{launcher} takes no IPv6 addresses, got {host.name}: name the host instead"
            )


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
    return f"{host.name}:{slots_of(host)}{user}"
