"""A Horovod without GPU support gets copies in host memory, and the results come back.

No GPU is needed: the tensors here claim to be on the device "meta", which every PyTorch has, and
keep their values on the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from hvkit.communication import engines
from hvkit.communication.engines import HostMemory, PyTorchEngine
from hvkit.frameworks.pytorch.collectives import wire

OtherRank = Callable[..., None]


class OnGpu(torch.Tensor):
    """A tensor whose device is not the CPU."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device="meta"
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        to_cpu = (kwargs or {}).get("device") == torch.device("cpu")
        plain = tree_map(lambda x: x.values if isinstance(x, cls) else x, (args, kwargs or {}))
        keywords = {name: value for name, value in plain[1].items() if name != "device"}
        result = function(*plain[0], **keywords)
        if function is torch.ops.aten.copy_.default:
            return args[0]
        return result if to_cpu else cls(result)


class CpuHorovod(ModuleType):
    """A fake Horovod without GPUs: rank 0 of two ranks that send the same values."""

    def __init__(self) -> None:
        super().__init__("horovod.torch")
        self.results: list[Any] = []

    def size(self) -> int:
        return 2

    def allreduce_(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return _on_cpu(tensor).mul_(2)

    def allreduce(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return _on_cpu(tensor) * 2

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return torch.cat([_on_cpu(tensor)] * 2)

    def allreduce_async_(self, tensor: torch.Tensor, name: str) -> int:
        return self._later(_on_cpu(tensor).mul_(2))

    def allgather_async(self, tensor: torch.Tensor, name: str) -> int:
        return self._later(torch.cat([_on_cpu(tensor)] * 2))

    def alltoall_async(self, tensor: torch.Tensor, name: str) -> int:
        return self._later((_on_cpu(tensor).flip(0), torch.tensor([1, 2])))

    def synchronize(self, handle: int) -> Any:
        return self.results[handle]

    def _later(self, result: Any) -> int:
        self.results.append(result)
        return len(self.results) - 1


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor is on {tensor.device}, and this Horovod is built without GPUs")
    return tensor


@pytest.fixture
def hvd() -> HostMemory:
    return HostMemory(CpuHorovod())


@pytest.fixture
def on_gpu() -> OnGpu:
    return OnGpu(torch.tensor([1.0, 2.0, 3.0]))


def test_the_fake_horovod_refuses_the_fake_gpu_tensor(on_gpu: OnGpu) -> None:
    with pytest.raises(ValueError, match="a tensor is on meta"):
        CpuHorovod().allreduce_async_(on_gpu, name="x")


def test_result_in_place(hvd: HostMemory, on_gpu: OnGpu) -> None:
    handle = hvd.allreduce_async_(on_gpu, name="x")
    assert on_gpu.values.tolist() == [1, 2, 3]  # Its result is not there before it is waited for.
    assert hvd.synchronize(handle) is on_gpu
    assert on_gpu.values.tolist() == [2, 4, 6]


def test_result_in_place_at_once(hvd: HostMemory, on_gpu: OnGpu) -> None:
    assert hvd.allreduce_(on_gpu, name="x") is on_gpu
    assert on_gpu.values.tolist() == [2, 4, 6]


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
def test_new_result_is_on_the_gpu(
    hvd: HostMemory,
    on_gpu: OnGpu,
    collective: Callable[[HostMemory, torch.Tensor], Any],
    expected: list[float],
) -> None:
    result = collective(hvd, on_gpu)
    assert result.device == on_gpu.device
    assert result.values.tolist() == expected
    assert on_gpu.values.tolist() == [1, 2, 3]


def test_cpu_tensors_and_other_functions_go_to_horovod_unchanged(hvd: HostMemory) -> None:
    tensor = torch.ones(3)
    handle = hvd.allreduce_async_(tensor, name="x")
    assert hvd.synchronize(handle) is tensor
    assert tensor.tolist() == [2, 2, 2]
    assert hvd.size() == 2


class TestEngine:
    """A rank that has a GPU."""

    @pytest.fixture
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> PyTorchEngine:
        hvd = CpuHorovod()
        for name, value in {"cuda_built": False, "rocm_built": False, "rank": 0}.items():
            setattr(hvd, name, lambda value=value: value)
        hvd.init = lambda: None  # type: ignore[attr-defined]
        monkeypatch.setattr(engines, "_import_horovod", lambda module, framework: hvd)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        places = SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: places)
        return PyTorchEngine()

    def test_a_horovod_without_gpus_reduces_in_host_memory_and_warns(
        self,
        engine: PyTorchEngine,
        on_gpu: OnGpu,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(engine.hvd, "allgather", lambda tensor, name: tensor)
        engine.take_device(0, 1)
        assert engine.hvd.allreduce(on_gpu, name="x").values.tolist() == [2, 4, 6]
        assert "`hvkit install-horovod --gpu nccl`" in capsys.readouterr().err

    def test_other_ranks_do_not_warn(
        self, engine: PyTorchEngine, capsys: pytest.CaptureFixture[str]
    ) -> None:
        engine.hvd.rank = lambda: 1  # type: ignore[attr-defined]
        engine.take_device(0, 1)
        assert isinstance(engine.hvd, HostMemory)
        assert capsys.readouterr().err == ""

    def test_horovod_for_gpus_is_left_alone(
        self,
        engine: PyTorchEngine,
        other_rank: OtherRank,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        other_rank(of_bus=2)
        hvd = engine.hvd
        engine.take_device(0, 2)
        assert engine.hvd is hvd
        assert not engine.shared_gpu
        assert capsys.readouterr().err == ""

    def test_ranks_that_share_a_gpu_reduce_in_host_memory_and_warn(
        self,
        engine: PyTorchEngine,
        other_rank: OtherRank,
        on_gpu: OnGpu,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        other_rank(of_bus=1)
        engine.take_device(0, 2)
        assert engine.shared_gpu
        assert engine.hvd.allreduce(on_gpu, name="x").values.tolist() == [2, 4, 6]
        assert "several ranks share a GPU" in capsys.readouterr().err

    def test_ranks_without_a_gpu_share_none(
        self, engine: PyTorchEngine, other_rank: OtherRank, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other_rank(of_bus=None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        engine.take_device(0, 2)
        assert not engine.shared_gpu

    @pytest.fixture
    def other_rank(self, engine: PyTorchEngine, monkeypatch: pytest.MonkeyPatch) -> OtherRank:
        """This rank has the GPU on bus 1, in a Horovod for GPUs; the other one's is set."""
        engine.hvd.cuda_built = lambda: True  # type: ignore[attr-defined]

        def set_bus(of_bus: int | None) -> None:
            def gather(tensor: torch.Tensor, name: str) -> torch.Tensor:
                theirs = tensor.numpy().copy()
                if of_bus is None:
                    theirs[:] = 255
                else:
                    theirs[16:].view(np.int64)[1] = of_bus
                return torch.cat([tensor, torch.from_numpy(theirs)])

            monkeypatch.setattr(engine.hvd, "allgather", gather)

        return set_bus

    @pytest.mark.parametrize("imported", [False, True])
    def test_the_host_does_not_wait_for_results_unless_the_script_calls_horovod_itself(
        self, monkeypatch: pytest.MonkeyPatch, imported: bool
    ) -> None:
        hvd = CpuHorovod()
        seen: list[str | None] = []
        variable = "HOROVOD_ENABLE_ASYNC_COMPLETION"
        hvd.init = lambda: seen.append(os.environ.get(variable))  # type: ignore[attr-defined]
        monkeypatch.setattr(engines, "_import_horovod", lambda module, framework: hvd)
        monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
        if imported:
            monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
        monkeypatch.delenv(variable, raising=False)
        PyTorchEngine()
        assert seen == [None if imported else "1"]
        assert variable not in os.environ


@pytest.mark.parametrize("own", [True, False])
def test_a_stream_of_the_scripts_own_follows_what_horovod_has_ordered(
    monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    said: list[tuple[str, object]] = []
    default = SimpleNamespace()
    stream = SimpleNamespace(wait_stream=lambda other: said.append(("waits", other)))
    result = SimpleNamespace(
        is_cuda=True, device="cuda:0", record_stream=lambda by: said.append(("used", by))
    )
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream if own else default)
    hvd = SimpleNamespace(
        synchronize=lambda handle: (result, None), global_process_set=SimpleNamespace()
    )
    one_of_two = SimpleNamespace(hvd=hvd)
    monkeypatch.setattr(wire.runtime, "engine", lambda framework: one_of_two)
    assert wire.Wire("checks").wait(0) is result
    assert said == ([("waits", default), ("used", stream)] if own else [])
