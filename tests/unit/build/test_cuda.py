"""The toolkit chosen for a build for NCCL, on prepared machines."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hvkit.build import cuda
from hvkit.build.cuda import (
    Toolkit,
    complete_wheels,
    fetch_toolkit,
    has_nvidia_gpu,
    read_toolkit,
    system_toolkits,
    toolkit_for,
)
from hvkit.build.frameworks import Framework
from hvkit.errors import BuildError

Script = Callable[..., Path]

LIBRARIES = ("libcudart.so", "libcudart_static.a")


def make_toolkit(home, version="13.0", libraries="lib64"):
    """A toolkit with an nvcc that cannot compile; returns the nvcc."""
    for file in ("include/cuda_runtime.h", *(f"{libraries}/{name}" for name in LIBRARIES)):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir()
    # The real nvcc prints its own folder on stderr with --dryrun.
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        f'--version) echo "Cuda compilation tools, release {version}, V{version}.88";;\n'
        f'--dryrun) echo "#$ _HERE_={home}/bin" >&2; echo "#$ TOP={home}/bin/.." >&2;;\n'
        "*) exit 1;;\n"
        "esac\n"
    )
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture(autouse=True)
def machine(script, tmp_path, monkeypatch):
    """A machine without a toolkit and without a GPU."""
    monkeypatch.setattr(cuda, "DEFAULT_HOME", str(tmp_path / "usr" / "local" / "cuda"))
    monkeypatch.setattr(cuda, "has_nvidia_gpu", lambda: False)
    for name in [name for name in os.environ if name.startswith(("HOROVOD_", "CUDA_"))]:
        monkeypatch.delenv(name)
    return script


@pytest.fixture
def gpu(monkeypatch):
    """A GPU."""
    monkeypatch.setattr(cuda, "has_nvidia_gpu", lambda: True)


def pytorch(folder, built_for):
    """A PyTorch whose version does not show what it is built for."""
    (folder / "torch").mkdir()
    (folder / "torch" / "version.py").write_text(
        f"__version__ = '2.13.0'\ncuda: Optional[str] = {built_for!r}\nhip: Optional[str] = None\n"
    )
    return Framework("pytorch", "2.13.0", folder)


class TestReading:
    """nvcc itself prints where its toolkit is."""

    def test_script_in_a_general_folder(self, machine, tmp_path):
        nvcc = make_toolkit(tmp_path / "cuda-13.0")
        script = machine("nvcc", f'exec {nvcc} "$@"')
        assert read_toolkit(str(script)) == Toolkit(tmp_path / "cuda-13.0", "13.0")

    def test_link_elsewhere(self, machine, tmp_path):
        nvcc = make_toolkit(tmp_path / "cuda-12.8", "12.8")
        link = machine("nvcc")
        link.unlink()
        link.symlink_to(nvcc)
        assert read_toolkit(str(link)) == Toolkit(tmp_path / "cuda-12.8", "12.8")

    def test_folder_of_links_to_a_toolkit_that_lies_elsewhere(self, tmp_path):
        nvcc = make_toolkit(tmp_path / "usr" / "lib" / "nvidia-cuda-toolkit")
        home = tmp_path / "usr" / "lib" / "cuda"
        home.mkdir()
        for folder in ("bin", "include", "lib64"):
            (home / folder).symlink_to(nvcc.parent.parent / folder)
        (nvcc.parent.parent / "include").rename(tmp_path / "usr" / "include")
        (home / "include").unlink()
        (home / "include").symlink_to(tmp_path / "usr" / "include")
        assert read_toolkit(str(home / "bin" / "nvcc")) == Toolkit(home, "13.0")

    def test_nvcc_that_fails_after_printing_its_folder(self, machine, tmp_path):
        script = machine("nvcc", f'{make_toolkit(tmp_path / "cuda")} "$@"; exit 1')
        assert read_toolkit(str(script)) == Toolkit(tmp_path / "cuda", "13.0")

    def test_other_programs_are_not_nvcc(self, machine, tmp_path):
        assert read_toolkit(str(machine("nvcc", "echo not found; exit 127"))) is None
        assert read_toolkit(str(tmp_path / "nowhere" / "nvcc")) is None

    def test_all_toolkits_of_the_machine_once_each_the_users_first(self, machine, tmp_path):
        local = tmp_path / "usr" / "local"
        mine, path, default = tmp_path / "mine", tmp_path / "other", local / "cuda-13.0"
        make_toolkit(mine, "12.6")
        machine("nvcc", f'exec {make_toolkit(path, "12.8")} "$@"')
        make_toolkit(default)
        (local / "cuda").symlink_to(default)
        environ = {"CUDA_HOME": str(mine), "PATH": os.environ["PATH"]}
        assert [found.home for found in system_toolkits(environ)] == [mine, path, default]


class TestMissing:
    """A toolkit is complete if Horovod can be compiled and linked with it."""

    def test_nothing_is_missing(self, tmp_path):
        make_toolkit(tmp_path / "cuda")
        assert Toolkit(tmp_path / "cuda", "13.0").missing == []

    def test_files_below_targets(self, tmp_path):
        home = tmp_path / "cuda"
        make_toolkit(home)
        target = home / "targets" / "x86_64-linux"
        target.mkdir(parents=True)
        (home / "include").rename(target / "include")
        (home / "lib64").rename(target / "lib")
        assert Toolkit(home, "13.0").missing == []

    def test_libraries_outside_the_linkers_search_path(self, tmp_path):
        make_toolkit(tmp_path / "cuda", libraries="lib")
        assert Toolkit(tmp_path / "cuda", "13.0").missing == list(LIBRARIES)

    @pytest.mark.parametrize("file", LIBRARIES)
    def test_library_missing(self, tmp_path, file):
        make_toolkit(tmp_path / "cuda")
        (tmp_path / "cuda" / "lib64" / file).unlink()
        assert Toolkit(tmp_path / "cuda", "13.0").missing == [file]


class TestChoice:
    """``--gpu`` and the machine decide."""

    def test_auto_without_a_gpu_leaves_cuda_out_also_where_a_toolkit_is(self, machine, tmp_path):
        machine("nvcc", f'exec {make_toolkit(tmp_path / "cuda")} "$@"')
        assert toolkit_for("auto", [pytorch(tmp_path, "13.0")]) is None

    @pytest.mark.usefixtures("gpu")
    def test_none_leaves_cuda_out_on_a_machine_with_a_gpu(self, tmp_path):
        environ = {"HOROVOD_GPU_OPERATIONS": "MPI"}
        assert toolkit_for("none", [pytorch(tmp_path, "13.0")], environ) is None

    @pytest.mark.usefixtures("gpu")
    def test_auto_with_a_gpu_takes_the_systems_toolkit(self, machine, tmp_path):
        machine("nvcc", f'exec {make_toolkit(tmp_path / "cuda")} "$@"')
        found = toolkit_for("auto", [pytorch(tmp_path, "13.0")])
        assert found == Toolkit(tmp_path / "cuda", "13.0")

    def test_without_a_toolkit_wheels_provide_one(self, tmp_path, cache):
        found = toolkit_for("nccl", [pytorch(tmp_path, "13.0")])
        assert found == Toolkit(cache / "cuda" / "13.0", "13.0")
        assert str(found) == "CUDA 13.0 (NVIDIA's wheels)"

    def test_wheels_replace_a_toolkit_without_libraries(self, machine, tmp_path, cache):
        nvcc = make_toolkit(tmp_path / "cuda")
        (tmp_path / "cuda" / "lib64" / "libcudart.so").unlink()
        machine("nvcc", f'exec {nvcc} "$@"')
        found = toolkit_for("nccl", [pytorch(tmp_path, "13.0")])
        assert found == Toolkit(cache / "cuda" / "13.0", "13.0")

    def test_wheels_replace_a_toolkit_of_another_version(self, machine, tmp_path, cache):
        machine("nvcc", f'exec {make_toolkit(tmp_path / "cuda", "13.2")} "$@"')
        found = toolkit_for("nccl", [pytorch(tmp_path, "13.0")])
        assert found == Toolkit(cache / "cuda" / "13.0", "13.0")

    def test_one_of_several_toolkits_fits(self, machine, tmp_path):
        machine("nvcc", f'exec {make_toolkit(tmp_path / "cuda", "12.4")} "$@"')
        make_toolkit(tmp_path / "usr" / "local" / "cuda-13.0")
        found = toolkit_for("nccl", [pytorch(tmp_path, "13.0")])
        assert found == Toolkit(tmp_path / "usr" / "local" / "cuda-13.0", "13.0")

    def test_before_cuda_13_a_near_version_is_used_as_wheels_have_no_nvcc(self, machine, tmp_path):
        machine("nvcc", f'exec {make_toolkit(tmp_path / "cuda", "12.4")} "$@"')
        found = toolkit_for("nccl", [pytorch(tmp_path, "12.8")])
        assert found == Toolkit(tmp_path / "cuda", "12.4")

    def test_before_cuda_13_no_fitting_toolkit_is_an_error(self, machine, tmp_path):
        machine("nvcc", f'exec {make_toolkit(tmp_path / "cuda", "13.0")} "$@"')
        broken = make_toolkit(tmp_path / "mine", "12.8")
        (tmp_path / "mine" / "include" / "cuda_runtime.h").unlink()
        environ = {"CUDA_HOME": str(broken.parent.parent), "PATH": os.environ["PATH"]}
        with pytest.raises(BuildError) as caught:
            toolkit_for("nccl", [pytorch(tmp_path, "12.8")], environ)
        assert str(caught.value).startswith(
            "a build for NCCL is not possible: there is no toolkit for CUDA 12.8 "
            f"(CUDA 12.8 in {tmp_path}/mine has no cuda_runtime.h; "
            f"CUDA 13.0 in {tmp_path}/cuda is another version). Install CUDA 12.8 and set CUDA_HOME"
        )

    @pytest.mark.usefixtures("gpu")
    def test_auto_builds_without_nccl_where_it_must_and_prints_why(self, tmp_path, capsys):
        assert toolkit_for("auto", [pytorch(tmp_path, "12.8")]) is None
        printed = capsys.readouterr().out
        assert (
            "this build is without NCCL: there is no toolkit for CUDA 12.8 (no nvcc at all)"
            in printed
        )
        assert "go through the host's memory" in printed

    def test_pytorch_for_cpus_is_named(self, tmp_path):
        with pytest.raises(BuildError, match=r"PyTorch 2\.13\.0 is a build for CPUs.*--without"):
            toolkit_for("nccl", [pytorch(tmp_path, None)])

    def test_tensorflow_alone_sets_the_version_too(self, tmp_path, cache):
        file = tmp_path / "tensorflow" / "python" / "platform" / "build_info.py"
        file.parent.mkdir(parents=True)
        file.write_text("build_info = OrderedDict([('cuda_version', '13.1.0'), ('x', 1)])\n")
        found = toolkit_for("nccl", [Framework("tensorflow", "2.22.0", tmp_path)])
        assert found == Toolkit(cache / "cuda" / "13.1", "13.1")

    def test_tensorflow_for_cpus_is_named(self, tmp_path):
        with pytest.raises(BuildError, match=r"TensorFlow 2\.21\.0 cannot use GPUs"):
            toolkit_for("nccl", [Framework("tensorflow", "2.21.0", tmp_path)])

    @pytest.mark.parametrize("name", ["HOROVOD_GPU_OPERATIONS", "HOROVOD_GPU_ALLREDUCE"])
    def test_horovods_own_variable_counts_as_nccl(self, tmp_path, cache, name):
        environ = {name: "NCCL", "HOROVOD_GPU": "CUDA"}
        found = toolkit_for("auto", [pytorch(tmp_path, "13.0")], environ)
        assert found == Toolkit(cache / "cuda" / "13.0", "13.0")

    def test_other_operations_on_gpus_are_refused(self, tmp_path):
        with pytest.raises(BuildError, match=r"HOROVOD_GPU_OPERATIONS=MPI in the environment"):
            toolkit_for("auto", [pytorch(tmp_path, "13.0")], {"HOROVOD_GPU_OPERATIONS": "MPI"})


class TestWheels:
    """A toolkit assembled from NVIDIA's wheels."""

    @pytest.fixture
    def pip(self, monkeypatch):
        """Calls of pip, each of which leaves the files of the real wheels."""
        calls = []

        def run(arguments, summary):
            calls.append(arguments)
            home = Path(arguments[arguments.index("--target") + 1], "nvidia", "cu13")
            make_toolkit(home, libraries="lib")
            (home / "lib" / "libcudart.so").rename(home / "lib" / "libcudart.so.13")

        monkeypatch.setattr(cuda, "run_pip", run)
        return calls

    def test_is_fetched_once(self, pip, cache):
        toolkit = Toolkit(cache / "cuda" / "13.0", "13.0")
        fetch_toolkit(toolkit)
        fetch_toolkit(toolkit)
        assert toolkit.missing == []
        (arguments,) = pip
        assert "nvidia-cuda-nvcc==13.0.*" in arguments
        assert [path.name for path in toolkit.home.parent.iterdir()] == ["13.0"]

    def test_libraries_get_their_plain_names(self, tmp_path):
        (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
        (tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13").write_text("cudart")
        home = complete_wheels(tmp_path)
        assert (home / "lib64" / "libcudart.so").read_text() == "cudart"
        assert (home / "lib64").readlink() == Path("lib")  # Relative: the folder moves later.

    def test_a_system_toolkit_is_left_alone(self, pip, tmp_path):
        fetch_toolkit(Toolkit(tmp_path / "cuda", "13.0"))
        assert pip == []

    def test_wheels_that_lack_something_are_named(self, cache, monkeypatch):
        def run(arguments, summary):
            Path(arguments[arguments.index("--target") + 1], "nvidia", "cu14", "lib").mkdir(
                parents=True
            )

        monkeypatch.setattr(cuda, "run_pip", run)
        with pytest.raises(BuildError, match=r"wheels for CUDA 14\.0 have no nvcc, cuda_runtime"):
            fetch_toolkit(Toolkit(cache / "cuda" / "14.0", "14.0"))


class TestGpu:
    """Whether there is a GPU."""

    @pytest.fixture
    def devices(self, tmp_path):
        """/dev, with devices that are not GPUs."""
        folder = tmp_path / "dev"
        folder.mkdir()
        (folder / "nvidiactl").touch()
        (folder / "null").touch()
        return folder

    def test_none(self, devices):
        assert not has_nvidia_gpu(devices)

    def test_nvidia_smi_lists_one(self, machine, devices):
        machine("nvidia-smi", "echo 'GPU 0: NVIDIA L4 (UUID: GPU-1)'")
        assert has_nvidia_gpu(devices)

    def test_nvidia_smi_without_gpus(self, machine, devices):
        machine("nvidia-smi", "echo 'No devices were found'; exit 6")
        assert not has_nvidia_gpu(devices)

    def test_device_of_a_container_without_nvidia_smi(self, devices):
        (devices / "nvidia1").touch()
        assert has_nvidia_gpu(devices)
