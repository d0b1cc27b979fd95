"""Facts read from stand-in programs and from folders like the kernel's."""

from threading import Event

from hvkit.doctor.facts import (
    infiniband,
    own_addresses,
    rank_of,
    setting_names,
    shared_memory,
    thread_settings,
)
from hvkit.host.cpus import Allowance, allowance
from hvkit.host.gpus import Gpu, gpus


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
    assert allowance(tmp_path, tmp_path / "own") == Allowance(None, None)
    write(tmp_path, own="0::/job/step")
    write(tmp_path / "job", cpu__max="150000 100000", memory__max="1073741824")
    write(tmp_path / "job" / "step", cpu__max="400000 100000", memory__max="max")
    assert allowance(tmp_path, tmp_path / "own") == Allowance(1.5, 1024**3)


def test_limits_of_control_groups_of_version_1(tmp_path):
    write(tmp_path, own="4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/")
    write(tmp_path / "cpu", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    write(tmp_path / "memory", memory__limit_in_bytes="2048")
    assert allowance(tmp_path, tmp_path / "own") == Allowance(2.0, 2048)
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1")
    assert allowance(tmp_path, tmp_path / "own").cpus is None


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
