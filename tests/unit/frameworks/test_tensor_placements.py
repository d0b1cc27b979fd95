"""Which part of a parameter each rank of a tensor group holds."""

import pytest
import torch

from hvkit.frameworks.pytorch.model_parallel.tensor.placements import Placement, part_of, whole_of

SHAPES = {
    Placement(0): (8, 3),
    Placement(1): (3, 8),
    Placement(0, 3): (24,),
    Placement(1, 2): (2, 8),
}


@pytest.mark.parametrize("placement", SHAPES)
@pytest.mark.parametrize("ways", [1, 2, 4])
def test_parts_put_together_are_the_whole(placement, ways):
    whole = torch.randn(SHAPES[placement])
    parts = [part_of(whole, placement, index, ways) for index in range(ways)]
    assert {part.numel() for part in parts} == {whole.numel() // ways}
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(whole_of(parts, placement), whole)


def test_a_rank_holds_its_share_of_queries_keys_and_values():
    fused = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23])
    assert part_of(fused, Placement(0, 3), 1, 2).tolist() == [2, 3, 12, 13, 22, 23]
    assert part_of(fused, Placement(0, 3), 0, 4).tolist() == [0, 10, 20]


def test_a_part_has_memory_of_its_own():
    whole = torch.zeros(4)
    part_of(whole, Placement(0), 0, 1).fill_(1)
    assert whole.sum() == 0


def test_a_length_that_ranks_cannot_divide():
    with pytest.raises(ValueError, match=r"shape \(8, 3\).* 2 ranks in 3 part.* multiple of 6"):
        part_of(torch.zeros(8, 3), Placement(0, 3), 0, 2)
