"""Pieces of tensors: what ranks of one mesh have written, ranks of another mesh find."""

import itertools

import pytest
import torch

from hvkit.errors import HvkitError
from hvkit.frameworks.pytorch.model_parallel.sharded_tensors import (
    SavedState,
    SavedTensor,
    blocks_of,
    described,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import Placement, part_of

WHOLE = torch.arange(24 * 12.0).reshape(24, 12)
PLACEMENTS = [None, Placement(0), Placement(0, 3), Placement(1), Placement(1, 3)]


def parts(placement, ways, shards):
    """What each rank has of ``WHOLE``, and the blocks that these are."""
    for index in range(ways):
        share = part_of(WHOLE, placement, index, ways) if placement else WHOLE
        rows = -(-len(share) // shards)
        for shard in range(shards):
            first, last = (min(n * rows, len(share)) for n in (shard, shard + 1))
            blocks = blocks_of(share.shape, (first, last), placement, index, ways)
            yield share[first:last].clone(), blocks


CUTS = [
    (placement, ways, shards)
    for placement, ways, shards in itertools.product(PLACEMENTS, (1, 2, 4), (1, 2, 5))
    if (placement is None) == (ways == 1)
]


@pytest.mark.parametrize("written", CUTS, ids=str)
def test_any_cut_is_read_by_any_other(written):
    saved = SavedTensor(WHOLE.shape, [])
    for own, blocks in parts(*written):
        saved.pieces += described(own, WHOLE.shape, blocks)["pieces"]
    assert torch.equal(saved.full(), WHOLE)
    for read in CUTS:
        for expected, blocks in parts(*read):
            own = torch.full_like(expected, -1)
            saved.fill(own, blocks)
            assert torch.equal(own, expected)


def test_a_missing_piece_is_an_error():
    (first, blocks), _ = parts(Placement(0, 3), 2, 1)
    found = described(first, WHOLE.shape, blocks)
    saved = SavedTensor(WHOLE.shape, found["pieces"])
    with pytest.raises(HvkitError, match="hold 144 of the 288 elements"):
        saved.full()


def test_a_file_holds_the_part_alone(tmp_path):
    large = torch.zeros(1000, 100)
    found = described(large[:10], (10, 100), blocks_of((10, 100)))
    torch.save({"plan": None, "state": {"w": found}}, tmp_path / "part.pt")
    assert (tmp_path / "part.pt").stat().st_size < 8000
    assert torch.equal(SavedState([tmp_path / "part.pt"]).values["w"].full(), large[:10])


def test_numbers_and_empty_tensors_have_pieces_too():
    for t in (torch.tensor(3.5), torch.empty(0, 4), torch.empty(2, 0)):
        found = described(t, t.shape, blocks_of(t.shape))
        assert torch.equal(SavedTensor(t.shape, found["pieces"]).full(), t)
