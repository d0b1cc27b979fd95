"""The toolkit chosen for a build for NCCL, on prepared machines."""

import os
from pathlib import Path

import pytest
from scripts import write_program

from hvkit.build import cuda
from hvkit.build.cuda import (
    Toolkit,
    fetch_toolkit,
    has_nvidia_gpu,
    read_toolkit,
    system_toolkits,
    toolkit_for,
)
from hvkit.build.frameworks import InstalledFramework
from hvkit.errors import BuildError

LIBRARIES = ("libcudart.so", "libcudart_static.a")


def make_toolkit(home, version="13.0", libraries="lib64"):
    """A toolkit with an nvcc that cannot compile; returns the nvcc."""
    for file in ("include/cuda_runtime.h", *(f"{libraries}/{name}" for name in LIBRARIES)):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    # The real nvcc prints its own folder on stderr with --dryrun.
    return write_program(
        home / "bin" / "nvcc",
        'case "$1" in\n'
        f'--version) echo "Cuda compilation tools, release {version}, V{version}.88";;\n'
        f'--dryrun) echo "#$ _HERE_={home}/bin" >&2; echo "#$ TOP={home}/bin/.." >&2;;\n'
        "*) exit 1;;\n"
        "esac",
    )


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


def pytorch(folder, built_for="13.0"):
    """A PyTorch whose version does not show what it is built for."""
    (folder / "torch").mkdir()
    (folder / "torch" / "version.py").write_text(
        f"__version__ = '2.13.0'\ncuda: Optional[str] = {built_for!r}\nhip: Optional[str] = None\n"
    )
    return [InstalledFramework("pytorch", "2.13.0", folder)]


def tensorflow(folder, info):
    file = folder / "tensorflow" / "python" / "platform" / "build_info.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"build_info = OrderedDict([{info}, ('x', 1)])\n")
    return [InstalledFramework("tensorflow", "2.21.0", folder)]


def test_nvcc_is_read_behind_a_script_also_if_that_fails(machine, tmp_path):
    home = tmp_path / "cuda-13.0"
    nvcc = make_toolkit(home)
    for line in (f'exec {nvcc} "$@"', f'{nvcc} "$@"; exit 1'):
        assert read_toolkit(str(machine("nvcc", line))) == Toolkit(home, "13.0")


def test_nvcc_is_read_behind_a_link(machine, tmp_path):
    nvcc = make_toolkit(tmp_path / "cuda-12.8", "12.8")
    link = machine("nvcc")
    link.unlink()
    link.symlink_to(nvcc)
    assert read_toolkit(str(link)) == Toolkit(tmp_path / "cuda-12.8", "12.8")


def test_a_folder_of_links_is_a_toolkit(tmp_path):
    nvcc = make_toolkit(tmp_path / "usr" / "lib" / "nvidia-cuda-toolkit")
    home = tmp_path / "usr" / "lib" / "cuda"
    home.mkdir()
    (nvcc.parent.parent / "include").rename(tmp_path / "usr" / "include")
    (home / "include").symlink_to(tmp_path / "usr" / "include")
    for folder in ("bin", "lib64"):
        (home / folder).symlink_to(nvcc.parent.parent / folder)
    assert read_toolkit(str(home / "bin" / "nvcc")) == Toolkit(home, "13.0")


def test_other_programs_are_not_nvcc(machine, tmp_path):
    assert read_toolkit(str(machine("nvcc", "echo not found; exit 127"))) is None
    assert read_toolkit(str(tmp_path / "nowhere" / "nvcc")) is None


def test_all_toolkits_of_the_machine_are_found_once_each_the_users_first(machine, tmp_path):
    local = tmp_path / "usr" / "local"
    mine, path, default = tmp_path / "mine", tmp_path / "other", local / "cuda-13.0"
    make_toolkit(mine, "12.6")
    machine("nvcc", f'exec {make_toolkit(path, "12.8")} "$@"')
    make_toolkit(default)
    (local / "cuda").symlink_to(default)
    environ = {"CUDA_HOME": str(mine), "PATH": os.environ["PATH"]}
    assert [found.home for found in system_toolkits(environ)] == [mine, path, default]


