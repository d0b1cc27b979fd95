"""Random numbers that the stages of a pipeline share."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hvkit.frameworks.pytorch.model_parallel.rank_groups import SharedNumbers, new_seed


def refuse(module, args):
    raise ValueError("refused")


@pytest.fixture
def refusing():
    layer = nn.Identity()
    layer.register_forward_pre_hook(refuse)
    return layer


def test_a_call_that_an_earlier_hook_refuses_shows_its_error_alone(refusing, recwarn):
    SharedNumbers(torch.device("cpu"), [refusing], lambda: None)
    with pytest.raises(ValueError, match="refused"):
        refusing(torch.ones(2))
    assert not recwarn.list


class TriesAnother(nn.Module):
    def forward(self, x, other):
        with pytest.raises(ValueError, match="refused"):
            other(x)
        return F.dropout(x)


def test_a_refused_call_inside_another_leaves_the_numbers_of_that_one(refusing):
    outer = TriesAnother()
    SharedNumbers(torch.device("cpu"), [outer, refusing], lambda: None)
    torch.manual_seed(0)
    outer(torch.ones(100), refusing)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    new_seed()
    assert torch.equal(torch.get_rng_state(), after)
