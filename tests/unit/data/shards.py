"""All ranks' parts of some data, made in one process."""

import itertools

import numpy as np
import pytest

from hvkit.data.rank_samples import Split
from hvkit.data.shard import shard_for


def more(*values):
    """One more case of a test, for ``make test-all``."""
    return pytest.param(*values, marks=pytest.mark.every_combination)


every_size = pytest.mark.parametrize("size", [1, more(2), 3, more(5)])
every_length = pytest.mark.parametrize("length", [0, more(1), 7, more(200), 201])


def parts(make, size, *, exact=False, seed=0):
    """The parts of ranks 0 to size - 1; ``make`` creates the data anew for each rank."""
    return [shard_for(make(), Split(rank, size, exact), seed)[0] for rank in range(size)]


def numbers(batches):
    """The batches of one rank as lists of sample numbers."""
    return [[int(number) for number in np.asarray(batch)] for batch in batches]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def steps(ranks):
    """The samples of each step, of all ranks together; ranks have equally many steps."""
    assert len({len(batches) for batches in ranks}) == 1, "ranks differ in their number of steps"
    return [flat(batches) for batches in zip(*ranks, strict=True)]


def check_training(ranks, order, batch, *, drop_last=False):
    """Step k of all ranks is step k of one process with the N times larger batch."""
    group = batch * len(ranks)
    expected = [order[start : start + group] for start in range(0, len(order), group)]
    if drop_last and len(order) % group:
        expected.pop()
    together = steps(ranks)
    assert len(together) == len(expected)
    for k, (step, reference) in enumerate(zip(together, expected, strict=True)):
        sizes = {len(batches[k]) for batches in ranks}
        assert len(sizes) == 1, "batches of a step differ in size"
        assert set(step) == set(reference)
        assert 0 <= len(step) - len(reference) < len(ranks), "more repetitions than needed"


def check_exact(ranks, order):
    """Every sample is on one rank, and parts differ by one at most."""
    mine = [flat(batches) for batches in ranks]
    assert sorted(flat(mine)) == sorted(order)
    lengths = [len(part) for part in mine]
    assert max(lengths) - min(lengths) <= 1
    for part in mine:
        assert part == [number for number in order if number in set(part)], "order changed"
    assert all(batch for batches in ranks for batch in batches), "an empty batch"


def check_rows(ranks, length):
    """Single samples: rank r has number r, r + N, ..., and parts are made equal by repetition."""
    assert len({len(part) for part in ranks}) == 1, "parts differ in length"
    together = flat(zip(*ranks, strict=True))
    assert together[:length] == list(range(length))
    assert len(together) - length < len(ranks), "more repetitions than needed"
    assert set(together) == set(range(length))
