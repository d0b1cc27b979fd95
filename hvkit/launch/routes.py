"""Which networks join the hosts of a job: arithmetic on what the hosts told about themselves."""

import ipaddress
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

from hvkit.launch.local import addresses_of
from hvkit.launch.network import Interface


def source_address(destination: str) -> str | None:
    """The address of this host that connections to ``destination`` come from.

    Nothing is sent. ``None`` if there is no way there.
    """
    for address in addresses_of(destination):
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((str(address), 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def joining(
    interfaces: Mapping[str, Sequence[Interface]], reached_at: Mapping[str, Sequence[str]]
) -> tuple[Interface, ...]:
    """An interface of each host that the other hosts reach; empty if that is not known.

    The one that has the address under which the host is reached; where that is not the host's
    own, as behind address translation, one in a network that all hosts are in, each with another
    address. Networks that containers have within a host have the same address on every host.

    Args:
        interfaces: of each host.
        reached_at: addresses that each host is reached at, the best first.
    """
    chosen = [
        next((i for at in reached_at[host] for i in _outward(found) if i.address == at), None)
        for host, found in interfaces.items()
    ]
    known = tuple(interface for interface in chosen if interface is not None)
    return known if len(known) == len(chosen) else _common(interfaces)


def _common(interfaces: Mapping[str, Sequence[Interface]]) -> tuple[Interface, ...]:
    outward = {host: _outward(found) for host, found in interfaces.items()}
    times = Counter(i.address for found in outward.values() for i in found)
    own = {host: [i for i in found if times[i.address] == 1] for host, found in outward.items()}
    shared = set.intersection(*({i.network for i in found} for found in own.values()))
    if not shared:
        return ()
    # IPv4 first: older MPIs know no other.
    network = min(shared, key=lambda text: (ipaddress.ip_network(text).version, text))
    return tuple(
        next(interface for interface in found if interface.network == network)
        for found in own.values()
    )


def _outward(interfaces: Sequence[Interface]) -> list[Interface]:
    return [i for i in interfaces if not (i.loopback or i.link_local)]
