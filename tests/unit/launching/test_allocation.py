"""The hosts and slots of jobs of Slurm, PBS, LSF, SageMaker and the Kubernetes MPI operator."""

import re

import pytest

from hvkit.errors import LaunchError
from hvkit.host.hardware import Gpu, Gpus
from hvkit.launching import allocation as batch_systems
from hvkit.launching.allocation import Allocation, allocation
from hvkit.launching.hosts import Host


def refused(environ, message):
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}"):
        allocation(environ)


@pytest.fixture
def file(tmp_path):
    """A file that a batch system may write."""
    return tmp_path / "hosts"


def test_without_a_batch_system_there_is_no_allocation():
    assert allocation({}) is None


@pytest.mark.parametrize(
    ("environ", "slots"),
    [
        ({"SLURM_TASKS_PER_NODE": "2(x3),1"}, [2, 2, 2, 1]),
        ({"SLURM_TASKS_PER_NODE": "4(x4)"}, [4, 4, 4, 4]),
        ({"SLURM_TASKS_PER_NODE": "1,2,3,4"}, [1, 2, 3, 4]),
        ({"SLURM_TASKS_PER_NODE": "1(x4)", "SLURM_GPUS_ON_NODE": "8"}, [1, 1, 1, 1]),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_CPUS_PER_NODE": "64(x4)"}, [8, 8, 8, 8]),
        ({"SLURM_GPUS_ON_NODE": "0", "SLURM_JOB_CPUS_PER_NODE": "64(x4)"}, [64, 64, 64, 64]),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2),8(x2)"}, [16, 16, 8, 8]),
    ],
)
def test_slurm_gives_tasks_else_gpus_else_cpus(scontrol, environ, slots):
    found = allocation({"SLURM_JOB_NODELIST": "gpu[01-03],login1", **environ})
    hosts = tuple(map(Host, ["gpu01", "gpu02", "gpu03", "login1"], slots))
    assert found == Allocation("Slurm", "SLURM_JOB_NODELIST", hosts)


def test_without_sagemakers_toolkit_its_file_names_the_hosts(file, monkeypatch):
    monkeypatch.setattr(batch_systems, "_SAGEMAKER_RESOURCES", file)
    assert allocation({}) is None
    file.write_text('{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}')
    gpus = Gpus((Gpu(0, "H100", None, "1"), Gpu(1, "H100", None, "1")), None, None)
    monkeypatch.setattr(batch_systems, "gpus_here", lambda: gpus)
    hosts = (Host("algo-1", 2), Host("algo-2", 2))
    assert allocation({}) == Allocation("SageMaker", str(file), hosts)
    assert allocation({"SM_HOSTS": '["algo-1"]'}).hosts == hosts[:1]
    for text in ("", "[]", "[" * 100_000, '{"hosts": "algo-1"}', "{}", '{"hosts": []}'):
        file.write_text(text)
        refused({}, f"{file} must be ")
    file.write_bytes(b"\xff")
    refused({}, f"{file} cannot be read")


@pytest.mark.parametrize(
    ("environ", "slots"), [({"SM_NUM_GPUS": "8"}, 8), ({"SM_NUM_GPUS": "0"}, None), ({}, None)]
)
def test_each_host_of_sagemaker_has_a_slot_for_each_gpu(environ, slots):
    found = allocation({"SM_HOSTS": '["algo-1", "algo-2"]', **environ})
    hosts = (Host("algo-1", slots), Host("algo-2", slots))
    assert found == Allocation("SageMaker", "SM_HOSTS", hosts)


