"""A rig's hosts: names, logins, files, processes."""

import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from probes import becomes_true, said
from rig import RigError

NAMES = ["node1", "node2"]
UNTIL_ASKED = "trap 'exit 5' TERM; echo ready; while :; do sleep 0.1; done"


def test_a_host_has_its_name_its_address_and_no_way_out(rig):
    host = rig(NAMES).host("node2")
    assert said(host, "uname", "--nodename") == "node2\n"
    assert host.address == "10.77.0.2"
    assert "10.77.0.2/24" in said(host, "ip", "-brief", "address", "show", "eth0")
    assert "default" not in said(host, "ip", "route")


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


def test_ipv6_gives_hosts_a_second_address(rig):
    host = rig(NAMES, ipv6=True).host("node1")
    assert host.address6 == "fd77::1"
    assert said(host, "ssh", "fd77::2", "uname --nodename") == "node2\n"
    assert "fd77::2" in said(host, "getent", "ahosts", "node2")
    assert rig(["alone"]).host("alone").address6 is None


@pytest.mark.parametrize("known_by", ["name", "address"])
def test_ssh_leads_from_any_host_to_any_host(rig, known_by):
    hosts = rig(NAMES).hosts
    for one in hosts:
        for other in hosts:
            where = said(one, "ssh", getattr(other, known_by), "uname --nodename")
            assert where == f"{other.name}\n"


def test_a_host_without_the_right_key_is_refused(rig):
    one, other = rig(NAMES).hosts
    said(one, "rm", "/etc/ssh/id_ed25519")
    refused = one.run(["ssh", "node2", "true"])
    assert (refused.returncode, "Permission denied" in refused.stderr) == (255, True)
    said(other, "rm", "/etc/ssh/ssh_known_hosts")
    refused = other.run(["ssh", "node1", "true"])
    assert (refused.returncode, "Host key verification" in refused.stderr) == (255, True)


def test_commands_and_logins_have_no_variable_of_this_process_by_accident(rig, monkeypatch):
    monkeypatch.setenv("RIG_LEAK", "leaked")
    host = rig(NAMES).host("node1")
    here = said(host, "env", env={"RIG_PASSED": "passed"})
    there = said(host, "ssh", "node2", "env", env={"RIG_PASSED": "passed"})
    assert "leaked" not in here + there
    assert "RIG_PASSED=passed" in here
    assert "RIG_PASSED" not in there


def test_commands_find_this_python_and_logins_do_not(rig):
    host = rig(NAMES).host("node1")
    assert (
        said(host, "sh", "-c", "command -v python").strip()
        == f"{Path(sys.executable).parent}/python"
    )
    path = said(host, "ssh", "node2", "echo $PATH")
    assert str(Path(sys.executable).parent) not in path.split(":")


def test_hosts_share_the_machines_files_but_not_etc_run_and_shared_memory(rig, tmp_path):
    one, other = rig(NAMES).hosts
    name = uuid.uuid4().hex
    own = [f"{folder}/{name}" for folder in ("/etc", "/run", "/dev/shm")]
    said(one, "touch", *own, tmp_path / "shared")
    said(one, "ls", *own)
    assert other.run(["ls", *own]).stdout == ""
    assert not any(Path(file).exists() for file in own)
    assert said(other, "ls", tmp_path) == "shared\n"
    assert (tmp_path / "shared").exists()


def test_hosts_share_a_home_that_is_nobodys(rig):
    one, other = rig(NAMES).hosts
    assert said(one, "ls", "--all", "--almost-all") == ""
    said(one, "touch", "noted")
    assert said(other, "ssh", "node1", "ls") == "noted\n"
    assert not (Path.home() / "noted").exists()


def test_processes_are_those_of_one_host_and_none_that_make_it_one(rig):
    one, other = rig(NAMES).hosts
    assert one.processes() == []
    job = one.popen(["sleep", "1001"])
    remote = one.popen(["ssh", "node2", "sleep 1002"])
    assert becomes_true(lambda: "sleep 1002" in [p.command for p in other.processes()])
    here = {process.command: process.pid for process in one.processes()}
    assert here == {"sleep 1001": job.pid, "ssh node2 sleep 1002": remote.pid}
    assert "sleep 1001" not in said(other, "ps", "-e", "-o", "args")


def test_signals_reach_the_command(rig):
    (host,) = rig(["alone"]).hosts
    job = host.popen(["sh", "-c", UNTIL_ASKED], stdout=subprocess.PIPE, text=True)
    with job:
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGTERM)
        assert job.wait(20) == 5
    job = host.popen(["sleep", "1000"])
    job.kill()
    assert job.wait(20) == -signal.SIGKILL
    assert host.processes() == []


def test_a_command_that_takes_too_long_is_killed(rig):
    (host,) = rig(["alone"]).hosts
    with pytest.raises(subprocess.TimeoutExpired, match="sleep"):
        host.run(["sleep", "1000"], timeout=0.5)
    assert host.processes() == []


def test_run_gives_input_status_and_both_outputs(rig, tmp_path):
    (host,) = rig(["alone"]).hosts
    done = host.run(["sh", "-c", "cat; pwd; echo bad >&2; exit 3"], input="read\n", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (3, f"read\n{tmp_path}\n", "bad\n")


def test_a_rig_that_cannot_be_made_is_refused_with_the_reason(rig):
    with pytest.raises(RigError, match="names: every host needs its own, got node1, node1"):
        rig(["node1", "node1"])
    with pytest.raises(RigError, match="user: 'nemo' is not in /etc/passwd"):
        rig(NAMES, user="nemo")
    with pytest.raises(RigError, match="/nowhere/sshd"):
        rig(NAMES, sshd="/nowhere/sshd")
