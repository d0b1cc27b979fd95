"""What tests on several ranks compare."""

import hashlib

import numpy as np

import hvkit


def same_on_all_ranks(arrays):
    """Whether every rank passed the same arrays, bit for bit; a collective."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return len(set(hvkit.allgather(digest.hexdigest()))) == 1


def largest_difference(arrays, references):
    """Largest difference of arrays, relative to the largest value of each reference."""
    return max(
        float(np.abs(a - b).max() / max(np.abs(b).max(), np.finfo(np.float32).tiny))
        for a, b in zip(arrays, references, strict=True)
    )


def my_part(batch):
    """This rank's samples of a global batch of shape (size * n, ...): every size-th one."""
    return batch[hvkit.rank() :: hvkit.size()]


def batches(steps, per_rank, *shapes, seed=0):
    """Global batches, the same on every rank: float32 arrays of shape (size * per_rank, ...)."""
    rng = np.random.default_rng(seed)
    rows = per_rank * hvkit.size()
    return [
        tuple(rng.normal(size=(rows, *shape)).astype(np.float32) for shape in shapes)
        for _ in range(steps)
    ]


def error_of(function):
    """The type and text of what ``function`` raises, on every rank."""
    try:
        function()
    except Exception as error:
        return type(error), str(error)
    return None, ""
