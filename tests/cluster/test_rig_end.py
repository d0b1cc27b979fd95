"""What is left of a rig after its end, and where there can be none."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from probes import becomes_true
from rig import Rig

HERE = Path(__file__).parent
HOLDER = """
import time
from rig import Rig
with Rig(["node1", "node2"]) as rig:
    host = rig.host("node1")
    host.popen(["sleep", "1000"])
    host.popen(["ssh", "node2", "sleep 1000"])
    host.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &"])
    while not any("sleep" in process.command for process in rig.host("node2").processes()):
        time.sleep(0.05)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(rig, tmp_path):
    """A process that holds a rig in which commands run."""
    environ = os.environ | {"PYTHONPATH": str(HERE), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


KINDS = ("net", "mnt", "pid")


def namespaces(pids):
    """The namespaces that these processes are in."""
    found = set()
    for pid in pids:
        for kind in KINDS:
            try:
                found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
            except (FileNotFoundError, PermissionError):
                # It has ended, or is not one of root's.
                continue
    return found


def runs(process):
    """Whether a process has not ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def on_the_network():
    """What the machine's own network is made of, and the networks that have a name."""
    named = Path("/run/netns")
    return sorted(psutil.net_if_addrs()), sorted(named.iterdir()) if named.exists() else []


def test_nothing_is_left_when_the_process_that_holds_a_rig_is_killed(holder, tmp_path):
    before = on_the_network()
    processes = psutil.Process(holder.pid).children(recursive=True)
    commands = [process.name() for process in processes]
    assert commands.count("sleep") == 3
    assert commands.count("sshd") >= 2
    made = namespaces(process.pid for process in processes) - namespaces([os.getpid()])
    # Of the switch and two hosts, each its network, its mounts and its processes.
    assert len(made) == 9
    # Held, so that another rig's namespaces do not get the same numbers.
    held = [
        open(f"/proc/{process.pid}/ns/{kind}", "rb")  # noqa: SIM115
        for process in processes
        for kind in KINDS
    ]

    holder.kill()

    assert becomes_true(lambda: not any(map(runs, processes)))
    assert made & namespaces(psutil.pids()) == set()
    for each in held:
        each.close()
    assert on_the_network() == before
    assert list(tmp_path.iterdir()) == []


def test_a_rig_that_ends_takes_along_what_runs_on_its_hosts(rig):
    before = on_the_network()
    with Rig(["node1"]) as own:
        host = own.host("node1")
        job = host.popen(["sleep", "1000"])
        host.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &"])
        assert on_the_network() == before
        # Both have been started, but may not have become what they run yet.
        assert becomes_true(lambda: len(host.processes()) == 2)
        processes = [psutil.Process(process.pid) for process in host.processes()]
    assert job.poll() is not None
    assert not any(map(runs, processes))
    assert on_the_network() == before


def test_orphans_are_reaped(rig):
    host = rig(["node1"]).host("node1")
    host.run(["sh", "-c", "sh -c 'sleep 0.1 & sleep 0.2 &' &"])
    states = ["ps", "-e", "-o", "comm,state"]
    assert becomes_true(lambda: "sleep" not in host.run(states).stdout)


def pytest_without_tools(tmp_path, **environ):
    """A run of one test of a rig where no tool can be found."""
    (tmp_path / "bin").mkdir()
    test = f"{HERE / 'test_rig_end.py'}::test_orphans_are_reaped"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-m", "", test],
        cwd=HERE.parents[1],
        env=os.environ | {"PATH": str(tmp_path / "bin"), "HVKIT_REQUIRE_CLUSTER": ""} | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_machine_without_the_tools_skips_and_names_their_packages(tmp_path):
    done = pytest_without_tools(tmp_path)
    assert done.returncode == 0
    assert "1 skipped" in done.stdout
    for tool, package in (
        ("ip", "iproute2"),
        ("sshd", "openssh-server"),
        ("unshare", "util-linux"),
    ):
        assert f"{tool} is not on PATH: install {package}" in done.stdout


def test_a_machine_without_the_tools_fails_where_hosts_are_required(tmp_path):
    done = pytest_without_tools(tmp_path, HVKIT_REQUIRE_CLUSTER="1")
    assert done.returncode == 1
    assert "sshd is not on PATH: install openssh-server" in done.stdout
