"""A Horovod without GPU support gets copies in host memory, and the results come back.

No GPU is needed: the tensors here claim to be on the device "meta", which every PyTorch has, and
keep their values on the CPU.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Self

import pytest
import torch
from torch.utils._pytree import tree_map

from hvkit.communication import engines
from hvkit.communication.engines import HostMemory, PyTorchEngine


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
        return PyTorchEngine()

    def test_a_horovod_without_gpus_reduces_in_host_memory_and_warns(
        self, engine: PyTorchEngine, on_gpu: OnGpu, capsys: pytest.CaptureFixture[str]
    ) -> None:
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
        self, engine: PyTorchEngine, capsys: pytest.CaptureFixture[str]
    ) -> None:
        engine.hvd.cuda_built = lambda: True  # type: ignore[attr-defined]
        hvd = engine.hvd
        engine.take_device(0, 1)
        assert engine.hvd is hvd
        assert capsys.readouterr().err == ""
