"""MPI launchers, compilers and packages, from stand-ins."""

import os
import sys

import pytest

from hvkit.doctor import facts
from hvkit.doctor.facts import (
    compilers,
    mpi_launchers,
    tensorflows,
    torch_cuda,
    unmet_requirements,
    versions,
)
from hvkit.launching.launchers import MpiVersion, identify

INTEL = "Intel(R) MPI Library"


@pytest.mark.parametrize(
    ("text", "mpi"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to", "Open MPI 5.0.11"),
        ("mpiexec (OpenRTE) 4.1.4", "Open MPI 4.1.4"),
        ("Open MPI v5.0.11, package: Open MPI x, ident: 5.0.11", "Open MPI 5.0.11"),
        ("HYDRA build details:\n    Version:      4.2.0\n", "MPICH 4.2.0"),
        ("MPICH Version:      4.2.0\nMPICH Release date: x", "MPICH 4.2.0"),
        (f"{INTEL} for Linux* OS, Version 2021.13 Build 2024 (id: x)", "Intel MPI 2021.13"),
        (f"{INTEL} 2021.13 for Linux* OS", "Intel MPI 2021.13"),
    ],
)
def test_launchers_and_libraries_name_their_mpi(text, mpi):
    assert identify(text) == MpiVersion(*mpi.rsplit(" ", 1))


def test_other_programs_are_no_mpi():
    assert identify("something else 1.0") is None
    assert identify("") is None


def test_every_mpi_on_path_is_found_once(program, tmp_path, monkeypatch):
    mpirun = program("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    program("mpiexec", "echo 'mpiexec (OpenRTE) 4.1.4'")
    alias = tmp_path / "alias"
    alias.symlink_to(mpirun.parent)
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "mpiexec").symlink_to(program("broken", "echo no home >&2; exit 1"))
    path = os.pathsep.join(["", str(tmp_path / "not there"), str(mpirun.parent), str(alias)])
    monkeypatch.setenv("PATH", path)
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    assert [tuple(each.values()) for each in mpi_launchers()] == [
        ("Open MPI", "4.1.4", str(mpirun), True, None),
        (None, None, str(beside / "mpiexec"), False, "no home"),
    ]


def test_versions_of_compilers(program, monkeypatch):
    folder = program(
        "g++", "echo 'g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022'"
    ).parent
    program("cmake", "echo 'cmake version 3.31.6\n\nCMake suite'")
    program("nvcc", "echo 'Copyright (c) 2005-2025\nCuda tools, release 13.0, V13.0.48'")
    monkeypatch.setenv("PATH", str(folder))
    assert compilers() == {"c++": "12.2.0", "cmake": "3.31.6", "nvcc": "13.0"}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """The folder of packages of an environment that has no others."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(facts, "folder_of", lambda module: None)
    return tmp_path


def test_requirements_that_are_not_met(packages):
    for name, version, *requirements in (
        ("numpy", "1.26.4"),
        ("mpi4py", "4.1.2"),
        ("hvkit", "0.1.0", "mpi4py>=4.2", "numpy"),
        ("keras", "3.3.0", "numpy", "absl-py", "optree; extra == 'more'"),
        ("tensorflow_cpu", "2.21.0", "keras>=3.12.0", "numpy>=1.26", "x; python_version < '3'"),
    ):
        folder = packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {one}" for one in requirements]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
    assert [tuple(one.values()) for one in unmet_requirements()] == [
        ("hvkit 0.1.0", "mpi4py>=4.2", "4.1.2"),
        ("keras 3.3.0", "absl-py", None),
        ("tensorflow-cpu 2.21.0", "keras>=3.12.0", "3.3.0"),
    ]
    found = versions()
    assert (found["tensorflow"], found["torch"], found["mpi4py"]) == ("2.21.0", None, "4.1.2")
    assert tensorflows() == ["tensorflow-cpu 2.21.0"]


def test_cuda_of_pytorch(tmp_path, monkeypatch):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "version.py").write_text("debug = False\ncuda: Optional[str] = '13.0'\nhip = None\n")
    monkeypatch.setattr(facts, "folder_of", lambda module: folder)
    assert torch_cuda() == "13.0"
