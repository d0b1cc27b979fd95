"""hvkit puts a PyTorch or Keras training script on Horovod's ring-allreduce with one call.

Importing hvkit is cheap: each public name is resolved on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hvkit import errors as errors
from hvkit import log as log

if TYPE_CHECKING:
    from hvkit.allreduce import allreduce
    from hvkit.checkpoint import Checkpoint, Progress
    from hvkit.collectives import allgather, barrier, broadcast
    from hvkit.compression import PowerSGD, TopK
    from hvkit.data.shard import shard
    from hvkit.distribute import distribute, settled
    from hvkit.errors import (
        BuildError,
        HorovodNotFoundError,
        HostfileError,
        HvkitError,
        LaunchError,
        RankLostError,
        RanksDisagreeError,
    )
    from hvkit.main_rank import is_main, main_first
    from hvkit.metrics import EarlyStopping, any_rank, average
    from hvkit.runtime import init, local_rank, local_size, rank, size
    from hvkit.strategies import (
        Centralized,
        DeMo,
        DiLoCo,
        FullyShard,
        Gossip,
        LocalSGD,
        ParameterServer,
        ShardedOptimizer,
        Synchronous,
    )
    from hvkit.traffic import traffic

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "Centralized",
    "Checkpoint",
    "DeMo",
    "DiLoCo",
    "EarlyStopping",
    "FullyShard",
    "Gossip",
    "HorovodNotFoundError",
    "HostfileError",
    "HvkitError",
    "LaunchError",
    "LocalSGD",
    "ParameterServer",
    "PowerSGD",
    "Progress",
    "RankLostError",
    "RanksDisagreeError",
    "ShardedOptimizer",
    "Synchronous",
    "TopK",
    "allgather",
    "allreduce",
    "any_rank",
    "average",
    "barrier",
    "broadcast",
    "distribute",
    "init",
    "is_main",
    "local_rank",
    "local_size",
    "main_first",
    "rank",
    "settled",
    "shard",
    "size",
    "traffic",
]

_NAMES_BY_MODULE = {
    "allreduce": "allreduce",
    "checkpoint": "Checkpoint Progress",
    "collectives": "allgather barrier broadcast",
    "compression": "PowerSGD TopK",
    "data.shard": "shard",
    "distribute": "distribute settled",
    "errors": (
        "BuildError HorovodNotFoundError HostfileError HvkitError LaunchError RankLostError "
        "RanksDisagreeError"
    ),
    "main_rank": "is_main main_first",
    "metrics": "EarlyStopping any_rank average",
    "runtime": "init local_rank local_size rank size",
    "strategies": (
        "Centralized DeMo DiLoCo FullyShard Gossip LocalSGD ParameterServer ShardedOptimizer "
        "Synchronous"
    ),
    "traffic": "traffic",
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


class _Package(ModuleType):
    """Keeps ``hvkit.distribute`` the function, although a module of that name is imported too."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
