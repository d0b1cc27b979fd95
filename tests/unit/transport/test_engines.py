"""The Horovod of each framework: where it is, CPU time, and results that go through host memory."""

import os
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.utils._pytree import tree_map

from hvkit.errors import HorovodNotFoundError
from hvkit.frameworks.pytorch import wire
from hvkit.host.hardware import CgroupLimits
from hvkit.transport import engines
from hvkit.transport.engines import HostMemory


@pytest.mark.parametrize("libraries", [[], ["torch"], ["tensorflow"], ["torch", "tensorflow"]])
def test_the_frameworks_that_horovod_was_built_for_are_those_with_a_library(
    libraries, tmp_path, monkeypatch
):
    package = tmp_path / "horovod"
    for framework in ("torch", "tensorflow"):
        (package / framework).mkdir(parents=True)
        if framework in libraries:
            (package / framework / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so").touch()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    assert engines.built_for() == libraries


@pytest.fixture
def container(monkeypatch):
    """A container with the time of 5 CPUs on a host with 64."""
    monkeypatch.setattr(engines, "cgroup_limits", lambda: CgroupLimits(5.0, None))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_ranks_of_pytorch_share_the_time_of_their_container(container, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    before = torch.get_num_threads()
    try:
        engine = _unstarted(engines.PyTorchEngine)
        engine.hvd = SimpleNamespace(allgather=lambda tensor, name: torch.cat([tensor] * 2))
        engine.take_device(local_rank=0, local_size=2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_ranks_of_tensorflow_share_the_time_of_their_container(container, monkeypatch):
    asked = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    # TensorFlow takes it only once in a process, before anything else.
    monkeypatch.setattr(engines, "_tensorflow_has_started", lambda: False)
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", asked.append)
    _unstarted(engines.TensorFlowEngine).take_device(local_rank=0, local_size=2)
    assert asked == [3]


def _unstarted(engine):
    """The engine without Horovod, which starts only where there are ranks."""
    return object.__new__(engine)


def test_a_library_for_another_tensorflow_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('loaded')")
    (package / "metadata.json").write_text('{"tensorflow": "2.1.0"}')
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(HorovodNotFoundError, match=r"built for TensorFlow 2\.1\.0, and TensorFlow"):
        engines.TensorFlowEngine()


class OnGpu(torch.Tensor):
    """A tensor that claims to be on the device "meta", which every PyTorch has: no GPU is needed.

    Its values are on the CPU.
    """

    @staticmethod
    def __new__(cls, values):
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device="meta"
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        to_cpu = (kwargs or {}).get("device") == torch.device("cpu")
        plain = tree_map(lambda x: x.values if isinstance(x, cls) else x, (args, kwargs or {}))
        keywords = {name: value for name, value in plain[1].items() if name != "device"}
        result = function(*plain[0], **keywords)
        if function is torch.ops.aten.copy_.default:
            return args[0]
        return result if to_cpu else cls(result)


class CpuHorovod(ModuleType):
    """A fake Horovod without GPUs: rank 0 of two ranks that send the same values."""

    def __init__(self):
        super().__init__("horovod.torch")
        self.results = []
        self.init = lambda: None
        self.cuda_built = self.rocm_built = lambda: False
        self.rank = lambda: 0
        self.size = lambda: 2

    def allreduce_(self, tensor, name):
        return _on_cpu(tensor).mul_(2)

    def allreduce(self, tensor, name):
        return _on_cpu(tensor) * 2

    def allgather(self, tensor, name):
        return torch.cat([_on_cpu(tensor)] * 2)

    def allreduce_async_(self, tensor, name):
        return self._later(_on_cpu(tensor).mul_(2))

    def allgather_async(self, tensor, name):
        return self._later(torch.cat([_on_cpu(tensor)] * 2))

    def alltoall_async(self, tensor, name):
        return self._later((_on_cpu(tensor).flip(0), torch.tensor([1, 2])))

    def synchronize(self, handle):
        return self.results[handle]

    def _later(self, result):
        self.results.append(result)
        return len(self.results) - 1


def _on_cpu(tensor):
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor is on {tensor.device}, and this Horovod is built without GPUs")
    return tensor


@pytest.fixture
def hvd():
    return HostMemory(CpuHorovod())


@pytest.fixture
def on_gpu():
    return OnGpu(torch.tensor([1.0, 2.0, 3.0]))


def test_a_result_in_place_comes_back_to_the_gpu_when_it_is_waited_for(hvd, on_gpu):
    handle = hvd.allreduce_async_(on_gpu, name="x")
    assert on_gpu.values.tolist() == [1, 2, 3]
    assert hvd.synchronize(handle) is on_gpu
    assert on_gpu.values.tolist() == [2, 4, 6]
    assert hvd.allreduce_(on_gpu, name="x") is on_gpu
    assert on_gpu.values.tolist() == [4, 8, 12]


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        (lambda hvd, t: hvd.allreduce(t, name="x"), [2, 4, 6]),
        (lambda hvd, t: hvd.allgather(t, name="x"), [1, 2, 3, 1, 2, 3]),
        (lambda hvd, t: hvd.synchronize(hvd.allgather_async(t, name="x")), [1, 2, 3, 1, 2, 3]),
        (lambda hvd, t: hvd.synchronize(hvd.alltoall_async(t, name="x"))[0], [3, 2, 1]),
    ],
    ids=["allreduce", "allgather", "allgather_async", "alltoall_async"],
)
def test_a_new_result_is_on_the_gpu(collective, expected, hvd, on_gpu):
    result = collective(hvd, on_gpu)
    assert result.device == on_gpu.device
    assert result.values.tolist() == expected
    assert on_gpu.values.tolist() == [1, 2, 3]


def test_cpu_tensors_and_other_functions_go_to_horovod_unchanged(hvd):
    tensor = torch.ones(3)
    handle = hvd.allreduce_async_(tensor, name="x")
    assert hvd.synchronize(handle) is tensor
    assert tensor.tolist() == [2, 2, 2]
    assert hvd.size() == 2


@pytest.fixture
def engine(monkeypatch):
    """Of a rank that has the GPU on bus 1."""
    hvd = CpuHorovod()
    monkeypatch.setattr(engines, "_import_horovod", lambda module, framework: hvd)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: place)
    return engines.PyTorchEngine()


