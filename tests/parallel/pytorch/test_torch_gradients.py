"""Kinds of gradients, and what the script does with them."""

import copy

import pytest
import torch
from ranks import identical, largest_difference, my_part, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch_nets import (
    alike_gradients,
    backward,
    distributed,
    local,
    mean_over_ranks,
    raised_everywhere,
    regression,
    train,
    weights,
)

import hvkit


def test_sparse_embedding_gradients_stay_sparse_and_equal_one_process():
    words = torch.randint(50, (6, 4 * hvkit.size(), 3))

    def trained(distribute, batches):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(24, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        distribute(model, optimizer)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return model

    reference = trained(lambda *_: None, words)
    model = trained(hvkit.distribute, [my_part(batch) for batch in words])
    assert model[0].weight.grad.is_sparse
    assert model[0].weight.grad._nnz() <= words[0].numel()
    assert same_on_all_ranks(weights(model))
    assert largest_difference(weights(model), weights(reference)) < 1e-5


@pytest.mark.parametrize(
    "kind_of_rank",
    [
        {0: "sparse"},
        {0: "sparse", 1: "dense"},
        {0: "dense", 1: "sparse"},
        {1: "sparse"},
    ],
)
def test_ranks_may_differ_in_whether_a_gradient_is_sparse(kind_of_rank):
    """Other ranks have none; only the first gradient shows that it is sparse."""
    weight, other = nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.zeros(1))
    model, _ = distributed(model=nn.ParameterList([weight, other]))
    kind = kind_of_rank.get(hvkit.rank())
    for _ in range(3):
        model.zero_grad()
        loss = other.sum()
        if kind:
            words = torch.tensor([hvkit.rank(), 5])
            loss = loss + F.embedding(words, weight, sparse=kind == "sparse").sum()
        loss.backward()
        expected = torch.zeros(6, 2)
        for rank in kind_of_rank:
            expected[[rank, 5]] += 1 / hvkit.size()
        assert weight.grad.is_sparse == ("dense" not in kind_of_rank.values())
        torch.testing.assert_close(weight.grad.to_dense(), expected)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64], ids=str
)
def test_gradients_of_every_dtype_are_averaged(dtype):
    torch.manual_seed(hvkit.rank())
    weight = nn.Parameter(torch.zeros(5, 3, dtype=dtype))
    distributed(model=nn.ParameterList([weight, nn.Parameter(torch.zeros(2))]))
    factor = torch.randn(5, 3, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    factor[0] = 60_000  # whose sum float16 does not hold
    alone = nn.Parameter(torch.zeros(5, 3, dtype=dtype))
    for each in weight, alone:
        product = each * factor.to(dtype)
        (product.sum().abs() if dtype.is_complex else product.sum()).backward()
    assert weight.grad.dtype == dtype
    wide = torch.complex64 if dtype.is_complex else torch.float64
    torch.testing.assert_close(weight.grad, mean_over_ranks(alone.grad.to(wide)).to(dtype))


@pytest.mark.parametrize("width", [4, 600], ids=["small", "large"])
def test_means_are_those_of_the_ranks_gradients(width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))
    alone = copy.deepcopy(model)
    distributed(model=model)
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(hvkit.rank()))
    for _ in range(2):
        for each in model, alone:
            each.zero_grad()
            each(x).square().sum().backward()
    for p, own in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, mean_over_ranks(own.grad))


def test_float64_models_made_double_after_the_call_keep_their_precision():
    model, _ = distributed()
    model.double()
    (model[2].bias * (1 + 1e-12 * hvkit.rank())).sum().backward()
    expected = 1 + 1e-12 * (hvkit.size() - 1) / 2
    assert model[2].bias.grad.tolist() == pytest.approx([expected] * 4, rel=1e-15)


def cast_there_and_back(model):
    model.double().float()


def replace_data(model):
    for p in model.parameters():
        p.grad.data = p.grad.data / 2


def detach(model):
    for p in model.parameters():
        p.grad.detach_()
        p.grad.zero_()
        p.grad.add_(0.1 * p)


@pytest.mark.parametrize("change", [cast_there_and_back, replace_data, detach])
def test_gradients_that_the_script_changes_after_a_step_are_averaged_again(change):
    model, optimizer = distributed()
    data = local(regression(steps=4))
    train(model, optimizer, data[:1])
    with torch.no_grad():
        change(model)
    train(model, optimizer, data[1:])
    assert same_on_all_ranks(weights(model))
    assert alike_gradients(model)


def test_means_that_the_script_keeps_outlast_the_next_pass():
    model, optimizer = distributed()
    kept, copies = [], []
    for batch in local(regression(steps=3)):
        optimizer.zero_grad()
        backward(model, batch)
        kept += [p.grad for p in model.parameters()]
        copies += [p.grad.clone() for p in model.parameters()]
    assert identical(kept, copies)


def test_hooks_of_the_script_count_for_all_parameters_alike():
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))
    distributed(model=model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
    model(torch.ones(1, 600)).sum().backward()
    assert not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("layer", "memory_format", "shape", "options"),
    [
        (nn.Conv2d(3, 4, 3), torch.channels_last, (3, 8, 8), {}),
        (nn.Conv2d(3, 4, 3), torch.channels_last, (3, 8, 8), {"compression": "bf16"}),
        (nn.Conv2d(64, 128, 3), torch.channels_last, (64, 8, 8), {}),
        (nn.Conv3d(3, 4, 3), torch.channels_last_3d, (3, 8, 8, 8), {}),
    ],
    ids=["small", "bf16", "large", "3d"],
)
def test_channels_last_gradients_keep_their_layout(layer, memory_format, shape, options):
    """Also of a layer that comes to that format after a step in another."""
    model, alone = copy.deepcopy(layer), copy.deepcopy(layer)
    distributed(model=model, **options)
    alone.load_state_dict(model.state_dict())
    x = my_part(torch.randn(2 * hvkit.size(), *shape))
    for each_format in (torch.contiguous_format, memory_format):
        for each in (model, alone):
            each.to(memory_format=each_format).zero_grad()
            each(x.to(memory_format=each_format)).square().mean().backward()
        assert model.weight.grad.is_contiguous(memory_format=each_format)
        within = {"rtol": 1e-2, "atol": 1e-3} if options else {}
        torch.testing.assert_close(model.weight.grad, mean_over_ranks(alone.weight.grad), **within)
    memory = model.weight.grad.untyped_storage().nbytes()
    assert (memory > model.weight.grad.nbytes) == (not options)  # the bucket's: not copied back


@pytest.mark.parametrize("changed", ["before the call", "after a step"])
def test_a_rank_that_changes_its_memory_format_alone_is_an_error(changed):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)))
    model.append(nn.Conv2d(3, 700_000, 1))  # a bucket of its own before the last
    x = my_part(torch.randn(hvkit.size(), 3, 2, 2))

    def new_gradients():
        model.zero_grad()
        model(x).square().mean().backward()

    if changed == "after a step":
        distributed(model=model)
        new_gradients()
    if hvkit.rank() == 1:
        model[0].to(memory_format=torch.channels_last)
    if changed == "before the call":
        distributed(model=model)
    text = "parameter 0.weight is in torch.channels_last on rank 1 but not on rank 0"
    assert raised_everywhere(new_gradients, text, "in the same way on every rank")
