"""The hosts and slots of jobs of Slurm, PBS, LSF, SageMaker and the Kubernetes MPI operator."""

import re
from pathlib import Path

import pytest

from hvkit.errors import LaunchError
from hvkit.host.gpus import Gpu, Gpus
from hvkit.launching import allocation as batch_systems
from hvkit.launching.allocation import Allocation, allocation
from hvkit.launching.hosts import Host

_USE = ": name the hosts with a hostfile or -H instead"


def _refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}"):
        allocation(environ)


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
    names = ["gpu01", "gpu02", "gpu03", "login1"]
    assert found == Allocation(
        "Slurm",
        "SLURM_JOB_NODELIST",
        tuple(Host(name, number) for name, number in zip(names, slots, strict=True)),
    )


def test_without_sagemakers_toolkit_its_file_names_the_hosts(tmp_path, monkeypatch):
    file = tmp_path / "resourceconfig.json"
    monkeypatch.setattr("hvkit.launching.allocation._SAGEMAKER_RESOURCES", file)
    assert allocation({}) is None
    file.write_text('{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}')
    gpus = Gpus((Gpu(0, "H100", None, "1"), Gpu(1, "H100", None, "1")), None, None)
    monkeypatch.setattr("hvkit.launching.allocation.gpus_here", lambda: gpus)
    hosts = (Host("algo-1", 2), Host("algo-2", 2))
    assert allocation({}) == Allocation("SageMaker", str(file), hosts)
    assert allocation({"SM_HOSTS": '["algo-1"]'}).hosts == hosts[:1]
    for text in ("", "[]", "[" * 100_000, '{"hosts": "algo-1"}', "{}", '{"hosts": []}'):
        file.write_text(text)
        with pytest.raises(LaunchError, match=f"^{re.escape(str(file))} must be "):
            allocation({})
    file.write_bytes(b"\xff")
    with pytest.raises(LaunchError, match="cannot be read"):
        allocation({})


