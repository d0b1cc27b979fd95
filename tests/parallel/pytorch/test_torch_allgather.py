"""Gradients through ``hvkit.allgather``: losses over the samples of all ranks."""

import pytest
import torch
from cases import MORE
from torch import nn
from torch.nn import functional as F
from torch_nets import raised_everywhere

import hvkit

SIZE = hvkit.size()


def part(x):
    """This rank's rows, as ``torch.cat(hvkit.allgather(...))`` puts them together."""
    return x.chunk(SIZE)[hvkit.rank()]


class Towers(nn.Module):
    """Two encoders and a temperature, in float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(hvkit.rank())
        self.image, self.text = nn.Linear(8, 5), nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()


def gathered(z):
    return torch.cat(hvkit.allgather(z))


def clip(towers, x, y, gather=gathered, first=0):
    """CLIP: a rank's images and texts against all texts and images."""
    image, text = F.normalize(towers.image(x)), F.normalize(towers.text(y))
    truth = torch.arange(first, first + len(x))
    of_images = towers.scale.exp() * image @ gather(text).T
    of_texts = towers.scale.exp() * text @ gather(image).T
    return (F.cross_entropy(of_images, truth) + F.cross_entropy(of_texts, truth)) / 2


def simclr(towers, x, y, gather=gathered, first=0):
    """SimCLR: every rank computes the loss of all pairs of views."""
    z = F.normalize(torch.cat([gather(towers.image(x)), gather(towers.text(y))]))
    alike = (z @ z.T * towers.scale).fill_diagonal_(-1e9)
    return F.cross_entropy(alike, torch.arange(len(z)).roll(len(z) // 2))


@pytest.mark.parametrize("loss", [clip, simclr])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_contrastive_loss_over_all_ranks_trains_as_in_one_process(loss, accumulate):
    torch.manual_seed(5)
    batches = [(torch.randn(4 * SIZE, 8).double(), torch.randn(4 * SIZE, 6).double())] * 6
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    hvkit.distribute(model, optimizer, accumulate=accumulate)
    reference = Towers()
    reference.load_state_dict(model.state_dict())
    own = torch.optim.SGD(reference.parameters(), 0.5, momentum=0.9)
    for number, (x, y) in enumerate(batches, 1):
        first = 4 * hvkit.rank() if loss is clip else 0
        loss(model, part(x), part(y), first=first).div(accumulate).backward()
        loss(reference, x, y, gather=lambda z: z).div(accumulate).backward()
        if number % accumulate == 0:
            for each in (optimizer, own):
                each.step()
                each.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-9
    assert not torch.equal(model.scale, torch.tensor(1.5).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_shapes_may_differ_and_the_gradient_is_a_sum_over_ranks(dtype):
    rank = hvkit.rank()
    z = torch.ones(rank + 1, 3).to(dtype).requires_grad_()
    everyone = hvkit.allgather(z * (rank + 1))
    assert [tuple(each.shape) for each in everyone] == [(i + 1, 3) for i in range(SIZE)]
    assert all((each == i + 1).all() for i, each in enumerate(everyone))
    sum((i + 1) * (rank + 1) * each.sum() for i, each in enumerate(everyone)).abs().backward()
    assert torch.equal(z.grad, torch.full_like(z, (rank + 1) ** 2 * sum(range(1, SIZE + 1))))


@MORE
def test_a_number_goes_through_and_a_compiled_model_may_gather():
    layer = nn.Linear(3, 1)
    function = torch.compile(
        lambda x: torch.stack(hvkit.allgather(layer(x).sum())), backend="eager"
    )
    function(torch.ones(2, 3)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.tensor([2.0 * SIZE]))


def test_tensors_that_need_no_gradients_are_gathered_as_objects():
    z = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        everyone = hvkit.allgather(z)
    assert all(each.is_leaf for each in everyone)
    assert not any(each.requires_grad for each in hvkit.allgather(z.detach()))


def test_ranks_that_pass_different_things_are_an_error():
    last = hvkit.rank() == SIZE - 1
    z = torch.ones(3, requires_grad=True)
    other = z.detach() if last else z * 2
    assert raised_everywhere(
        lambda: hvkit.allgather(other), f"rank {SIZE - 1} passes something else"
    )
    other = z.double() if last else z * 2
    assert raised_everywhere(lambda: hvkit.allgather(other), "a torch.float64 tensor that needs")
