"""Which interfaces join the hosts of a run: no loopback, no container network inside a host."""

import pytest

from hvkit.errors import LaunchError
from hvkit.host.network import Interface
from hvkit.launching.preflight import common_networks, interfaces_between, named_interfaces

LOOPBACK = Interface("lo", "127.0.0.1", "127.0.0.0/8")
DOCKER = Interface("docker0", "172.17.0.1", "172.17.0.0/16")
LINK_LOCAL = Interface("eth0", "169.254.0.1", "169.254.0.0/16")


def host(*own):
    return (LOOPBACK, DOCKER, LINK_LOCAL, *own)


def ethernet(number, name="eth0"):
    return Interface(name, f"10.0.0.{number}", "10.0.0.0/24")


def fabric(number):
    return Interface("ib0", f"192.168.0.{number}", "192.168.0.0/16")


ROUTED = Interface("ens5", "10.9.0.2", "10.9.0.0/24")
ONE, OTHER = ethernet(1), ethernet(2)


@pytest.mark.parametrize(
    ("interfaces", "reached_at", "expected"),
    [
        # The interface with the address that the host is reached at, whatever its name.
        (
            [(ONE, fabric(1)), (OTHER, fabric(2))],
            ["192.168.0.1", "192.168.0.2"],
            (fabric(1), fabric(2)),
        ),
        ([(ONE,), (ROUTED,)], ["10.0.0.1", "10.9.0.2"], (ONE, ROUTED)),
        # With loopback or foreign addresses it is that in the common network.
        ([(ONE,), (OTHER,)], ["127.0.1.1", "203.0.113.9"], (ONE, OTHER)),
        # A network with the same address on two hosts joins nothing.
        ([(), ()], ["172.17.0.1", "x"], ()),
    ],
)
def test_hosts_are_joined_by(interfaces, reached_at, expected):
    by_name = {name: host(*own) for name, own in zip("ab", interfaces, strict=True)}
    assert interfaces_between(by_name, {"a": [reached_at[0]], "b": [reached_at[1]]}) == expected


FAR, FOREIGN, THIRD = (
    Interface("ens5", f"{begin}.2", f"{begin}.0/24") for begin in ("10.0.3", "172.20.0", "10.0.1")
)


@pytest.mark.parametrize(
    ("used", "hosts", "networks"),
    [
        ([ONE, FAR], [host(ONE), host(FAR)], ("10.0.0.0/22",)),
        # Networks that all hosts are in stay as they are.
        (
            [ONE, fabric(2)],
            [host(ONE, fabric(1)), host(OTHER, fabric(2))],
            ("10.0.0.0/24", "192.168.0.0/16"),
        ),
        # A network around hosts must not contain their other interfaces.
        ([ONE, FOREIGN], [host(ONE), host(FOREIGN)], ("10.0.0.0/24", "172.20.0.0/24")),
        ([ONE, FAR], [host(ONE, THIRD), host(FAR)], ("10.0.0.0/24", "10.0.3.0/24")),
    ],
)
def test_hosts_in_different_networks_get_one_network_around_them(used, hosts, networks):
    assert common_networks(used, hosts) == networks


def test_users_name_interfaces_or_networks():
    hosts = {"a": host(ethernet(1), fabric(1)), "b": host(ethernet(2, "ens5"), fabric(2))}
    assert named_interfaces(["eth0", "ens5"], hosts) == (ethernet(1), ethernet(2, "ens5"))
    assert named_interfaces(["192.168.0.0/24"], hosts) == (fabric(1), fabric(2))


@pytest.mark.parametrize("name", ["eth9", "10.9.0.0/24", "10.0.0.0/x"])
def test_an_interface_that_no_host_has_is_refused(name):
    message = rf"--interfaces {name}: no host has it; use one of docker0 \(172.17.0.0/16\), eth0 \("
    with pytest.raises(LaunchError, match=message):
        named_interfaces(["eth0", name], {"a": host(ethernet(1)), "b": host(ethernet(2))})


def test_a_host_without_any_of_the_interfaces_is_refused():
    message = r"--interfaces eth0: b has none of these, it has docker0 .*, ens5 .*: add one of them"
    with pytest.raises(LaunchError, match=message):
        named_interfaces(["eth0"], {"a": host(ethernet(1)), "b": host(ethernet(2, "ens5"))})
