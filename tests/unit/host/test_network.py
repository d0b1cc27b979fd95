"""Which names mean this host, and from which address it connects."""

import ipaddress
import socket

import pytest

from hvkit.host.network import addresses_of, interfaces, is_local, source_address


@pytest.mark.parametrize(
    "name",
    [
        *("localhost", "LOCALHOST", "127.0.0.1", "127.0.1.1", "::1"),
        *(socket.gethostname(), socket.gethostname().upper(), socket.gethostname().split(".")[0]),
        *(one.address for one in interfaces()),
    ],
)
def test_names_and_addresses_of_this_host_are_local(name):
    assert is_local(name)


@pytest.mark.parametrize("name", ["192.0.2.77", "2001:db8::77", "nosuch.invalid", "", "a..b"])
def test_other_hosts_and_names_without_an_address_are_not(name):
    assert not is_local(name)


def test_addresses_of_a_name_are_told_once_each():
    assert addresses_of("10.1.2.3") == [ipaddress.ip_address("10.1.2.3")]
    found = addresses_of("localhost")
    assert found
    assert len(found) == len(set(found))
    assert addresses_of("nosuch.invalid") == []


def test_connections_to_this_host_come_from_its_loopback_address():
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("no-such-host.invalid") is None
