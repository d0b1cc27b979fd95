"""Which interfaces join the hosts: never loopback, nor a container network inside a host."""

import pytest

from hvkit.errors import LaunchError
from hvkit.host.network import Interface
from hvkit.launching.host_checks.routes import joining, named, source_address, spanning

LOOPBACK = Interface("lo", "127.0.0.1", "127.0.0.0/8")
DOCKER = Interface("docker0", "172.17.0.1", "172.17.0.0/16")
LINK_LOCAL = Interface("eth0", "fe80::1", "fe80::/64")


def host(*own):
    return (LOOPBACK, DOCKER, LINK_LOCAL, *own)


def ethernet(number, name="eth0"):
    return Interface(name, f"10.0.0.{number}", "10.0.0.0/24")


def fabric(number):
    return Interface("ib0", f"192.168.0.{number}", "192.168.0.0/16")


def test_a_host_is_joined_by_the_interface_with_the_address_it_is_reached_at():
    interfaces = {"a": host(ethernet(1), fabric(1)), "b": host(ethernet(2), fabric(2))}
    reached_at = {"a": ["192.168.0.1"], "b": ["192.168.0.2"]}
    assert joining(interfaces, reached_at) == (fabric(1), fabric(2))


def test_interfaces_may_have_other_names_and_networks_on_each_host():
    routed = Interface("ens5", "10.9.0.2", "10.9.0.0/24")
    interfaces = {"a": host(ethernet(1)), "b": host(routed)}
    found = joining(interfaces, {"a": ["10.0.0.1"], "b": ["10.9.0.2"]})
    assert found == (ethernet(1), routed)


def test_hosts_with_loopback_or_foreign_addresses_are_joined_by_their_common_network():
    interfaces = {"a": host(ethernet(1)), "b": host(ethernet(2))}
    assert joining(interfaces, {"a": ["127.0.1.1"], "b": ["203.0.113.9"]}) == (
        ethernet(1),
        ethernet(2),
    )


def test_a_network_with_the_same_address_on_two_hosts_joins_nothing():
    assert joining({"a": host(), "b": host()}, {"a": ["172.17.0.1"], "b": ["x"]}) == ()


def test_of_several_common_networks_an_ipv4_network_is_chosen():
    def six(number):
        return Interface("eth1", f"fd00::{number}", "fd00::/64")

    interfaces = {"a": host(six(1), ethernet(1)), "b": host(six(2), ethernet(2))}
    assert joining(interfaces, {"a": [], "b": []}) == (ethernet(1), ethernet(2))


def test_connections_to_this_host_come_from_its_loopback_address():
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("no-such-host.invalid") is None


def test_hosts_in_different_networks_get_one_network_around_them():
    near, far = ethernet(1), Interface("ens5", "10.0.3.2", "10.0.3.0/24")
    assert spanning([near, far], [host(near), host(far)]) == ("10.0.0.0/22",)


def test_networks_that_all_hosts_are_in_stay_unchanged():
    both = [host(ethernet(number), fabric(number)) for number in (1, 2)]
    assert spanning([ethernet(1), fabric(2)], both) == ("10.0.0.0/24", "192.168.0.0/16")


def test_a_network_around_hosts_must_not_contain_their_other_interfaces():
    near, far = ethernet(1), Interface("ens5", "172.20.0.2", "172.20.0.0/24")
    assert spanning([near, far], [host(near), host(far)]) == ("10.0.0.0/24", "172.20.0.0/24")
    other = Interface("eth1", "10.0.1.1", "10.0.1.0/24")
    third = Interface("ens5", "10.0.3.2", "10.0.3.0/24")
    assert spanning([near, third], [host(near, other), host(third)]) == (
        "10.0.0.0/24",
        "10.0.3.0/24",
    )


def test_users_name_interfaces_or_networks():
    hosts = {"a": host(ethernet(1), fabric(1)), "b": host(ethernet(2, "ens5"), fabric(2))}
    assert named(["eth0", "ens5"], hosts) == (ethernet(1), ethernet(2, "ens5"))
    assert named(["192.168.0.0/24"], hosts) == (fabric(1), fabric(2))


@pytest.mark.parametrize("name", ["eth9", "10.9.0.0/24", "10.0.0.0/x"])
def test_an_interface_that_no_host_has_is_refused(name):
    message = rf"--interfaces {name}: no host has it; use one of docker0 \(172.17.0.0/16\), eth0 \("
    with pytest.raises(LaunchError, match=message):
        named(["eth0", name], {"a": host(ethernet(1)), "b": host(ethernet(2))})


def test_a_host_without_any_of_the_interfaces_is_refused():
    message = r"--interfaces eth0: b has none of these, it has docker0 .*, ens5 .*: add one of them"
    with pytest.raises(LaunchError, match=message):
        named(["eth0"], {"a": host(ethernet(1)), "b": host(ethernet(2, "ens5"))})
