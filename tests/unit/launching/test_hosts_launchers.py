"""Hostfiles mean the same to hvkit, mpirun and horovodrun."""

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
from horovod.runner.common.util import hosts as horovodrun

from hvkit.launching.hosts import hosts_option, read_hostfile

READY = sorted((Path(__file__).parents[3] / "hostfiles").iterdir())
NODE = re.compile(r"Data for node: (\S+).*?Num slots allocated: (\d+)", re.S)


def is_open_mpi_5():
    try:
        done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return False
    return "(Open MPI) 5." in done.stdout


needs_open_mpi_5 = pytest.mark.skipif(
    not is_open_mpi_5(), reason="needs Open MPI 5 first on PATH, to compare how it reads the files"
)


def of_mpirun(file, ranks):
    """The slots of each host, as mpirun reads the file; nothing starts."""
    dry = ["--do-not-launch", "--display", "map", "--bind-to", "none", "--map-by", "slot"]
    words = ["mpirun", *dry, "--hostfile", str(file), "-np", str(ranks), "true"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    given = {**os.environ, **root}
    done = subprocess.run(words, env=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: int(slots) for name, slots in NODE.findall(done.stdout)}


def test_there_are_ready_files():
    names = {"one_machine", "two_cpu_hosts", "four_hosts_8_gpus", "uneven_pair"}
    assert {file.name for file in READY} == names


@pytest.mark.parametrize("file", READY, ids=lambda file: file.name)
def test_a_ready_file_means_the_same_to_horovodrun(file):
    listed = horovodrun.parse_host_files(str(file))
    assert listed == hosts_option(read_hostfile(file))


@needs_open_mpi_5
@pytest.mark.parametrize("file", READY, ids=lambda file: file.name)
def test_a_ready_file_means_the_same_to_mpirun(file):
    hosts = read_hostfile(file)
    # mpirun replaces localhost by the name of this host, without the domain.
    here = socket.gethostname().partition(".")[0]
    expected = {here if host.name == "localhost" else host.name: host.slots for host in hosts}
    assert of_mpirun(file, sum(host.slots or 0 for host in hosts)) == expected


READ = (
    "# all\n\n\ta1\tslots = 2 # why\n  a2 max-slots=3 slots= 02\na3 max_slots=4#why\n"
    "u@a4 slots =1\na5 slots=2\nb_2 slots=2 max_slots=3\n10.77.1.1 slots=3\n"
)


@needs_open_mpi_5
def test_mpirun_reads_a_hostfile_as_hvkit_does(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(READ)
    expected = {host.name: host.slots for host in read_hostfile(file)}
    assert of_mpirun(file, sum(expected.values())) == expected
