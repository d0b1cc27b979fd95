"""What can be done to the network of a rig."""

import os
import re
import select
import subprocess
import time

import pytest
from probes import becomes_true, said
from rig import RigError

NAMES = ["node1", "node2"]
TICKS = ["ssh", "node2", "while echo tick; do sleep 0.1; done"]
BYTES = 2_000_000
# 2 MB take 2 seconds, less what the limit lets through at once; without a limit, far less.
SLOW, LIMITED = "8mbit", 1.5
CONNECT = """
import socket, sys, time
start = time.monotonic()
socket.create_connection((sys.argv[1], 22), timeout=30).close()
print(time.monotonic() - start)
"""


def seconds_to_fetch(host, other):
    """How long it takes a host to get some megabytes from another."""
    start = time.monotonic()
    command = f"ssh {other} head --bytes={BYTES} /dev/zero | wc --bytes"
    assert said(host, "sh", "-c", command) == f"{BYTES}\n"
    return time.monotonic() - start


def silent(stream, seconds=1):
    """Whether nothing can be read for some seconds; what can be is read."""
    ready, _, _ = select.select([stream], [], [], seconds)
    return not (ready and os.read(stream.fileno(), 1_000_000))


def test_a_cut_link_swallows_packets_and_a_healed_one_carries_them_again(rig):
    hosts = rig(NAMES)
    one = hosts.host("node1")
    with one.popen(TICKS, stdout=subprocess.PIPE, bufsize=0) as job:
        assert job.stdout.readline() == b"tick\n"
        hosts.cut("node2")
        # Not at once, for what had arrived before.
        assert becomes_true(lambda: silent(job.stdout))
        refused = one.run(["ssh", "-o", "ConnectTimeout=2", "node2", "true"])
        assert refused.returncode == 255
        assert re.search("timed out|No route to host", refused.stderr)
        assert "UP" in said(one, "ip", "-brief", "link", "show", "eth0")
        # Nobody told it that the connection is dead, which so lives on.
        assert job.poll() is None
        hosts.heal("node2")
        assert not silent(job.stdout, seconds=60)
        job.kill()
    assert said(one, "ssh", "node2", "uname --nodename") == "node2\n"


def test_a_cut_concerns_one_host(rig):
    hosts = rig(["node1", "node2", "node3"])
    hosts.cut("node2")
    assert said(hosts.host("node1"), "ssh", "node3", "uname --nodename") == "node3\n"


@pytest.mark.parametrize(("reader", "source"), [("node1", "node2"), ("node2", "node1")])
def test_a_hosts_bandwidth_limits_what_it_sends_and_what_it_receives(rig, reader, source):
    hosts = rig(NAMES)
    host = hosts.host(reader)
    # A busy machine may be slow once, but a limit always is.
    assert becomes_true(lambda: seconds_to_fetch(host, source) < LIMITED)
    hosts.shape("node2", bandwidth=SLOW)
    assert seconds_to_fetch(host, source) > LIMITED


def test_a_bandwidth_from_the_start_can_be_taken_off(rig):
    hosts = rig(NAMES, bandwidth=SLOW)
    assert seconds_to_fetch(hosts.host("node1"), "node2") > LIMITED
    for name in NAMES:
        hosts.shape(name)
    assert becomes_true(lambda: seconds_to_fetch(hosts.host("node1"), "node2") < LIMITED)


def test_a_delay_makes_packets_late_or_is_refused_for_what_the_kernel_lacks(rig):
    hosts = rig(NAMES)
    trial = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem"]
    if subprocess.run(trial, capture_output=True, timeout=60).returncode != 0:
        with pytest.raises(RigError, match="this kernel has no sch_netem"):
            hosts.shape("node2", delay="200ms")
        return
    hosts.shape("node2", bandwidth="100mbit", delay="200ms")
    there_and_back = said(hosts.host("node1"), "python", "-c", CONNECT, "node2")
    assert float(there_and_back) > 0.39


def test_a_wrong_bandwidth_is_refused(rig):
    with pytest.raises(RigError, match="five apples"):
        rig(NAMES).shape("node2", bandwidth="five apples")
