"""What is read from a machine: programs of stand-ins, and folders like the kernel's."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from hvkit.doctor import packages as packages_module
from hvkit.doctor.compilers import compilers
from hvkit.doctor.horovod import Library, answer, changes
from hvkit.doctor.machine import limits, shared_memory
from hvkit.doctor.mpi import MpiLauncher, mpi_launchers
from hvkit.doctor.network import own_addresses
from hvkit.doctor.packages import Unmet, packages
from hvkit.doctor.settings import rank_of, setting_names, thread_settings
from hvkit.host.commands import Said, ask
from hvkit.host.cpus import Allowance, allowance
from hvkit.host.gpus import Gpu, gpus
from hvkit.launch.launchers import MpiVersion, identify

Program = Callable[[str, str], Path]


@pytest.mark.parametrize(
    ("text", "mpi"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to", MpiVersion("Open MPI", "5.0.11")),
        ("mpirun (Open MPI) 4.1.4", MpiVersion("Open MPI", "4.1.4")),
        ("mpiexec (OpenRTE) 4.1.4", MpiVersion("Open MPI", "4.1.4")),
        ("Open MPI v5.0.11, package: Open MPI x, ident: 5.0.11", MpiVersion("Open MPI", "5.0.11")),
        ("HYDRA build details:\n    Version:      4.2.0\n", MpiVersion("MPICH", "4.2.0")),
        ("MPICH Version:      4.2.0\nMPICH Release date: x", MpiVersion("MPICH", "4.2.0")),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 2024 (id: x)",
            MpiVersion("Intel MPI", "2021.13"),
        ),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", MpiVersion("Intel MPI", "2021.13")),
        ("something else 1.0", None),
        ("", None),
    ],
)
def test_launchers_and_libraries_say_which_mpi_they_are_of(
    text: str, mpi: MpiVersion | None
) -> None:
    assert identify(text) == mpi


def test_every_mpi_on_path_is_found_once(program: Program, tmp_path: Path) -> None:
    mpirun = program("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    program("mpiexec", "echo 'mpiexec (OpenRTE) 4.1.4'")
    alias = tmp_path / "alias"
    alias.symlink_to(mpirun.parent)
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "mpiexec").symlink_to(program("broken", "echo no home >&2; exit 1"))
    path = os.pathsep.join(["", str(tmp_path / "not there"), str(mpirun.parent), str(alias)])
    assert mpi_launchers(path, str(beside)) == (
        MpiLauncher(MpiVersion("Open MPI", "4.1.4"), str(mpirun), True),
        MpiLauncher(None, str(beside / "mpiexec"), False, "no home"),
    )


def test_gpus_as_nvidia_smi_tells(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "0, NVIDIA H200, 143771, 580.65.06\n1, NVIDIA GB10, [N/A], 580.65.06"
    path = program("nvidia-smi", f'echo "$*" > "$0.asked"; echo "{rows}"')
    monkeypatch.setenv("PATH", f"{path.parent}:/bin:/usr/bin")
    found = gpus()
    assert found.failure is None
    assert found.found == (
        Gpu(0, "NVIDIA H200", 143771 * 1024**2, "580.65.06"),
        Gpu(1, "NVIDIA GB10", None, "580.65.06"),
    )
    assert "--query-gpu=index,name,memory.total,driver_version" in (
        path.with_name("nvidia-smi.asked").read_text()
    )


def test_an_nvidia_smi_that_fails_is_quoted(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program("nvidia-smi", "echo 'NVIDIA-SMI has failed because x'; echo more; exit 9")
    monkeypatch.setenv("PATH", str(path.parent))
    assert gpus().failure == "NVIDIA-SMI has failed because x"
    path.unlink()
    assert gpus().failure is None


def test_versions_of_compilers(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = program(
        "g++", "echo 'g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022'"
    ).parent
    program("cmake", "echo 'cmake version 3.31.6\n\nCMake suite'")
    program("nvcc", "echo 'Copyright (c) 2005-2025\nCuda tools, release 13.0, V13.0.48'")
    monkeypatch.setenv("PATH", str(folder))
    assert compilers() == {"c++": "12.2.0", "cmake": "3.31.6", "nvcc": "13.0"}


class TestControlGroups:
    """The tightest limit counts."""

    def test_version_2(self, tmp_path: Path) -> None:
        inner = tmp_path / "job" / "step"
        inner.mkdir(parents=True)
        (tmp_path / "own").write_text("0::/job/step\n")
        (inner / "cpu.max").write_text("400000 100000\n")
        (inner / "memory.max").write_text("max\n")
        (inner.parent / "cpu.max").write_text("150000 100000\n")
        (inner.parent / "memory.max").write_text("1073741824\n")
        assert allowance(tmp_path, tmp_path / "own") == Allowance(1.5, 1024**3)

    def test_version_1(self, tmp_path: Path) -> None:
        own = tmp_path / "own"
        own.write_text("4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/\n")
        for controller, name, value in (
            ("cpu", "cpu.cfs_quota_us", "200000"),
            ("cpu", "cpu.cfs_period_us", "100000"),
            ("memory", "memory.limit_in_bytes", "2048"),
        ):
            (tmp_path / controller).mkdir(exist_ok=True)
            (tmp_path / controller / name).write_text(f"{value}\n")
        assert allowance(tmp_path, own) == Allowance(2.0, 2048)
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
        assert allowance(tmp_path, own).cpus is None

    def test_without_any(self, tmp_path: Path) -> None:
        assert allowance(tmp_path, tmp_path / "own") == Allowance(None, None)


def test_size_of_shared_memory(tmp_path: Path) -> None:
    found = shared_memory(tmp_path)
    assert found is not None
    assert 0 < found.free <= found.size
    assert shared_memory(tmp_path / "not there") is None


def test_infiniband_is_a_folder_of_devices(tmp_path: Path) -> None:
    assert not limits(tmp_path / "not there").infiniband
    assert not limits(tmp_path).infiniband
    (tmp_path / "mlx5_0").mkdir()
    assert limits(tmp_path).infiniband


def test_a_resolver_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Event()
    monkeypatch.setattr("hvkit.doctor.network._SECONDS", 0.05)
    monkeypatch.setattr("hvkit.doctor.network.addresses_of", lambda name: [release.wait(60)])
    assert own_addresses() == ()
    release.set()


def test_commands_that_fail_hang_or_are_missing(program: Program) -> None:
    assert ask([str(program("fails", "echo out; echo err >&2; exit 3"))]) == Said(
        3, "out\n", "err\n"
    )
    assert ask([str(program("hangs", "exec sleep 60"))], timeout=0.2) == Said(None)
    assert ask([str(program("missing", "").with_name("not-there"))]) is None


def test_threads_are_shown_and_other_values_never() -> None:
    environ = {
        "OMP_NUM_THREADS": "4,2",
        "MKL_NUM_THREADS": "my password",
        "OMPI_MCA_btl": "x",
        "CUDA_VISIBLE_DEVICES": "",
        "EDITOR": "vi",
    }
    assert thread_settings(environ) == {"OMP_NUM_THREADS": "4,2", "MKL_NUM_THREADS": "?"}
    assert setting_names(environ) == ("CUDA_VISIBLE_DEVICES", "OMPI_MCA_btl")


def test_a_shell_that_is_a_rank_is_known_by_its_environment() -> None:
    assert rank_of({}) is None
    assert rank_of({"OMPI_COMM_WORLD_SIZE": "2"}) == "one of 2, started by mpirun"
    assert "'two'" in (rank_of({"OMPI_COMM_WORLD_SIZE": "two"}) or "")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (Said(1, "", "noise\nlibmpi.so.40: cannot open\n"), "libmpi.so.40: cannot open"),
        (Said(-signal.SIGILL), "loading it ends with SIGILL"),
        (Said(None), "it does not load within 60 s"),
        (Said(1), "it does not load"),
    ],
)
def test_a_library_that_does_not_load_says_why(said: Said, why: str) -> None:
    assert answer("torch", "2.13.0", said) == Library("torch", "2.13.0", why)


def test_changes_between_builds_show_no_values_of_the_users() -> None:
    before = {"mpi": "MPICH 4.2.0", "CXXFLAGS": "-DKEY=secret", "gpu": "none"}
    now = {"mpi": "Open MPI 5.0.11", "gpu": "none"}
    assert changes(before, now) == ("mpi: MPICH 4.2.0 -> Open MPI 5.0.11", "CXXFLAGS")


class TestPackages:
    """What metadata says, of packages that are not there otherwise."""

    @pytest.fixture
    def install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        monkeypatch.setattr(packages_module, "folder_of", lambda module: None)

        def write(name: str, version: str, *requirements: str) -> None:
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            lines = [f"Name: {name}", f"Version: {version}"]
            lines += [f"Requires-Dist: {one}" for one in requirements]
            (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines]) + "\n")

        return write

    def test_requirements_that_are_not_met(self, install: Callable[..., None]) -> None:
        install("numpy", "1.26.4")
        install("mpi4py", "4.1.2")
        install("hvkit", "0.1.0", "mpi4py>=4.2", "numpy")
        install("keras", "3.3.0", "numpy", "absl-py", "optree; extra == 'more'")
        install(
            "tensorflow_cpu", "2.21.0", "keras>=3.12.0", "numpy>=1.26", "x; python_version < '3'"
        )
        found = packages()
        assert found.unmet == (
            Unmet("hvkit 0.1.0", "mpi4py>=4.2", "4.1.2"),
            Unmet("keras 3.3.0", "absl-py", None),
            Unmet("tensorflow-cpu 2.21.0", "keras>=3.12.0", "3.3.0"),
        )
        assert found.versions["tensorflow"] == "2.21.0"
        assert found.versions["torch"] is None
        assert found.versions["mpi4py"] == "4.1.2"
        assert found.tensorflows == ("tensorflow-cpu 2.21.0",)

    @pytest.mark.parametrize(
        ("line", "cuda"),
        [
            ("cuda: Optional[str] = '13.0'", "13.0"),
            ("cuda = '12.8'", "12.8"),
            ("cuda: Optional[str] = None", None),
            ("cuda_like = '12.8'", None),
        ],
    )
    def test_cuda_of_pytorch(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, cuda: str | None
    ) -> None:
        (tmp_path / "version.py").write_text(f"debug = False\n{line}\nhip = None\n")
        monkeypatch.setattr(packages_module, "folder_of", lambda module: tmp_path)
        assert packages().torch_cuda == cuda
