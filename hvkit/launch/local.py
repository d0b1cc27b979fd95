"""Which names mean this host."""

import ipaddress
import socket

from hvkit.launch.network import interfaces


def is_local(name: str) -> bool:
    """Whether a host's name or address is this host.

    A name is this host's if it is the hostname, in full or up to the first dot, or if one of its
    addresses is that of an interface here. A name that does not resolve is not.
    """
    if name.lower() in _own_names():
        return True
    own = {ipaddress.ip_address(interface.address) for interface in interfaces()}
    return any(address in own or address.is_loopback for address in addresses_of(name))


def addresses_of(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses that a name has here, those of IPv4 first; empty if it has none.

    MPI is built without IPv6 almost everywhere.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # The zone of a link-local address is this host's own and tells nothing about the name.
    texts = (str(entry[4][0]).partition("%")[0] for entry in found)
    addresses = dict.fromkeys(ipaddress.ip_address(text) for text in texts)
    return sorted(addresses, key=lambda address: address.version)


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0], "localhost"}