def test_files_below_targets_make_a_toolkit_complete(tmp_path):
    home = tmp_path / "cuda"
    make_toolkit(home)
    target = home / "targets" / "x86_64-linux"
    target.mkdir(parents=True)
    (home / "include").rename(target / "include")
    (home / "lib64").rename(target / "lib")
    assert Toolkit(home, "13.0").missing == []


def test_libraries_that_the_linker_does_not_find_are_missing(tmp_path):
    make_toolkit(tmp_path / "cuda")
    assert Toolkit(tmp_path / "cuda", "13.0").missing == []
    (tmp_path / "cuda" / "lib64" / LIBRARIES[0]).unlink()
    assert Toolkit(tmp_path / "cuda", "13.0").missing == [LIBRARIES[0]]
    make_toolkit(tmp_path / "other", libraries="lib")
    assert Toolkit(tmp_path / "other", "13.0").missing == list(LIBRARIES)


@pytest.mark.parametrize(
    ("choice", "has_gpu", "built_for", "on_path", "chosen"),
    [
        ("auto", False, "13.0", "13.0", None),
        ("auto", True, "13.0", "13.0", "on path"),
        ("none", True, "13.0", "13.0", None),
        ("nccl", False, "13.0", None, "wheels"),
        ("nccl", False, "13.0", "13.2", "wheels"),
        # NVIDIA's wheels have no nvcc before CUDA 13, so a near version is used.
        ("nccl", False, "12.8", "12.4", "on path"),
    ],
)
def test_the_choice_and_the_machine_decide(
    machine, tmp_path, cache, monkeypatch, choice, has_gpu, built_for, on_path, chosen
):
    monkeypatch.setattr(cuda, "has_nvidia_gpu", lambda: has_gpu)
    if on_path:
        machine("nvcc", f'exec {make_toolkit(tmp_path / "cuda", on_path)} "$@"')
    found = toolkit_for(choice, pytorch(tmp_path, built_for))
    assert (
        found
        == {
            None: None,
            "on path": Toolkit(tmp_path / "cuda", on_path),
            "wheels": Toolkit(cache / "cuda" / built_for, built_for),
        }[chosen]
    )
    if chosen == "wheels":
        assert str(found) == "CUDA 13.0 (NVIDIA's wheels)"


def test_wheels_replace_a_toolkit_without_libraries(machine, tmp_path, cache):
    machine("nvcc", f'exec {make_toolkit(tmp_path / "cuda")} "$@"')
    (tmp_path / "cuda" / "lib64" / "libcudart.so").unlink()
    assert toolkit_for("nccl", pytorch(tmp_path)) == Toolkit(cache / "cuda" / "13.0", "13.0")


def test_one_of_several_toolkits_fits(machine, tmp_path):
    machine("nvcc", f'exec {make_toolkit(tmp_path / "cuda", "12.4")} "$@"')
    right = tmp_path / "usr" / "local" / "cuda-13.0"
    make_toolkit(right)
    assert toolkit_for("nccl", pytorch(tmp_path)) == Toolkit(right, "13.0")


def test_before_cuda_13_no_fitting_toolkit_is_an_error(machine, tmp_path):
    machine("nvcc", f'exec {make_toolkit(tmp_path / "cuda", "13.0")} "$@"')
    make_toolkit(tmp_path / "mine", "12.8")
    (tmp_path / "mine" / "include" / "cuda_runtime.h").unlink()
    environ = {"CUDA_HOME": str(tmp_path / "mine"), "PATH": os.environ["PATH"]}
    with pytest.raises(BuildError) as caught:
        toolkit_for("nccl", pytorch(tmp_path, "12.8"), environ)
    assert str(caught.value).startswith(
        "a build for NCCL is not possible: there is no toolkit for CUDA 12.8 "
        f"(CUDA 12.8 in {tmp_path}/mine has no cuda_runtime.h; "
        f"CUDA 13.0 in {tmp_path}/cuda is another version). Install CUDA 12.8 and set CUDA_HOME"
    )


