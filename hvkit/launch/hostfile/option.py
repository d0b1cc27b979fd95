"""Hosts on a command line: ``-H node1:2,node2:2``, as of mpirun and horovodrun."""

from collections.abc import Sequence

from hvkit.errors import HostfileError, LaunchError
from hvkit.launch.hostfile.entries import Entry
from hvkit.launch.hostfile.words import count, host_word, shown
from hvkit.launch.hosts import Host

_NAME = "-H"


def read_hosts_option(text: str) -> tuple[Entry, ...]:
    """The hosts of such a list as they are named there.

    A host without ``:slots`` is one slot. IPv6 addresses stand in brackets, ``[fd00::1]:2``.

    Raises:
        HostfileError: it is not such a list; the message says which host is wrong.
    """
    return tuple(
        Entry(f"host {number}", _host(word.strip(" "), f"host {number}"))
        for number, word in enumerate(text.split(","), start=1)
    )


def hosts_option(hosts: Sequence[Host]) -> str:
    """The list that stands for ``hosts``; IPv6 addresses in brackets. It has no ``max_slots``.

    Raises:
        LaunchError: a host has no number of slots.
    """
    return ",".join(f"{_address(host)}:{slots_of(host)}" for host in hosts)


def slots_of(host: Host) -> int:
    """The host's slots, where they have to be written.

    Raises:
        LaunchError: the host has none.
    """
    if host.slots is None:
        raise LaunchError(f"{host.name} has no number of slots: add slots=N to it in the hostfile")
    return host.slots


def _address(host: Host) -> str:
    name = f"[{host.name}]" if ":" in host.name else host.name
    return f"{host.user}@{name}" if host.user else name


def _host(word: str, place: str) -> Host:
    try:
        if not word:
            raise HostfileError("is empty: write host:slots between the commas")
        if "=" in word or " " in word:
            raise HostfileError(f"must be host:slots, got {shown(word)}")
        host = host_word(word)
        slots = 1 if host.slots is None else count(host.slots, "slots")
    except HostfileError as error:
        raise HostfileError(f"{_NAME}: {place}: {error}") from None
    return Host(host.name, slots, user=host.user)
