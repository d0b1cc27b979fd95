"""The one place that imports Horovod's collectives: for PyTorch and for TensorFlow.

An engine starts one of the two, and has the collectives on NumPy arrays that the rest of hvkit
uses. Ports use the library itself, ``Engine.hvd``. A Horovod built without GPU support takes only
tensors on the CPU, and NCCL needs a GPU for each rank. Without either, ``HostMemory`` copies them
to the CPU and back: that takes longer, because nothing overlaps with the backward pass.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from hvkit import horovod_names
from hvkit.errors import HorovodNotFoundError, LaunchError, ranks_text
from hvkit.host.hardware import cgroup_limits, gpu_of_rank, threads_of_rank
from hvkit.host.rank_variables import keep_freed_memory
from hvkit.log import logger
from hvkit.transport.traffic import count, of_allgather, of_allreduce, of_alltoall
from hvkit.watch.calls import waiting_for_all_ranks

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


CHUNK = 1 << 28  # the most bytes in one message: MPI counts elements in a C int

# Bytes of a broadcast that are sent at a time, for which a rank needs memory besides the array.
PIECE = 1 << 25


@dataclass(eq=False)
class ProcessSet:
    """Some of the ranks, in ascending order, as ``process_set=`` of Horovod's collectives.

    Horovod's own class counts ranks through the library that was loaded last, which may be another
    framework's.
    """

    process_set_id: int
    ranks: tuple[int, ...]

    def size(self) -> int:
        return len(self.ranks)


class Engine(ABC):
    """A started Horovod library, and its collectives on arrays in host memory."""

    hvd: Any
    library = "Horovod"  # the library that finds the ranks, for messages

    @abstractmethod
    def shut_down(self) -> None:
        """End all waits in Horovod, on all ranks, with an error."""

    @abstractmethod
    def take_device(self, local_rank: int, local_size: int) -> None:
        """Pin this process to its GPU, or to its share of the host's CPU threads."""

    @abstractmethod
    def _call(
        self, collective: str, array: NDArray[Any], within: ProcessSet | None, **options: Any
    ) -> NDArray[Any]:
        """The result of Horovod's collective of this name, on a tensor in host memory."""

    def broadcast(
        self,
        array: NDArray[np.uint8],
        root: int,
        purpose: str = "objects",
        within: ProcessSet | None = None,
    ) -> NDArray[np.uint8]:
        """Return rank ``root``'s bytes; every rank passes an array of the same length."""
        ranks = within or self.hvd.global_process_set
        count(purpose, of_alltoall(array.nbytes, ranks.size()))
        return self._call("broadcast", array, within, root_rank=root, process_set=ranks)

    def allreduce(self, array: NDArray[Any], op: str) -> NDArray[Any]:
        """Reduce a flat array by "sum", "min" or "max", of int32, int64, float32 or float64."""
        count("objects", of_allreduce(array.nbytes, self.hvd.size()))
        return self._call("allreduce", array, None, op=getattr(self.hvd, op.capitalize()))

    def allgather(
        self, array: NDArray[np.uint8], within: ProcessSet | None = None
    ) -> NDArray[np.uint8]:
        """Return all ranks' bytes, one after the other in rank order; lengths may differ."""
        ranks = within or self.hvd.global_process_set
        count("objects", of_allgather(array.nbytes, ranks.size()))
        return self._call("allgather", array, within, process_set=ranks)


# With it, Horovod returns a result on a GPU as soon as it is queued there: work that the host
# queues later on the device's default stream runs after it (``Wire.wait``). Without, the host waits
# for the GPU, which then waits for the host. Horovod reads the variable in ``init``.
_WITHOUT_WAITING = "HOROVOD_ENABLE_ASYNC_COMPLETION"


