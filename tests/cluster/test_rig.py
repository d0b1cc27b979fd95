"""The rig itself: that its hosts are what tests of several hosts take them for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rig import RigError

NAMES = ["node1", "node2"]
HERE = Path(__file__).parent
MEGABYTES = 8


def said(host, *command, **options):
    """What a command wrote that has to succeed."""
    done = host.run(command, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def becomes_true(condition, seconds=20):
    """Whether a condition holds within some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def seconds_to_fetch(host, other):
    """How long it takes a host to get some megabytes from another."""
    start = time.monotonic()
    fetched = f"ssh {other} head --bytes={MEGABYTES}000000 /dev/zero | wc --bytes"
    assert said(host, "sh", "-c", fetched).strip() == f"{MEGABYTES}000000"
    return time.monotonic() - start


def test_a_host_has_its_name_its_address_and_no_way_out(rig):
    host = rig(NAMES).host("node2")
    assert said(host, "uname", "--nodename") == "node2\n"
    assert host.address == "10.77.0.2"
    assert "10.77.0.2/24" in said(host, "ip", "-brief", "address", "show", "eth0")
    assert "default" not in said(host, "ip", "route")
    assert said(host, "ls", "/sys/class/net").split() == ["docker0", "eth0", "lo", "veth0"]


def test_names_lead_to_addresses_on_eth0_also_a_hosts_own(rig):
    host = rig(NAMES).host("node1")
    addresses = {name: said(host, "getent", "ahostsv4", name).split()[0] for name in NAMES}
    assert addresses == {"node1": "10.77.0.1", "node2": "10.77.0.2"}
    assert host.run(["getent", "hosts", "node3"]).returncode != 0


def test_docker0_is_up_and_the_same_on_all_hosts_unless_left_out(rig):
    for host in rig(NAMES).hosts:
        line = said(host, "ip", "-brief", "address", "show", "docker0")
        assert line.split()[1:3] == ["UP", "172.17.0.1/16"]
    (host,) = rig(["alone"], docker0=False).hosts
    assert said(host, "ls", "/sys/class/net").split() == ["eth0", "lo"]


def test_ipv6_gives_a_second_address_that_ssh_can_use(rig):
    host = rig(NAMES, ipv6=True).host("node1")
    assert host.address6 == "fd77::1"
    assert said(host, "ssh", "fd77::2", "uname --nodename") == "node2\n"
    assert "fd77::2" in said(host, "getent", "ahosts", "node2")
    assert rig(["alone"]).host("alone").address6 is None


@pytest.mark.parametrize("target", ["name", "address"])
def test_ssh_leads_from_any_host_to_any_host(rig, target):
    hosts = rig(NAMES).hosts
    for one in hosts:
        for other in hosts:
            command = ["ssh", getattr(other, target), "uname --nodename"]
            assert said(one, *command) == f"{other.name}\n"


def test_a_login_has_nothing_of_this_process(rig, monkeypatch):
    monkeypatch.setenv("RIG_LEAK", "yes")
    host = rig(NAMES).host("node1")
    here = said(host, "env")
    there = said(host, "ssh", "node2", "env")
    assert "RIG_LEAK" not in here + there
    assert str(Path(sys.executable).parent) in here
    assert str(Path(sys.executable).parent) not in there


def test_hosts_keep_to_themselves_what_they_write_to_etc_run_and_shared_memory(rig, tmp_path):
    one, other = rig(NAMES).hosts
    files = ["/etc/rig-test", "/run/rig-test", "/dev/shm/rig-test"]
    said(one, "touch", *files, str(tmp_path / "shared"))
    said(one, "ls", *files)
    assert other.run(["ls", *files]).stdout == ""
    assert not any(Path(file).exists() for file in files)
    assert (tmp_path / "shared").exists()


def test_hosts_share_a_home_that_is_not_the_users(rig):
    one, other = rig(NAMES).hosts
    assert said(one, "ls", "-A", "~") if False else said(one, "ls", "-A") == ""
    said(one, "touch", "noted")
    assert said(other, "ssh", "node1", "ls") == "noted\n"
    assert not (Path.home() / "noted").exists()
