"""The program that each rank of the self-test runs: ``python -m hvkit.doctor.self_test torch``.

An allreduce in the host's memory is compared with the sum that it has to give, and timed. Rank 0
prints the result as JSON after ``hvkit:``; a rank that fails prints why.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hvkit.engines import ENGINES, waiting_for_all_ranks
from hvkit.errors import HvkitError, LaunchError

if TYPE_CHECKING:
    from numpy.typing import NDArray

RANKS = 2
BYTES = 64 * 1024**2
ROUNDS = 9

# A prime, so that pieces of the array that changed places show. The sums are exact in float32.
_PERIOD = 251


def main(framework: str) -> None:
    """Run as one rank.

    Raises:
        LaunchError: Horovod sees another number of ranks.
        RankLostError: another rank has ended.
        ArithmeticError: an allreduce gave a wrong sum.
    """
    hvd = ENGINES[framework]().hvd
    if hvd.size() != RANKS:
        raise LaunchError(
            f"{RANKS} ranks were started, but Horovod sees {hvd.size()}: it uses another MPI than "
            "the launcher is of"
        )
    sent = _TENSORS[framework](contribution(hvd.rank()))

    def allreduce() -> "NDArray[np.float32]":
        with waiting_for_all_ranks():
            total = hvd.allreduce(sent, op=hvd.Sum, name="hvkit.self_test")
        result: NDArray[np.float32] = total.numpy()
        return result

    check(allreduce(), RANKS)
    seconds = statistics.median(_timed(allreduce) for _ in range(ROUNDS))
    if hvd.rank() == 0:
        print(f"hvkit:{json.dumps({'seconds': seconds})}", flush=True)
    hvd.shutdown()


def contribution(rank: int) -> "NDArray[np.float32]":
    """What a rank puts into the sum: ``BYTES`` bytes, other values on every rank."""
    values = np.arange(BYTES // 4, dtype=np.int64) % _PERIOD
    return (values * (rank + 1)).astype(np.float32)


def check(total: "NDArray[np.float32]", size: int) -> None:
    """Compare a sum of the contributions of ``size`` ranks with the right one.

    Raises:
        ArithmeticError: they differ; the message names the first element that does.
    """
    right = contribution(0) * (size * (size + 1) // 2)
    wrong = np.flatnonzero(total != right)
    if wrong.size:
        at = int(wrong[0])
        raise ArithmeticError(
            f"an allreduce is wrong in {wrong.size} of {right.size} elements: element {at} is "
            f"{total[at]:g} and has to be {right[at]:g}"
        )


def _timed(allreduce: Callable[[], object]) -> float:
    start = time.perf_counter()
    allreduce()
    return time.perf_counter() - start


def _torch_tensor(array: "NDArray[np.float32]") -> Any:
    import torch

    return torch.from_numpy(array)


def _tensorflow_tensor(array: "NDArray[np.float32]") -> Any:
    import tensorflow as tf

    return tf.constant(array)


_TENSORS = {"torch": _torch_tensor, "tensorflow": _tensorflow_tensor}


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (HvkitError, ArithmeticError) as error:
        sys.exit(f"hvkit: {error}")
