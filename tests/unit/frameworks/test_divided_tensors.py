"""Which part of a parameter each rank of a tensor group holds."""

import pytest
import torch
from mesh_models import Encoder, gpt_of_conv1d

from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import (
    Placement,
    part_of,
    whole_of,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.plan import placements_of, plan_layers

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


def test_how_parameters_are_divided():
    def dims(model, x):
        found = placements_of(model, plan_layers(model, (x,), {}, 2).divisions)
        return {name: (each.dim, each.parts) for name, each in found.items()}

    of_block = {
        n: d
        for n, d in dims(gpt_of_conv1d(), torch.zeros(2, 8, dtype=torch.long)).items()
        if n.startswith("h.0.attn")
    }
    products = {"c_attn.weight": (1, 3), "c_attn.bias": (0, 3), "c_proj.weight": (0, 1)}
    assert of_block == {f"h.0.attn.{name}": dim for name, dim in products.items()}
    layer = "encoder.layers.0.self_attn"
    of_layer = dims(Encoder(), torch.ones(2, 5, 20))
    assert of_layer[f"{layer}.in_proj_weight"] == (0, 3)
    assert of_layer[f"{layer}.out_proj.weight"] == (1, 1)
    assert f"{layer}.out_proj.bias" not in of_layer
