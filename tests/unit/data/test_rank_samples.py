"""One rank's positions in every step, and seeds."""

import pytest
from shards import every_length, every_size, flat

from hvkit.data.rank_samples import Share, seed_from


@every_size
@every_length
@pytest.mark.parametrize("drop_last", [False, True])
def test_positions_of_all_ranks_are_those_of_the_steps(length, size, drop_last):
    group = 4 * size
    ranks = [Share(rank, size) for rank in range(size)]
    mine = [share.of(length, group=group, drop_last=drop_last).tolist() for share in ranks]
    counts = [share.count(length, group=group, drop_last=drop_last) for share in ranks]
    assert [len(part) for part in mine] == counts
    together = flat(zip(*mine, strict=True))
    kept = length - length % group if drop_last else length
    assert together[:kept] == list(range(kept))
    last = range((kept - 1) // group * group, kept)
    assert all(position in last for position in together[kept:])
    assert len(together) - kept < size


@every_size
@every_length
def test_exact_positions_are_each_on_one_rank(length, size):
    ranks = [Share(rank, size, exact=True) for rank in range(size)]
    mine = [share.of(length, group=4 * size, drop_last=True).tolist() for share in ranks]
    assert [len(part) for part in mine] == [share.count(length) for share in ranks]
    assert sorted(flat(mine)) == list(range(length))


def test_seeds_differ_with_every_number():
    seeds = {
        seed_from(seed, epoch, rank) for seed in range(5) for epoch in range(5) for rank in range(5)
    }
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