@pytest.mark.parametrize(("rank", "warns"), [(0, True), (1, False)])
def test_a_horovod_without_gpus_reduces_in_host_memory_and_rank_0_warns(
    rank, warns, engine, on_gpu, capsys
):
    engine.hvd.rank = lambda: rank
    engine.hvd.allgather = lambda tensor, name: tensor
    engine.take_device(0, 1)
    assert engine.hvd.allreduce(on_gpu, name="x").values.tolist() == [2, 4, 6]
    assert ("`hvkit install-horovod --gpu nccl`" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("gpus", "bus_of_other", "shared"), [(1, 1, True), (1, 2, False), (0, None, False)]
)
def test_ranks_that_share_a_gpu_reduce_in_host_memory_and_warn(
    gpus, bus_of_other, shared, engine, on_gpu, capsys, monkeypatch
):
    def gather(tensor, name):
        theirs = tensor.numpy().copy()
        if bus_of_other is None:
            theirs[:] = 255
        else:
            theirs[16:].view(np.int64)[1] = bus_of_other
        return torch.cat([tensor, torch.from_numpy(theirs)])

    built_for_gpus = engine.hvd
    built_for_gpus.cuda_built = lambda: True
    built_for_gpus.allgather = gather
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    engine.take_device(0, 2)
    assert engine.shared_gpu == shared
    said = capsys.readouterr().err
    if shared:
        assert engine.hvd.allreduce(on_gpu, name="x").values.tolist() == [2, 4, 6]
        assert "several ranks share a GPU" in said
    elif gpus:
        assert engine.hvd is built_for_gpus
        assert said == ""


@pytest.mark.parametrize("imported", [False, True])
def test_the_host_does_not_wait_for_results_unless_the_script_calls_horovod_itself(
    imported, monkeypatch
):
    hvd, seen = CpuHorovod(), []
    variable = "HOROVOD_ENABLE_ASYNC_COMPLETION"
    hvd.init = lambda: seen.append(os.environ.get(variable))
    monkeypatch.setattr(engines, "_import_horovod", lambda module, framework: hvd)
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    monkeypatch.delenv(variable, raising=False)
    engines.PyTorchEngine()
    assert seen == [None if imported else "1"]
    assert variable not in os.environ


@pytest.mark.parametrize("own", [True, False])
def test_a_stream_of_the_scripts_own_follows_what_horovod_has_ordered(own, monkeypatch):
    said, default = [], SimpleNamespace()
    stream = SimpleNamespace(wait_stream=lambda other: said.append(("waits", other)))
    result = SimpleNamespace(
        is_cuda=True, device="cuda:0", record_stream=lambda by: said.append(("used", by))
    )
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream if own else default)
    hvd = SimpleNamespace(synchronize=lambda handle: (result, None), global_process_set=None)
    monkeypatch.setattr(wire.runtime, "engine", lambda framework: SimpleNamespace(hvd=hvd))
    assert wire.Wire("checks").wait(0) is result
    assert said == ([("waits", default), ("used", stream)] if own else [])