class PyTorchEngine(Engine):
    """Horovod's PyTorch library; NCCL cannot work if several ranks have a ``shared_gpu``."""

    def __init__(self) -> None:
        # A script that calls Horovod itself may do so on any stream.
        is_set = "horovod.torch" in sys.modules or _WITHOUT_WAITING in os.environ
        self.hvd = _import_horovod("horovod.torch", "PyTorch")
        try:
            if not is_set:
                os.environ[_WITHOUT_WAITING] = "1"
            self.hvd.init()
        finally:
            if not is_set:
                del os.environ[_WITHOUT_WAITING]
        self.shared_gpu = False

    def shut_down(self) -> None:
        # hvd.shutdown() would first forget the handles that other threads wait for.
        self.hvd.mpi_ops._basics.shutdown()

    def take_device(self, local_rank: int, local_size: int) -> None:
        import torch

        gpu = gpu_of_rank(local_rank, local_size, torch.cuda.device_count())
        if gpu is not None:
            torch.cuda.set_device(gpu)
        self.shared_gpu = self._shares_gpu(gpu)
        if gpu is not None:
            if _reduces_in_host_memory(self.hvd, self.shared_gpu):
                self.hvd = HostMemory(self.hvd)
            return
        keep_freed_memory(os.environ)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(cpu_threads(local_size))

    def _shares_gpu(self, gpu: int | None) -> bool:
        """Whether two ranks have the same GPU; a collective, also of ranks that have none."""
        import torch

        address = np.full(16 + 3 * 8, 255, np.uint8)
        if gpu is not None:
            # A launcher may show each rank another GPU as number 0, and the parts of a divided GPU
            # have different names. NCCL compares the PCI addresses, too.
            of: Any = torch.cuda.get_device_properties(gpu)
            pci = np.array([of.pci_domain_id, of.pci_bus_id, of.pci_device_id], np.int64)
            host = hashlib.md5(_this_host().encode(), usedforsecurity=False).digest()
            address = np.frombuffer(host + pci.tobytes(), np.uint8)
        with waiting_for_all_ranks():
            gathered = self.hvd.allgather(torch.from_numpy(address.copy()), name="hvkit.gpus")
        addresses = _numpy(gathered).reshape(-1, address.size)
        used = addresses[(addresses != 255).any(axis=1)]
        return len(np.unique(used, axis=0)) < len(used)

    def _call(
        self, collective: str, array: NDArray[Any], within: ProcessSet | None, **options: Any
    ) -> NDArray[Any]:
        import torch

        in_place = "" if collective == "allgather" else "_"  # on the copy that is made here
        function = getattr(self.hvd, collective + in_place)
        with torch.inference_mode(False), in_collective(within):
            sent = torch.from_numpy(array.copy())
            return _numpy(function(sent, name=f"hvkit.{collective}", **options))


class TensorFlowEngine(Engine):
    """Horovod's TensorFlow library."""

    def __init__(self) -> None:
        _refuse_other_tensorflow()
        self.hvd = _import_horovod("horovod.tensorflow", "TensorFlow")
        horovod_names.started_by_hvkit = True
        try:
            self.hvd.init()
        finally:
            horovod_names.started_by_hvkit = False

    def shut_down(self) -> None:
        self.hvd.shutdown()

    def take_device(self, local_rank: int, local_size: int) -> None:
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        gpu = gpu_of_rank(local_rank, local_size, len(gpus))
        if gpu is None:
            if "OMP_NUM_THREADS" not in os.environ and not _tensorflow_has_started():
                tf.config.threading.set_intra_op_parallelism_threads(cpu_threads(local_size))
            return
        try:
            tf.config.set_visible_devices(gpus[gpu], "GPU")
            tf.config.experimental.set_memory_growth(gpus[gpu], True)
            # TensorFlow itself places an operation without a kernel for GPUs on the CPU.
            _reduces_in_host_memory(self.hvd)
        except RuntimeError as error:
            raise LaunchError(
                f"rank with local rank {local_rank} cannot be pinned to GPU {gpu} of {len(gpus)}: "
                "TensorFlow already holds the GPUs; call hvkit.init() right after the imports"
            ) from error

    def _call(
        self, collective: str, array: NDArray[Any], within: ProcessSet | None, **options: Any
    ) -> NDArray[Any]:
        import tensorflow as tf

        function = getattr(self.hvd, collective)
        with in_collective(within), tf.init_scope(), tf.device("CPU:0"):
            return _numpy(function(tf.constant(array), name=f"hvkit.{collective}", **options))


ENGINES: dict[str, type[PyTorchEngine] | type[TensorFlowEngine]] = {
    "torch": PyTorchEngine,
    "tensorflow": TensorFlowEngine,
}


def broadcast_in_pieces(
    engine: Engine,
    data: NDArray[np.uint8],
    root: int,
    purpose: str = "objects",
    within: ProcessSet | None = None,
) -> NDArray[np.uint8]:
    """Fill ``data``, n bytes on every rank, with rank ``root``'s, and return it."""
    sends = engine.hvd.rank() == root
    for start in range(0, data.size, PIECE):
        piece = data[start : start + PIECE]
        received = engine.broadcast(piece, root, purpose, within)
        if not sends:
            piece[:] = received
    return data


def broadcast_message(
    engine: Engine, message: bytes | None, root: int, within: ProcessSet | None = None
) -> bytes:
    """Return rank ``root``'s message on every rank; the others pass None."""
    header = np.array([len(message or b"")], np.int64).view(np.uint8)
    length = int(broadcast_in_pieces(engine, header, root, within=within).view(np.int64)[0])
    data = np.empty(length, np.uint8) if message is None else np.frombuffer(message, np.uint8)
    return broadcast_in_pieces(engine, data, root, within=within).tobytes()


# Called before an engine's collectives, so that no rank waits for this one elsewhere.
#
# Every rank makes these collectives equally often, and returns from one only after all have
# entered.
before_collective: list[Callable[[], None]] = []