NODES, TASKS = "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"
USE = ": name the hosts with a hostfile or -H instead"
LIST = 'SM_HOSTS must be a list such as ["algo-1", "algo-2"], got'
NUMBER = "is invalid (each number must be a positive integer, got"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {NODES: "gpu[3-1]", TASKS: "1(x2)"},
            f"{NODES} cannot be expanded (Invalid hostlist: gpu[3-1]), got 'gpu[3-1]'{USE}",
        ),
        ({NODES: "", TASKS: "1"}, f"{NODES} cannot be expanded (scontrol prints nothing), got ''"),
        # For this the real scontrol prints gpu].
        ({NODES: "gpu[1-2", TASKS: "1(x2)"}, f"{NODES} has an invalid host name ('gpu]' is not a"),
        ({NODES: "a,b", TASKS: "2(x3)"}, f"{TASKS} is for 3 hosts, but {NODES} names 2, got '2(x3"),
        ({NODES: "a", TASKS: "2(y3)"}, f"{TASKS} must be a list such as 2(x3),1, got '2(y3)'{USE}"),
        ({NODES: "a", TASKS: "0"}, f"{TASKS} {NUMBER} '0'), got '0'{USE}"),
        ({NODES: "a", TASKS: "2(x999999999)"}, f"{TASKS} is invalid (each number must be at most"),
        ({NODES: "a", "SLURM_GPUS_ON_NODE": "all"}, f"SLURM_GPUS_ON_NODE {NUMBER} 'all')"),
        (
            {NODES: "a"},
            f"{NODES} is set, but none of {TASKS}, SLURM_GPUS_ON_NODE and SLURM_JOB_CPUS_PER_NODE",
        ),
        ({"LSB_MCPU_HOSTS": "a 5 b"}, "LSB_MCPU_HOSTS must be pairs of host and slots such as"),
        ({"LSB_MCPU_HOSTS": "a five"}, f"LSB_MCPU_HOSTS {NUMBER} 'five'), got 'a five'"),
        ({"SM_HOSTS": "algo-1,algo-2"}, f"{LIST} 'algo-1,algo-2'"),
        ({"SM_HOSTS": "[" * 100_000}, LIST),
        ({"SM_HOSTS": "[]"}, LIST),
        ({"SM_HOSTS": '["a", 1]'}, LIST),
        ({"SM_HOSTS": '["a", "a"]'}, "SM_HOSTS names a host twice"),
        ({"SM_HOSTS": '["a b"]'}, "SM_HOSTS has an invalid host name ('a b' is not a host name"),
        ({"SM_HOSTS": '["a"]', "SM_NUM_GPUS": "many"}, f"SM_NUM_GPUS {NUMBER} 'many')"),
        ({"PBS_NODEFILE": "/no"}, "PBS_NODEFILE names a file that cannot be read (No such file"),
        ({"HYDRA_HOST_FILE": "/no"}, "HYDRA_HOST_FILE names an invalid hostfile: /no: cannot be"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_variable(scontrol, environ, message):
    refused(environ, message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "PBS_NODEFILE names a file without hosts, got"),
        (b"n1\nn/2\n", "PBS_NODEFILE has an invalid host name ('n/2' is not"),
        (b"\xff\xfe", "PBS_NODEFILE names a file that cannot be read (not"),
    ],
)
def test_a_wrong_file_of_pbs_is_an_error(file, data, message):
    file.write_bytes(data)
    refused({"PBS_NODEFILE": str(file)}, message)


RANGE = {NODES: "gpu[1-2]", TASKS: "4(x2)"}


def test_without_scontrol_plain_names_of_slurm_are_read_and_ranges_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    plain = {NODES: "gpu1,login", TASKS: "4,2"}
    assert allocation(plain).hosts == (Host("gpu1", 4), Host("login", 2))
    refused(RANGE, f"{NODES} cannot be expanded (there is no scontrol, Slurm's own program, on")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'scontrol: fatal: no configuration' >&2; exit 1", "scontrol: fatal: no configurat"),
        ("echo gpu1; exit 1", "scontrol prints nothing"),
        ("exec sleep 60", "scontrol does not answer within 0.5 seconds"),
    ],
)
def test_a_scontrol_that_fails_is_an_error_with_its_last_line(scontrol, monkeypatch, script, why):
    scontrol.write_text(f"#!/bin/sh\n{script}\n")
    monkeypatch.setattr(batch_systems, "_SCONTROL", 0.5 if "sleep" in script else 30.0)
    refused(RANGE, f"{NODES} cannot be expanded ({why}")