@pytest.mark.usefixtures("gpu")
def test_auto_builds_without_nccl_where_it_must_and_prints_why(tmp_path, capsys):
    assert toolkit_for("auto", pytorch(tmp_path, "12.8")) is None
    assert (
        "this build is without NCCL: there is no toolkit for CUDA 12.8 (no nvcc at all)"
    ) in capsys.readouterr().out


def test_tensorflow_alone_sets_the_version_too(tmp_path, cache):
    found = toolkit_for("nccl", tensorflow(tmp_path, "('cuda_version', '13.1.0')"))
    assert found == Toolkit(cache / "cuda" / "13.1", "13.1")


def test_frameworks_for_cpus_are_named(tmp_path):
    with pytest.raises(BuildError, match=r"PyTorch 2\.13\.0 is a build for CPUs.*--without"):
        toolkit_for("nccl", pytorch(tmp_path, None))
    with pytest.raises(BuildError, match=r"TensorFlow 2\.21\.0 cannot use GPUs"):
        toolkit_for("nccl", tensorflow(tmp_path, "('is_cuda_build', False)"))


@pytest.mark.parametrize("name", ["HOROVOD_GPU_OPERATIONS", "HOROVOD_GPU_ALLREDUCE"])
def test_horovods_own_variable_counts_as_nccl(tmp_path, cache, name):
    environ = {name: "NCCL", "HOROVOD_GPU": "CUDA"}
    found = toolkit_for("auto", pytorch(tmp_path), environ)
    assert found == Toolkit(cache / "cuda" / "13.0", "13.0")


def test_other_operations_on_gpus_are_refused_in_a_build_that_may_be_for_gpus(tmp_path):
    environ, frameworks = {"HOROVOD_GPU_OPERATIONS": "MPI"}, pytorch(tmp_path)
    with pytest.raises(BuildError, match=r"HOROVOD_GPU_OPERATIONS=MPI in the environment"):
        toolkit_for("auto", frameworks, environ)
    assert toolkit_for("none", frameworks, environ) is None


@pytest.fixture
def pip(monkeypatch):
    """Calls of pip, each of which leaves the files of the real wheels."""
    calls = []

    def run(arguments, summary):
        calls.append(arguments)
        home = Path(arguments[arguments.index("--target") + 1], "nvidia", "cu13")
        make_toolkit(home, libraries="lib")
        (home / "lib" / "libcudart.so").rename(home / "lib" / "libcudart.so.13")

    monkeypatch.setattr(cuda, "run_pip", run)
    return calls


def test_a_toolkit_of_wheels_is_fetched_once(pip, cache, tmp_path):
    toolkit = Toolkit(cache / "cuda" / "13.0", "13.0")
    for _ in range(2):
        fetch_toolkit(toolkit)
    # Links of libraries' plain names are relative: the folder has moved.
    assert toolkit.missing == []
    (arguments,) = pip
    assert "nvidia-cuda-nvcc==13.0.*" in arguments
    assert [path.name for path in toolkit.home.parent.iterdir()] == ["13.0"]
    fetch_toolkit(Toolkit(tmp_path / "cuda", "13.0"))  # the system's
    assert len(pip) == 1


def test_wheels_that_lack_something_are_named(cache, monkeypatch):
    def run(arguments, summary):
        target = Path(arguments[arguments.index("--target") + 1])
        (target / "nvidia" / "cu14" / "lib").mkdir(parents=True)

    monkeypatch.setattr(cuda, "run_pip", run)
    with pytest.raises(BuildError, match=r"wheels for CUDA 14\.0 have no nvcc, cuda_runtime"):
        fetch_toolkit(Toolkit(cache / "cuda" / "14.0", "14.0"))


@pytest.mark.parametrize(
    ("nvidia_smi", "device", "found"),
    [
        (None, "nvidiactl", False),
        ("echo 'GPU 0: NVIDIA L4 (UUID: GPU-1)'", "nvidiactl", True),
        ("echo 'No devices were found'; exit 6", "nvidiactl", False),
        (None, "nvidia1", True),  # as in a container without nvidia-smi
    ],
)
def test_whether_there_is_a_gpu(machine, tmp_path, nvidia_smi, device, found):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()
    if nvidia_smi:
        machine("nvidia-smi", nvidia_smi)
    assert has_nvidia_gpu(tmp_path / "dev") is found