@contextmanager
def in_collective(within: ProcessSet | None = None) -> Iterator[None]:
    """A context around an engine's collective, of all ranks or of some of them."""
    if within and before_collective:
        raise ValueError(
            f"{ranks_text(within.ranks)} train as a group while rank 0 serves weights or batches "
            "to all ranks, which would wait for them: leave hvkit.ParameterServer and "
            "hvkit.shard(dynamic=True) out"
        )
    for function in before_collective:
        function()
    with waiting_for_all_ranks(within):
        yield


def built_for() -> list[str]:
    """The frameworks that the installed Horovod has a library for."""
    return [name for name in ENGINES if any(any(f.glob(f"{name}/mpi_lib*")) for f in _folders())]


def _folders() -> list[Path]:
    """The folders of the installed Horovod; none if it is not there, or may not be imported."""
    try:
        horovod = importlib.util.find_spec("horovod")
    except ImportError:
        return []
    return [Path(each) for each in horovod.submodule_search_locations or []] if horovod else []


def _import_horovod(module: str, framework: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise HorovodNotFoundError(
            f"several ranks were launched, but Horovod for {framework} cannot be loaded "
            f"({type(error).__name__}: {error}). Build it for the installed {framework} with: "
            "hvkit install-horovod"
        ) from error


def _refuse_other_tensorflow() -> None:
    """Refuse a library for another minor version, which could crash when it is loaded."""
    import tensorflow as tf

    for folder in _folders():
        try:
            built = json.loads((folder / "metadata.json").read_text()).get("tensorflow")
        except (OSError, ValueError):
            continue
        if built and built.split(".")[:2] != tf.__version__.split(".")[:2]:
            raise HorovodNotFoundError(
                f"Horovod was built for TensorFlow {built}, and TensorFlow {tf.__version__} is "
                "installed: build it for this one with `hvkit install-horovod`"
            )


def _this_host() -> str:
    """A text that no other host has, not even a clone with the same name."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        started = ""
    return socket.gethostname() + started


def _reduces_in_host_memory(hvd: ModuleType, shared_gpu: bool = False) -> bool:
    """Whether tensors on GPUs are reduced in host memory; rank 0 warns of it."""
    if (hvd.cuda_built() or hvd.rocm_built()) and not shared_gpu:
        return False
    if hvd.rank() == 0:
        why = "Horovod is built without GPU support"
        fix = "rebuild it with `hvkit install-horovod --gpu nccl`"
        if shared_gpu:
            why = "several ranks share a GPU, which NCCL cannot do"
            fix = "start one rank for each GPU"
        logger.warning(
            "%s: gradients are reduced in the host's memory, which takes longer; %s", why, fix
        )
    return True


def cpu_threads(local_size: int) -> int:
    """How many threads this rank should compute with, one of ``local_size`` ranks on its host."""
    usable, host = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return threads_of_rank(local_size, usable, host, cgroup_limits().cpus)


def _tensorflow_has_started() -> bool:
    from tensorflow.python.eager import context

    return bool(context.context()._initialized)


def _numpy(tensor: Any) -> NDArray[Any]:
    array: NDArray[Any] = tensor.numpy()
    return array


# The collectives whose first argument is one tensor. A trailing underscore means in place.
_AT_ONCE = ("allreduce", "allreduce_", "allgather", "broadcast", "broadcast_", "alltoall")
_LATER = tuple(f"{name.rstrip('_')}_async{'_' * name.endswith('_')}" for name in _AT_ONCE)


class HostMemory(ModuleType):
    """Horovod's PyTorch binding, whose collectives take tensors on GPUs through host memory."""

    def __init__(self, hvd: ModuleType) -> None:
        super().__init__(hvd.__name__, self.__doc__)
        self._hvd = hvd
        # By handle of a running collective: the function that copies its result to the GPU.
        self._returns: dict[int, Callable[[Any], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._hvd, name)
        if name not in (*_AT_ONCE, *_LATER):
            return function

        def collective(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu":
                return function(tensor, *args, **kwargs)
            back = partial(_bring_back, tensor, in_place=name.endswith("_"))
            given = function(tensor.detach().cpu(), *args, **kwargs)
            if name in _AT_ONCE:
                return back(given)
            self._returns[given] = back
            return given

        return collective

    def synchronize(self, handle: int) -> Any:
        """Wait for a collective and return its result, on the device of its tensor."""
        back = self._returns.pop(handle, None)
        result = self._hvd.synchronize(handle)
        return back(result) if back else result


def _bring_back(tensor: torch.Tensor, result: Any, in_place: bool) -> Any:
    if isinstance(result, tuple):  # from alltoall: the rows, and how many came from each rank
        return _bring_back(tensor, result[0], in_place), result[1]
    if in_place:
        tensor.detach().copy_(result)
        return tensor
    return tensor.new_empty(result.shape, dtype=result.dtype).copy_(result)
