"""What tests on several ranks compare."""

import contextlib
import hashlib
import time

import numpy as np

import hvkit
from hvkit.communication.collectives import gather
from hvkit.errors import ranks_text


def same_on_all_ranks(arrays, group=None):
    """Whether all ranks, or all of a group, passed the same arrays, bit for bit; a collective."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return len(set(gather("same_on_all_ranks", digest.hexdigest(), group))) == 1


def identical(arrays, others):
    """Whether two lists of arrays or tensors, which must not be empty, have the same values."""
    pairs = list(zip(arrays, others, strict=True))
    assert pairs
    return all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)


def largest_difference(arrays, references):
    """Largest difference of arrays, relative to the largest value of each reference."""
    return max(
        float(np.abs(a - b).max() / max(np.abs(b).max(), np.finfo(np.float32).tiny))
        for a, b in zip(arrays, references, strict=True)
    )


def diloco_by_hand(start, data, gradient, lr, strategy):
    """Every rank's weights at the end, and their anchor, in float64.

    Args:
        start: the weights.
        data: global batches.
        gradient: a function of weights, inputs and targets.
        lr: of the steps inside, by SGD.
        strategy: ``hvkit.DiLoCo``.
    """
    size, anchor, velocity = hvkit.size(), start.astype(np.float64), 0
    x, due = [anchor] * size, None
    for step, batch in enumerate(data, 1):
        for rank in range(size):
            inputs, targets = (each[rank::size].astype(np.float64) for each in batch)
            x[rank] = x[rank] - lr * gradient(x[rank], inputs, targets)
        if due and step % strategy.every == strategy.overlap:
            x, due = [mine + change for mine, change in zip(x, due, strict=True)], None
        if step % strategy.every == 0:
            change = np.mean([anchor - mine for mine in x], axis=0)
            velocity = strategy.outer_momentum * velocity + change
            anchor = anchor - strategy.outer_lr * (change + strategy.outer_momentum * velocity)
            due = [anchor - mine for mine in x]
            if not strategy.overlap:
                x, due = [anchor] * size, None
    return x, anchor, [mine + change for mine, change in zip(x, due or [0] * size, strict=True)]


def shared_folder(tmp_path_factory):
    """A new folder, the same on all ranks."""
    return hvkit.broadcast(tmp_path_factory.mktemp("run") if hvkit.rank() == 0 else None)


def wait_for(path):
    """Wait until a file is there, for a minute."""
    wait_until(path.exists, f"no {path}")


def wait_until(condition, otherwise):
    """Wait until a condition holds, for a minute; ``otherwise`` is the error's text."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise TimeoutError(otherwise)


class Busy:
    """Rank 0 has no time after its first step, until others have taken so many batches.

    Args:
        folder: an empty one, the same on all ranks.
        number: how many batches.
    """

    def __init__(self, folder, number):
        self._folder = folder
        self._number = number

    def take(self, epoch, batch):
        """Call after each step, with the number of the epoch and that of the step in it."""
        if hvkit.rank():
            (self._folder / f"{epoch}-{hvkit.rank()}-{batch}").touch()
            return
        wait_until(
            lambda: len(list(self._folder.glob(f"{epoch}-*"))) >= self._number,
            "the other ranks get no batches",
        )


def my_part(batch, group=None):
    """This rank's samples of a batch of all ranks, or of a group: every size-th one."""
    return batch[group.rank :: group.size] if group else batch[hvkit.rank() :: hvkit.size()]


def batches(steps, per_rank, *shapes, seed=0):
    """Global batches, the same on every rank: float32 arrays of shape (size * per_rank, ...)."""
    rng = np.random.default_rng(seed)
    rows = per_rank * hvkit.size()
    return [
        tuple(rng.normal(size=(rows, *shape)).astype(np.float32) for shape in shapes)
        for _ in range(steps)
    ]


def all_but_rank_0():
    """How messages name them: ``rank 1``, or ``ranks 1, 2``."""
    return ranks_text(list(range(1, hvkit.size())))


def error_of(function):
    """The type and text of what ``function`` raises, on every rank."""
    try:
        function()
    except Exception as error:
        return type(error), str(error)
    return None, ""


def gossip_matrix(topology, size):
    """What a step of ``hvkit.Gossip`` multiplies the ranks' weights by."""
    matrix = np.zeros((size, size))
    for rank in range(size):
        near = {rank - 1, rank, rank + 1} if topology == "ring" else set(range(size))
        columns = sorted({each % size for each in near})
        matrix[rank, columns] = 1 / len(columns)
    return matrix


def as_vector(arrays):
    return np.concatenate([array.ravel() for array in arrays])


@contextlib.contextmanager
def keras_in_float64():
    """Keras makes layers in float64 meanwhile, and computes in it also on PyTorch."""
    import keras
    from keras.src.backend.common import dtypes

    policy = keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # which the first layer would keep
    shorter = getattr(dtypes, "BIT64_TO_BIT32_DTYPE", {})
    before = shorter.get("float64")
    shorter["float64"] = "float64"
    try:
        yield
    finally:
        shorter["float64"] = before
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