@pytest.mark.parametrize(
    ("environ", "slots"), [({"SM_NUM_GPUS": "8"}, 8), ({"SM_NUM_GPUS": "0"}, None), ({}, None)]
)
def test_each_host_of_sagemaker_has_a_slot_for_each_gpu(environ, slots):
    found = allocation({"SM_HOSTS": '["algo-1", "algo-2"]', **environ})
    hosts = (Host("algo-1", slots), Host("algo-2", slots))
    assert found == Allocation("SageMaker", "SM_HOSTS", hosts)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"SLURM_JOB_NODELIST": "gpu[3-1]", "SLURM_TASKS_PER_NODE": "1(x2)"},
            "SLURM_JOB_NODELIST cannot be expanded (Invalid hostlist: gpu[3-1]), got 'gpu[3-1]'"
            f"{_USE}",
        ),
        (
            {"SLURM_JOB_NODELIST": "", "SLURM_TASKS_PER_NODE": "1"},
            f"SLURM_JOB_NODELIST cannot be expanded (scontrol prints nothing), got ''{_USE}",
        ),
        (
            # The real scontrol prints gpu] for this list.
            {"SLURM_JOB_NODELIST": "gpu[1-2", "SLURM_TASKS_PER_NODE": "1(x2)"},
            "SLURM_JOB_NODELIST has an invalid host name ('gpu]' is not a host name",
        ),
        (
            {"SLURM_JOB_NODELIST": "gpu 1", "SLURM_TASKS_PER_NODE": "1"},
            "SLURM_JOB_NODELIST has an invalid host name ('gpu 1' is not a host name",
        ),
        (
            {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "2(x3)"},
            f"SLURM_TASKS_PER_NODE is for 3 hosts, but SLURM_JOB_NODELIST names 2, got '2(x3)'"
            f"{_USE}",
        ),
        (
            {"SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "2(y3)"},
            f"SLURM_TASKS_PER_NODE must be a list such as 2(x3),1, got '2(y3)'{_USE}",
        ),
        (
            {"SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "0"},
            "SLURM_TASKS_PER_NODE is invalid (each number must be a positive integer, got '0'), "
            f"got '0'{_USE}",
        ),
        (
            {"SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "2(x999999999)"},
            "SLURM_TASKS_PER_NODE is invalid (each number must be at most 65535, got '999999999')",
        ),
        (
            {"SLURM_JOB_NODELIST": "a", "SLURM_GPUS_ON_NODE": "all"},
            "SLURM_GPUS_ON_NODE is invalid (each number must be a positive integer, got 'all')",
        ),
        (
            {"SLURM_JOB_NODELIST": "a"},
            "SLURM_JOB_NODELIST is set, but none of SLURM_TASKS_PER_NODE, SLURM_GPUS_ON_NODE and "
            "SLURM_JOB_CPUS_PER_NODE, which give the slots of its hosts: submit the job with "
            "--ntasks-per-node",
        ),
        (
            {"LSB_MCPU_HOSTS": "a 5 b"},
            "LSB_MCPU_HOSTS must be pairs of host and slots such as `hostA 5 hostB 2`, got "
            f"'a 5 b'{_USE}",
        ),
        (
            {"LSB_MCPU_HOSTS": "a five"},
            "LSB_MCPU_HOSTS is invalid (each number must be a positive integer, got 'five'), got "
            "'a five'",
        ),
        (
            {"SM_HOSTS": "algo-1,algo-2"},
            'SM_HOSTS must be a list such as ["algo-1", "algo-2"], got \'algo-1,algo-2\'' + _USE,
        ),
        ({"SM_HOSTS": "[" * 100_000}, "SM_HOSTS must be a list such as"),
        ({"SM_HOSTS": "[]"}, "SM_HOSTS must be a list such as"),
        ({"SM_HOSTS": '["a", 1]'}, "SM_HOSTS must be a list such as"),
        ({"SM_HOSTS": '["a", "a"]'}, "SM_HOSTS names a host twice"),
        ({"SM_HOSTS": '["a b"]'}, "SM_HOSTS has an invalid host name ('a b' is not a host name"),
        (
            {"SM_HOSTS": '["a"]', "SM_NUM_GPUS": "many"},
            "SM_NUM_GPUS is invalid (each number must be a positive integer, got 'many')",
        ),
        (
            {"PBS_NODEFILE": "/nonexistent/nodes"},
            "PBS_NODEFILE names a file that cannot be read (No such file or directory), got "
            f"'/nonexistent/nodes'{_USE}",
        ),
        (
            {"HYDRA_HOST_FILE": "/nonexistent/hosts"},
            "HYDRA_HOST_FILE names an invalid hostfile: /nonexistent/hosts: cannot be read: "
            "No such file or directory",
        ),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_variable(scontrol, environ, message):
    _refused(environ, message)


def test_without_scontrol_plain_names_of_slurm_are_read_and_ranges_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    plain = {"SLURM_JOB_NODELIST": "gpu1,login", "SLURM_TASKS_PER_NODE": "4,2"}
    assert allocation(plain).hosts == (Host("gpu1", 4), Host("login", 2))
    _refused(
        {"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"},
        "SLURM_JOB_NODELIST cannot be expanded (there is no scontrol, Slurm's own program, on "
        f"PATH), got 'gpu[1-2]'{_USE}",
    )


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'scontrol: fatal: no configuration' >&2; exit 1", "scontrol: fatal: no configurat"),
        ("echo gpu1; exit 1", "scontrol prints nothing"),
        ("exec sleep 60", "scontrol does not answer within 0.2 seconds"),
    ],
)
def test_a_scontrol_that_fails_is_an_error_with_its_last_line(scontrol, monkeypatch, script, why):
    scontrol.write_text(f"#!/bin/sh\n{script}\n")
    if "sleep" in script:
        monkeypatch.setattr(batch_systems, "_SCONTROL", 0.2)
    _refused(
        {"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"},
        f"SLURM_JOB_NODELIST cannot be expanded ({why}",
    )


def test_pbs_gives_a_slot_for_each_line(tmp_path: Path):
    nodes = tmp_path / "nodes"
    nodes.write_text("n2.cluster\nn1.cluster\nn2.cluster\nn2.cluster\n")
    assert allocation({"PBS_NODEFILE": str(nodes)}) == Allocation(
        "PBS", "PBS_NODEFILE", (Host("n2.cluster", 3), Host("n1.cluster", 1))
    )


def test_a_wrong_file_of_pbs_is_an_error(tmp_path: Path):
    nodes = tmp_path / "nodes"
    nodes.write_text("")
    _refused({"PBS_NODEFILE": str(nodes)}, "PBS_NODEFILE names a file without hosts, got")
    nodes.write_text("n1\nn/2\n")
    _refused({"PBS_NODEFILE": str(nodes)}, "PBS_NODEFILE has an invalid host name ('n/2' is not")
    nodes.write_bytes(b"\xff\xfe")
    _refused({"PBS_NODEFILE": str(nodes)}, "PBS_NODEFILE names a file that cannot be read (not")


def test_lsf_gives_pairs_of_host_and_slots():
    assert allocation({"LSB_MCPU_HOSTS": "b 1 a 5 b 2"}) == Allocation(
        "LSF", "LSB_MCPU_HOSTS", (Host("b", 3), Host("a", 5))
    )


def test_lsf_s_file_counts_before_its_pairs(tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("a\nb\nb\n")
    assert allocation({"LSB_DJOB_HOSTFILE": str(file), "LSB_MCPU_HOSTS": "c 9"}) == Allocation(
        "LSF", "LSB_DJOB_HOSTFILE", (Host("a", 1), Host("b", 2))
    )


def test_a_launch_node_of_lsf_takes_no_ranks():
    hosts = {"LSB_MCPU_HOSTS": "batch1 1 a 42 b 42"}
    with_manager = allocation({**hosts, "CSM_ALLOCATION_ID": "77"})
    assert with_manager is not None
    assert with_manager.hosts == (Host("a", 42), Host("b", 42))
    # Without that manager a host with one slot is like any other.
    without = allocation(hosts)
    assert without is not None
    assert without.hosts[0] == Host("batch1", 1)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("OMPI_MCA_orte_default_hostfile", "job-worker-0.job.ns.svc slots=8\n"),
        ("PRTE_MCA_prte_default_hostfile", "job-worker-0.job.ns.svc slots=8\n"),
        ("I_MPI_HYDRA_HOST_FILE", "job-worker-0.job.ns.svc:8\n"),
        ("HYDRA_HOST_FILE", "job-worker-0.job.ns.svc:8\n"),
    ],
)
def test_the_mpi_operator_s_hostfile_is_found_by_its_variable(tmp_path: Path, variable, text):
    file = tmp_path / "hostfile"
    file.write_text(text)
    assert allocation({variable: str(file)}) == Allocation(
        "hostfile", f"{variable}", (Host("job-worker-0.job.ns.svc", 8),)
    )


def test_in_kubernetes_the_operator_s_hostfile_is_found_without_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "hostfile"
    monkeypatch.setattr(batch_systems, "_OPERATOR_HOSTFILE", file)
    inside = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    assert allocation(inside) is None
    file.write_text("worker-0:8\n")
    assert allocation({}) is None
    found = allocation(inside)
    assert found is not None
    assert found.hosts == (Host("worker-0", 8),)
    file.write_text("worker-0:x\n")
    _refused(inside, f"the MPI operator's hostfile is invalid: {file}: line 1: slots must be")


def test_a_scheduler_counts_before_a_hostfile_that_a_site_has_set(scontrol, tmp_path: Path):
    file = tmp_path / "hostfile"
    file.write_text("other slots=1\n")
    found = allocation(
        {
            "SLURM_JOB_NODELIST": "a",
            "SLURM_TASKS_PER_NODE": "2",
            "OMPI_MCA_orte_default_hostfile": str(file),
        }
    )
    assert found is not None
    assert found.hosts == (Host("a", 2),)
