"""Ready hostfiles and those that hvkit writes mean the same to mpirun and horovodrun."""

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
from horovod.runner.common.util import hosts as horovodrun

from hvkit.launching.hostfile import read_hostfile
from hvkit.launching.hosts import Host
from hvkit.launching.launchers import write_horovodrun, write_openmpi

READY = sorted((Path(__file__).parents[3] / "hostfiles").iterdir())
NODE = re.compile(r"Data for node: (\S+).*?Num slots allocated: (\d+)\s+Max slots: (\d+)", re.S)


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
    """Slots and max_slots (0 for none) of each host, as mpirun reads the file; nothing starts."""
    dry = ["--do-not-launch", "--display", "map", "--bind-to", "none", "--map-by", "slot"]
    words = ["mpirun", *dry, "--hostfile", str(file), "-np", str(ranks), "true"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    given = {**os.environ, **root}
    done = subprocess.run(words, env=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: (int(slots), int(most)) for name, slots, most in NODE.findall(done.stdout)}


def test_there_are_ready_files():
    names = {"one_machine", "two_cpu_hosts", "four_hosts_8_gpus", "uneven_pair"}
    assert {file.name for file in READY} == names


@pytest.mark.parametrize("file", READY, ids=lambda file: file.name)
def test_a_ready_file_means_the_same_to_horovodrun(file):
    listed = horovodrun.parse_host_files(str(file))
    assert f"{listed}\n" == write_horovodrun(read_hostfile(file))


@needs_open_mpi_5
@pytest.mark.parametrize("file", READY, ids=lambda file: file.name)
def test_a_ready_file_means_the_same_to_mpirun(file):
    hosts = read_hostfile(file)
    # mpirun replaces localhost by the name of this host, without the domain.
    here = socket.gethostname().partition(".")[0]
    expected = {here if host.name == "localhost" else host.name: (host.slots, 0) for host in hosts}
    assert of_mpirun(file, sum(host.slots or 0 for host in hosts)) == expected


WRITTEN = write_openmpi(
    [
        Host("a-1", 1),
        Host("b_2", 2, 3, user="some-one"),
        Host("10.77.1.1", 3),
        Host("fd77::1:1", 2, user="root"),
        Host("fd77::2", 1, 1),
    ]
)
READ = (
    "# all\n\n\ta1\tslots = 2 # why\n  a2 max-slots=3 slots= 02\na3 max_slots=4#why\n"
    "u@a4 slots =1\na5\na5\n"
)


@needs_open_mpi_5
@pytest.mark.parametrize(("text", "ranks"), [(WRITTEN, 9), (READ, 11)], ids=["written", "read"])
def test_what_hvkit_writes_and_reads_means_the_same_to_mpirun(tmp_path, text, ranks):
    file = tmp_path / "hosts"
    file.write_text(text)
    expected = {host.name: (host.slots, host.max_slots or 0) for host in read_hostfile(file)}
    assert of_mpirun(file, ranks) == expected
