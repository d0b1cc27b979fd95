"""hvkit puts a PyTorch, Keras or JAX training script on Horovod's ring-allreduce with one call.

Importing hvkit is cheap: each public name is resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvkit import errors as errors
from hvkit import log as log
from hvkit.integrations import watch_imports

if TYPE_CHECKING:
    from hvkit.api import distribute as distribute
    from hvkit.checkpoint import Checkpoint as Checkpoint
    from hvkit.checkpoint import Progress as Progress
    from hvkit.communication.allreduce import allreduce as allreduce
    from hvkit.communication.collectives import barrier as barrier
    from hvkit.communication.collectives import broadcast as broadcast
    from hvkit.communication.metrics import EarlyStopping as EarlyStopping
    from hvkit.communication.metrics import any_rank as any_rank
    from hvkit.communication.metrics import average as average
    from hvkit.communication.tensors import allgather as allgather
    from hvkit.communication.tensors import mean as mean
    from hvkit.compression import PowerSGD as PowerSGD
    from hvkit.compression import TopK as TopK
    from hvkit.data.shard import shard as shard
    from hvkit.errors import BuildError as BuildError
    from hvkit.errors import HorovodNotFoundError as HorovodNotFoundError
    from hvkit.errors import HostfileError as HostfileError
    from hvkit.errors import HvkitError as HvkitError
    from hvkit.errors import LaunchError as LaunchError
    from hvkit.errors import RankLostError as RankLostError
    from hvkit.errors import RanksDisagreeError as RanksDisagreeError
    from hvkit.frameworks.jax.batches import batch as batch
    from hvkit.functions.launch import launch as launch
    from hvkit.main_rank import is_main as is_main
    from hvkit.main_rank import main_first as main_first
    from hvkit.mesh import Mesh as Mesh
    from hvkit.mesh import deferred_init as deferred_init
    from hvkit.models import average_buffers as average_buffers
    from hvkit.models import reduce_gradients as reduce_gradients
    from hvkit.models import settled as settled
    from hvkit.monitor import Monitor as Monitor
    from hvkit.runtime import init as init
    from hvkit.runtime import local_rank as local_rank
    from hvkit.runtime import local_size as local_size
    from hvkit.runtime import rank as rank
    from hvkit.runtime import size as size
    from hvkit.strategies import *  # noqa: F403
    from hvkit.transport.traffic import traffic as traffic

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "api": "distribute",
    "checkpoint": "Checkpoint Progress",
    "communication.allreduce": "allreduce",
    "communication.collectives": "barrier broadcast",
    "communication.metrics": "EarlyStopping any_rank average",
    "communication.tensors": "allgather mean",
    "compression": "PowerSGD TopK",
    "data.shard": "shard",
    "errors": (
        "BuildError HorovodNotFoundError HostfileError HvkitError LaunchError RankLostError "
        "RanksDisagreeError"
    ),
    "frameworks.jax.batches": "batch",
    "functions.launch": "launch",
    "main_rank": "is_main main_first",
    "mesh": "Mesh deferred_init",
    "models": "average_buffers reduce_gradients settled",
    "monitor": "Monitor",
    "runtime": "init local_rank local_size rank size",
    "strategies": (
        "Centralized DeMo DiLoCo ElasticAveraging FullyShard Gossip LocalSGD ParameterServer "
        "ShardedOptimizer Synchronous"
    ),
    "transport.traffic": "traffic",
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


watch_imports()
