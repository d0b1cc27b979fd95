"""hvkit puts a PyTorch or Keras training script on Horovod's ring-allreduce with one call."""

from hvkit.allreduce import allreduce
from hvkit.checkpoint import Checkpoint, Progress
from hvkit.data import shard
from hvkit.distribute import distribute
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
from hvkit.runtime import (
    allgather,
    barrier,
    broadcast,
    init,
    local_rank,
    local_size,
    rank,
    size,
)

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "Checkpoint",
    "EarlyStopping",
    "HorovodNotFoundError",
    "HostfileError",
    "HvkitError",
    "LaunchError",
    "Progress",
    "RankLostError",
    "RanksDisagreeError",
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
    "shard",
    "size",
]