SLOTS_OF_2 = (Host("n2.cluster", 3), Host("n1.cluster", 1))


@pytest.mark.parametrize(
    ("variable", "text", "system", "hosts"),
    [
        ("PBS_NODEFILE", "n2.cluster\nn1.cluster\nn2.cluster\nn2.cluster\n", "PBS", SLOTS_OF_2),
        ("LSB_DJOB_HOSTFILE", "a\nb\nb\n", "LSF", (Host("a", 1), Host("b", 2))),
        ("OMPI_MCA_orte_default_hostfile", "job.ns slots=8\n", "hostfile", (Host("job.ns", 8),)),
        ("PRTE_MCA_prte_default_hostfile", "job.ns slots=8\n", "hostfile", (Host("job.ns", 8),)),
        ("I_MPI_HYDRA_HOST_FILE", "job.ns:8\n", "hostfile", (Host("job.ns", 8),)),
        ("HYDRA_HOST_FILE", "job.ns:8\n", "hostfile", (Host("job.ns", 8),)),
    ],
)
def test_the_file_of_a_batch_system_or_the_mpi_operator_is_found_by_its_variable(
    file, variable, text, system, hosts
):
    file.write_text(text)
    # LSF's file counts before its pairs.
    pairs = {"LSB_MCPU_HOSTS": "c 9"} if system == "LSF" else {}
    assert allocation({variable: str(file), **pairs}) == Allocation(system, variable, hosts)


def test_lsf_gives_pairs_of_host_and_slots():
    found = allocation({"LSB_MCPU_HOSTS": "b 1 a 5 b 2"})
    assert found == Allocation("LSF", "LSB_MCPU_HOSTS", (Host("b", 3), Host("a", 5)))


def test_a_launch_node_of_lsf_takes_no_ranks():
    hosts = {"LSB_MCPU_HOSTS": "batch1 1 a 42 b 42"}
    with_manager = allocation({**hosts, "CSM_ALLOCATION_ID": "77"})
    assert with_manager.hosts == (Host("a", 42), Host("b", 42))
    # Without that manager a host with one slot is like any other.
    assert allocation(hosts).hosts[0] == Host("batch1", 1)


def test_in_kubernetes_the_operator_s_hostfile_is_found_without_a_variable(file, monkeypatch):
    monkeypatch.setattr(batch_systems, "_OPERATOR_HOSTFILE", file)
    inside = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    assert allocation(inside) is None
    file.write_text("worker-0:8\n")
    assert allocation({}) is None
    assert allocation(inside).hosts == (Host("worker-0", 8),)
    file.write_text("worker-0:x\n")
    refused(inside, f"the MPI operator's hostfile is invalid: {file}: line 1: slots must be")


@pytest.mark.parametrize("variable", batch_systems._HOSTFILE_VARIABLES)
def test_a_default_hostfile_may_have_a_line_for_each_slot(file, variable):
    file.write_text("n1\nN1\nn2 slots=2\nn2 slots=3\nn2\nn3\n")
    hosts = (Host("n1", 2), Host("n2", 6), Host("n3"))
    assert allocation({variable: str(file)}).hosts == hosts
    file.write_text("n1\nroot@n1\n")
    refused({variable: str(file)}, f"{variable} names an invalid hostfile: {file}: line 2: n1 has")


def test_a_scheduler_counts_before_a_hostfile_that_a_site_has_set(file):
    file.write_text("other slots=1\n")
    site = {"OMPI_MCA_orte_default_hostfile": str(file)}
    assert allocation({NODES: "a", TASKS: "2", **site}).hosts == (Host("a", 2),)
