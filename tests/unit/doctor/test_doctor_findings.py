"""Findings from facts: none on a healthy machine, else each with its fix."""

import re

import pytest
from machine_facts import LAUNCHER, NO_SSH, library, machine

from hvkit.doctor.findings import TABLE, findings

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


# What changes, and the finding, in some with its fix.
PROBLEMS = [
    ({"versions": {"torch": None, "tensorflow": None}}, "neither PyTorch nor TensorFlow"),
    (
        {"_tensorflows": ["tensorflow 2.21.0", "tensorflow-cpu 2.20.0"]},
        r"tensorflow 2\.21\.0 and tensorflow-cpu 2\.20\.0 are installed over each other -> "
        "`pip uninstall tensorflow tensorflow-cpu`",
    ),
    (
        unmet("tensorflow 2.21.0", "keras>=3.12", "3.3.0"),
        r"tensorflow 2\.21\.0 needs keras>=3\.12, but 3\.3\.0 is .* -> .*install 'keras>=3.12'",
    ),
    (unmet("keras 3.15.1", "numpy", None), "keras 3.15.1 needs numpy, but it is not installed"),
    ({"horovod": None}, "Horovod is not installed -> `hvkit install-horovod`$"),
    (
        {"horovod": None, "_cannot_build": "no C++ compiler: none on PATH. Install g++"},
        r"Horovod is not .* -> .*install-horovod`, after fixing this: no C\+\+ compiler",
    ),
    (
        {"horovod": {"libraries": [library("tensorflow")]}},
        r"built for TensorFlow only, but PyTorch 2\.13\.0 is .* -> `hvkit install-horovod`",
    ),
    (
        {"horovod": {"libraries": []}, "versions": {"torch": None}},
        "Horovod is built for no framework, but TensorFlow",
    ),
    (
        {"versions": {"torch": "2.14.0"}},
        r"built for PyTorch 2\.13\.0, but 2\.14\.0 is installed -> `hvkit install-horovod`, or "
        "`pip install 'torch==2.13.0'`",
    ),
    (
        {"versions": {"tensorflow": "2.22.0"}},
        r"built for TensorFlow 2\.21\.0, but 2\.22\.0 is installed -> .*'tensorflow==2.21.0'",
    ),
    (
        horovod(torch={"error": "libmpi.so.40: no file"}),
        "PyTorch does not load: libmpi.so.40: no file.* -> .*install-horovod --force`, with LD_",
    ),
    (
        horovod(torch={"error": "undefined symbol"}, fits=False),
        "does not load: undefined symbol -> `hvkit install-horovod`, with",
    ),
    ({"launchers": []}, "there is no MPI: neither mpirun nor mpiexec"),
    (
        {"launchers": [{**LAUNCHER, "flavour": None, "version": None, "_first_line": "no home"}]},
        "/opt/venv/bin/mpirun belongs to an unknown MPI; its --version prints: no home",
    ),
    (
        {"launchers": [LAUNCHER, MPICH]},
        "2 MPIs are on PATH: Open MPI 5.0.11 in /opt/venv/bin and MPICH 4.2.0 in /usr/bin.* -> "
        r"keep Open MPI 5\.0\.11 \(Horovod uses it\): uninstall the other or take /usr/bin off",
    ),
    (
        {"launchers": [MPICH]},
        r"uses Open MPI 5\.0\.11, but /usr/bin/mpirun belongs to MPICH 4\.2\.0.* -> "
        "put the folder of Open MPI 5.0.11 first on PATH",
    ),
    ({"shared_memory": None}, "there is no /dev/shm"),
    ({"shared_memory": {"size": 64 * MIB, "free": 64 * MIB}}, "/dev/shm has only 64 MiB"),
    ({"shared_memory": {"size": 2048 * MIB, "free": 3 * MIB}}, "/dev/shm is full: 3 of 2048 MiB"),
    (
        {"limits": {"locked_memory": 64 * 1024}, "infiniband": True},
        "may lock only 64 KiB of memory.*InfiniBand",
    ),
    ({"_gpu_failure": "NVIDIA-SMI has failed"}, "nvidia-smi fails: NVIDIA-SMI has failed"),
    (
        {"gpus": [GPU], "driver_cuda": "12.8"},
        r"PyTorch is built for CUDA 13\.0, but driver 535\.1 supports CUDA 12\.8 at most.* -> "
        ".*a newer driver, or a PyTorch for CUDA 12",
    ),
    (
        {"addresses": []},
        "the hostname node1 does not resolve.* -> put the line `10.0.0.1 node1` into /etc/hosts"
        ".*--add-host node1:10.0.0.1",
    ),
    (
        {"addresses": [], "interfaces": machine()["interfaces"][:1]},
        r"the hostname node1 does not resolve.* -> .*`127\.0\.1\.1 node1`",
    ),
    (self_test("no mpirun"), "^the self-test did not start: no mpirun -> "),
    (
        self_test(None, "the sum is wrong", None),
        "^the self-test of framework0 failed: the sum is wrong -> .*repeat it with `mpirun x`$",
    ),
]
NOTES = [
    (
        {"horovod": {"fits": False, "differences": ["mpi: Open MPI 4.1.4 -> Open MPI 5.0.11"]}},
        r"build this Horovod differently now \(mpi: Open MPI 4\.1\.4 -> Open MPI 5\.0\.11\)",
    ),
    ({"versions": {"torch": None}}, "is also built for PyTorch, which is not installed"),
    (
        {"launchers": [], **horovod(*[{"controllers": ["gloo"], "mpi": None}] * 2)},
        "there is no MPI; this Horovod needs none",
    ),
    (
        {"launchers": [{**LAUNCHER, "version": "5.0.12"}]},
        r"Horovod uses Open MPI 5\.0\.11, but .*5\.0\.12",
    ),
    ({"launchers": [{**LAUNCHER, "on_path": False}]}, "not on PATH"),
    (
        {"launchers": [LAUNCHER, {**LAUNCHER, "program": "/usr/bin/mpirun"}]},
        "the same MPI is on PATH in several folders",
    ),
    ({"memory": {"available": 500 * MIB}}, "only 500 MiB of memory"),
    (
        {"threads": {"OMP_NUM_THREADS": "64"}},
        "=64 is more than the 8 usable cores.* -> .*unset OMP",
    ),
    (
        {"threads": {"OMP_NUM_THREADS": "4"}, "cores": {"limit": 1.5}},
        "OMP_NUM_THREADS=4 is more than the 2 usable cores",
    ),
    ({"threads": {"MKL_NUM_THREADS": "0"}}, "not to a positive number.*unset MKL"),
    ({"threads": {"MKL_NUM_THREADS": "?"}}, "not to a positive number"),
    ({"limits": {"open_files": 256}}, "only 256 files"),
    ({"ssh": NO_SSH}, "there is no ssh"),
    ({"_launched": "one of 2, started by mpirun"}, "this shell is a rank: one of 2"),
    (
        {"addresses": ["127.0.1.1"]},
        "resolves to 127.0.1.1, which only this host reaches.* -> .*the line `10.0.0.1 node1`",
    ),
    ({"addresses": ["192.0.2.9"]}, "resolves to 192.0.2.9, which no interface here has"),
    ({"gpus": [GPU] * 2, "driver_cuda": "13.0"}, "2 GPUs, but Horovod is built without NCCL"),
    ({**NEW_GPU, "torch_cuda": None}, "this PyTorch is the CPU version"),
    (
        {**NEW_GPU, "_tensorflows": ["tensorflow-cpu 2.21.0"]},
        "tensorflow-cpu 2.21.0 does not use them",
    ),
    ({**NEW_GPU, "environment": ["CUDA_VISIBLE_DEVICES"]}, "CUDA_VISIBLE_DEVICES is set"),
]

CASES = {"problems": PROBLEMS, "notes": NOTES}
NOTHING = {"problems": [], "notes": []}


@pytest.mark.parametrize(
    ("severity", "changes", "expected"),
    [(severity, *case) for severity, cases in CASES.items() for case in cases],
)
def test_a_finding_has_its_severity_and_its_fix(severity, changes, expected):
    found = findings(machine(**changes))
    (one,) = found.pop(severity)
    assert [*found.values()] == [[]]
    assert re.search(expected, f"{one['what']} -> {one['fix']}")


@pytest.mark.parametrize("severity", CASES)
def test_every_rule_has_a_case(severity):
    # Only a case shows that the names in a rule's condition and sentences exist.
    found = [findings(machine(**changes))[severity] for changes, _ in CASES[severity]]
    sentences = [one["what"] for each in found for one in each]
    texts = [rule[name] for rule in TABLE["rules"] if (name := severity[:-1]) in rule]
    patterns = [re.sub(r"\\{.*?\\}\\}", ".*", re.escape(text)) for text in texts]
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
