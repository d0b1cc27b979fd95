"""Facts read from stand-in programs, packages and libraries, and from folders like the kernel's."""

import json
import os
import shutil
import signal
import subprocess
import sys
from threading import Event

import pytest

from hvkit.doctor import facts
from hvkit.doctor.facts import (
    LOAD_LIBRARY,
    changes,
    compilers,
    infiniband,
    library_from,
    mpi_launchers,
    own_addresses,
    rank_of,
    setting_names,
    shared_memory,
    tensorflows,
    thread_settings,
    torch_cuda,
    unmet_requirements,
    versions,
)
from hvkit.host.hardware import CgroupLimits, Gpu, cgroup_limits, gpus
from hvkit.host.system import Output
from hvkit.launching.launchers import MpiVersion, identify


def test_gpus_as_nvidia_smi_lists_them(program, monkeypatch):
    rows = "0, NVIDIA H200, 143771, 580.65.06\n1, NVIDIA GB10, [N/A], 580.65.06"
    path = program("nvidia-smi", f'echo "$*" > "$0.arguments"; echo "{rows}"')
    monkeypatch.setenv("PATH", f"{path.parent}:/bin:/usr/bin")
    found = gpus()
    assert found.failure is None
    assert found.found == (
        Gpu(0, "NVIDIA H200", 143771 * 1024**2, "580.65.06"),
        Gpu(1, "NVIDIA GB10", None, "580.65.06"),
    )
    arguments = path.with_name("nvidia-smi.arguments").read_text()
    assert "--query-gpu=index,name,memory.total,driver_version" in arguments
    program("nvidia-smi", "echo 'NVIDIA-SMI has failed because x'; echo more; exit 9")
    assert gpus().failure == "NVIDIA-SMI has failed because x"
    path.unlink()
    assert gpus().failure is None


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_limit_of_control_groups_counts(tmp_path):
    assert cgroup_limits(tmp_path, tmp_path / "own") == CgroupLimits(None, None)
    write(tmp_path, own="0::/job/step")
    write(tmp_path / "job", cpu__max="150000 100000", memory__max="1073741824")
    write(tmp_path / "job" / "step", cpu__max="400000 100000", memory__max="max")
    assert cgroup_limits(tmp_path, tmp_path / "own") == CgroupLimits(1.5, 1024**3)


def test_limits_of_control_groups_of_version_1(tmp_path):
    write(tmp_path, own="4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/")
    write(tmp_path / "cpu", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    write(tmp_path / "memory", memory__limit_in_bytes="2048")
    assert cgroup_limits(tmp_path, tmp_path / "own") == CgroupLimits(2.0, 2048)
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1")
    assert cgroup_limits(tmp_path, tmp_path / "own").cpus is None


def test_size_of_shared_memory(tmp_path):
    found = shared_memory(tmp_path)
    assert found is not None
    assert 0 < found["free"] <= found["size"]
    assert shared_memory(tmp_path / "not there") is None


def test_infiniband_is_a_folder_of_devices(tmp_path):
    assert not infiniband(tmp_path / "not there")
    assert not infiniband(tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    assert infiniband(tmp_path)


def test_a_resolver_that_does_not_answer_is_given_up(monkeypatch):
    release = Event()
    monkeypatch.setattr("hvkit.doctor.facts._SECONDS_TO_RESOLVE", 0.05)
    monkeypatch.setattr("hvkit.doctor.facts.addresses_of", lambda name: [release.wait(60)])
    assert own_addresses() == []
    release.set()


def test_threads_are_shown_and_other_values_never():
    environ = {
        "OMP_NUM_THREADS": "4,2",
        "MKL_NUM_THREADS": "my password",
        "OMPI_MCA_btl": "x",
        "CUDA_VISIBLE_DEVICES": "",
        "EDITOR": "vi",
    }
    assert thread_settings(environ) == {"OMP_NUM_THREADS": "4,2", "MKL_NUM_THREADS": "?"}
    assert setting_names(environ) == ["CUDA_VISIBLE_DEVICES", "OMPI_MCA_btl"]


def test_a_shell_that_is_a_rank_is_recognised_by_its_environment():
    assert rank_of({}) is None
    assert rank_of({"OMPI_COMM_WORLD_SIZE": "2"}) == "one of 2, started by mpirun"
    assert "'two'" in (rank_of({"OMPI_COMM_WORLD_SIZE": "two"}) or "")


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


BUILT = "".join(
    f"int horovod_{name}_built() {{ return {int(name in ('mpi', 'nccl'))}; }}\n"
    for name in ("mpi", "gloo", "nccl", "ddl", "ccl")
)
MPI = """
int MPI_Get_library_version(char *text, int *length) {
    *length = __builtin_sprintf(text, "Open MPI v5.0.11, package: x");
    return 0;
}
"""
MISSING = "int not_anywhere(); int horovod_init() { return not_anywhere(); }\n"


@pytest.fixture
def load(tmp_path):
    """Compile C++ into a library, which may lack symbols, and load it."""

    def run(source):
        file = tmp_path / "mpi_lib.so"
        compiler = shutil.which("c++") or shutil.which("g++")
        command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(file)]
        text = f'extern "C" {{\n{source}}}\n'
        subprocess.run(command, input=text, text=True, check=True, timeout=120)
        command = [sys.executable, "-I", "-c", LOAD_LIBRARY, str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return run


def test_features_and_the_mpi_that_is_loaded(load):
    done = load(BUILT + MPI)
    assert done.returncode == 0
    found = {"features": ["nccl", "mpi"], "mpi": "Open MPI v5.0.11, package: x"}
    assert json.loads(done.stdout.removeprefix("hvkit:")) == found


def test_a_symbol_that_is_missing_is_named_before_it_is_used(load):
    done = load(BUILT + MPI + MISSING)
    assert (done.returncode, done.stdout) == (1, "")
    assert "undefined symbol: not_anywhere" in done.stderr


def test_a_library_that_crashes_ends_its_own_process_only(load):
    crash = "__attribute__((constructor)) void crash() { __builtin_trap(); }\n"
    assert load(BUILT + MPI + crash).returncode < 0


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (Output(1, "", "noise\nlibmpi.so.40: cannot open\n"), "libmpi.so.40: cannot open"),
        (Output(-signal.SIGILL), "loading it ends with SIGILL"),
        (Output(None), "it does not load within 60 s"),
        (Output(1), "it does not load"),
    ],
)
def test_the_error_of_a_library_that_does_not_load(output, why):
    assert library_from("torch", "2.13.0", output) == {
        "framework": "torch",
        "built_for": "2.13.0",
        "error": why,
        "controllers": [],
        "operations": [],
        "mpi": None,
    }


def test_changes_between_builds_hide_the_users_values():
    before = {"mpi": "MPICH 4.2.0", "CXXFLAGS": "-DKEY=secret", "gpu": "none"}
    now = {"mpi": "Open MPI 5.0.11", "gpu": "none"}
    assert changes(before, now) == ["mpi: MPICH 4.2.0 -> Open MPI 5.0.11", "CXXFLAGS"]
