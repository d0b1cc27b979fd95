"""Why a wheel that is built already does not fit a machine, and its platform's tag."""

import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from hvkit.build import wheels
from hvkit.build.frameworks import InstalledFramework
from hvkit.build.wheels import misfits


def installed(**versions):
    return lambda machine: {
        "frameworks": tuple(InstalledFramework(n, v, Path("/")) for n, v in versions.items())
    }


def mpi_elsewhere(library, **changes):
    """Another MPI, whose library has this name."""

    def change(machine):
        folder = machine.mpi.library_dir.parent / "elsewhere"
        folder.mkdir()
        (folder / library).touch()
        return {"mpi": replace(machine.mpi, library_dir=folder, **changes)}

    return change


@pytest.mark.parametrize(
    ("of_machine", "reason"),
    [
        (lambda m: {}, None),
        (installed(pytorch="2.14.0", tensorflow="2.21.1"), None),
        (installed(pytorch="2.15.0"), "for PyTorch 2.13.0, and 2.15.0 is installed"),
        (
            installed(pytorch="2.13.0", tensorflow="2.20.0"),
            "for TensorFlow 2.21.0, and 2.20.0 is installed",
        ),
        (installed(pytorch="2.13.0"), "TensorFlow as well, which is not installed"),
        (lambda m: {"cuda": "13.0"}, "built without NCCL"),
        (lambda m: {"environ": {**m.environ, "CXXFLAGS": "-m64"}}, "values: CXXFLAGS"),
        (
            mpi_elsewhere("libmpi.so.12", flavour="MPICH", version="5.0.2"),
            "needs libmpi.so.40, which MPICH 5.0.2 .* does not have",
        ),
        (mpi_elsewhere("libmpi.so.40"), "it would load the MPI in .*lib instead of Open MPI 5.0.1"),
        (lambda m: {"environ": {}}, "it would not find Open MPI .*LD_LIBRARY_PATH to"),
    ],
)
def test_another_machine_is_named_as_the_reason(abi, machine, of_machine, reason):
    found = misfits(abi, replace(machine, **of_machine(machine)))
    assert re.search(reason, " ".join(found)) if reason else found == []


@pytest.mark.parametrize(
    ("of_wheel", "reason"),
    [
        ({"patches": "0"}, "another version of hvkit built it"),
        ({"python": "cpython-39"}, "it is for Python's ABI cpython-39, this is"),
        ({"platform": "manylinux_2_99_x86_64"}, "needs manylinux_2_99_x86_64, which the C library"),
        ({"cpu": ("avx9",)}, "it uses avx9, which this processor lacks"),
        ({"cuda": "13.0"}, "it is built for NCCL"),
    ],
)
def test_another_wheel_is_refused_with_the_reason(abi, machine, of_wheel, reason):
    (found,) = misfits(replace(abi, **of_wheel), machine)
    assert reason in found


def test_the_tag_is_that_of_the_oldest_c_library_that_will_do():
    here = sysconfig.get_platform().rpartition("-")[2]
    old = "NEEDED libmpi.so.40\n 0x1 0x00 05 GLIBC_2.14\n 0x1 0x00 04 GLIBCXX_3.4.21\n"
    assert wheels._platform(old) == f"manylinux_2_17_{here}"
    assert wheels._platform(f"{old} GLIBCXX_3.4.28\n") == f"manylinux_2_31_{here}"
    # No C library here is as new: pip would refuse the wheel where it was built.
    assert wheels._platform(f"{old} GLIBC_2.99\n") == f"linux_{here}"
