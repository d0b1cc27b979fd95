"""The hosts' addresses, and the bridge that joins them."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from rig.errors import RigError
from rig.files import File
from rig.namespaces import Namespaces

_NETWORK = ipaddress.ip_network("10.77.0.0/24")
_NETWORK6 = ipaddress.ip_network("fd77::/64")
# What Docker's bridge has on every machine: an address that leads to no other host.
_DOCKER = "172.17.0.1/16"
# A whole packet as the kernel segments it, and some.
_BURST = "128kb"


@dataclass(frozen=True)
class Addresses:
    """The addresses of a host's ``eth0``; ``six`` is ``None`` where IPv6 was not asked for."""

    four: str
    six: str | None

    @property
    def all(self) -> list[str]:
        """Both, IPv4 first."""
        return [self.four] if self.six is None else [self.four, self.six]


def addresses(number: int, ipv6: bool) -> Addresses:
    """The addresses of host number 1, 2, ..."""
    return Addresses(str(_NETWORK[number]), str(_NETWORK6[number]) if ipv6 else None)


def files(addresses: Mapping[str, Addresses]) -> dict[str, File]:
    """The files by which a host finds these, and nobody else, by name."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    lines += [f"{address} {name}" for name, both in addresses.items() for address in both.all]
    return {"/etc/hosts": File("\n".join(lines) + "\n"), "/etc/resolv.conf": File("")}


def make_bridge(switch: Namespaces) -> None:
    """Make the bridge that hosts are plugged into."""
    _ip(switch, "link add rig type bridge", "link set rig addrgenmode none up", "link set lo up")


def plug_in(switch: Namespaces, host: Namespaces, number: int, addresses: Addresses) -> None:
    """Give a host its ``eth0`` and plug that into the bridge's port of this number."""
    _ip(
        switch,
        f"link add port{number} type veth peer name eth0 netns {host.pid}",
        f"link set port{number} master rig addrgenmode none up",
    )
    _ip(
        host,
        "link set lo up",
        "link set eth0 up",
        f"address add {addresses.four}/{_NETWORK.prefixlen} brd + dev eth0",
    )
    if addresses.six is not None:
        _ip(host, f"address add {addresses.six}/{_NETWORK6.prefixlen} dev eth0 nodad")


def add_docker0(switch: Namespaces, host: Namespaces, number: int) -> None:
    """Give a host a ``docker0`` that is up, as if a container ran there."""
    _ip(
        host,
        "link add docker0 type bridge",
        f"link add veth0 type veth peer name container{number} netns {switch.pid}",
        "link set veth0 master docker0 addrgenmode none up",
        "link set docker0 up",
        f"address add {_DOCKER} brd + dev docker0",
    )
    _ip(switch, f"link set container{number} addrgenmode none up")


def set_port(switch: Namespaces, number: int, forwards: bool) -> None:
    """Let a port of the bridge forward packets, or drop them while the link stays up."""
    state = "3" if forwards else "0"
    switch.call_on_network(["bridge", "link", "set", "dev", f"port{number}", "state", state])


def shape(
    switch: Namespaces, host: Namespaces, number: int, bandwidth: str | None, delay: str | None
) -> None:
    """Limit what a host sends and what it receives, each, and make both later.

    Args:
        switch: holds the bridge.
        host: the host.
        number: its port.
        bandwidth: as ``tc`` writes it, ``100mbit``; ``None`` for no limit.
        delay: of each packet, on the way out and on the way in, as ``tc`` writes it, ``5ms``.

    Raises:
        RigError: the kernel cannot, or a value is not one.
    """
    for end, device in ((host, "eth0"), (switch, f"port{number}")):
        _tc(end, device, "root", "noqueue")
        parent = "root"
        if bandwidth is not None:
            limit = ["tbf", "rate", bandwidth, "burst", _BURST, "latency", "100ms"]
            _tc(end, device, "root", "handle", "1:", *limit)
            parent = "parent 1:1"
        if delay is not None:
            _tc(end, device, *parent.split(), "handle", "2:", "netem", "delay", delay)


def _ip(inside: Namespaces, *lines: str) -> None:
    inside.call_on_network(["ip", "-batch", "-"], "\n".join(lines))


def _tc(inside: Namespaces, device: str, *discipline: str) -> None:
    try:
        inside.call_on_network(["tc", "qdisc", "replace", "dev", device, *discipline])
    except RigError as error:
        if "qdisc kind is unknown" not in str(error):
            raise
        kind = "netem" if "netem" in discipline else "tbf"
        what = "a delay" if kind == "netem" else "a limit to bandwidth"
        raise RigError(
            f"this kernel has no sch_{kind} (CONFIG_NET_SCH_{kind.upper()}), which {what} needs"
        ) from None
