"""Kinds of gradients, and what the script does with them."""

import copy

import pytest
import torch
from ranks import largest_difference, my_part, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch_nets import arrays, local, mean_over_ranks, mlp, raised_everywhere, regression

import hvkit


def test_sparse_embedding_gradients_stay_sparse_and_equal_one_process():
    words = torch.randint(50, (10, 4 * hvkit.size(), 3))

    def steps(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(24, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    reference, optimizer = make()
    steps(reference, optimizer, words)
    model, optimizer = hvkit.distribute(*make(), lr_scaling="none")
    steps(model, optimizer, [my_part(batch) for batch in words])
    assert model[0].weight.grad.is_sparse
    assert model[0].weight.grad._nnz() <= words[0].numel()
    assert same_on_all_ranks(arrays(model.parameters()))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


@pytest.mark.parametrize("multiplied", [True, False])
def test_a_sum_over_samples_equals_one_process_if_multiplied_by_the_number_of_ranks(multiplied):
    def steps(model, optimizer, batches, weight):
        for x, y in batches:
            optimizer.zero_grad()
            (F.mse_loss(model(x), y, reduction="sum") * weight).backward()
            optimizer.step()

    data = regression(steps=8)
    reference = mlp()
    steps(reference, torch.optim.SGD(reference.parameters(), lr=0.002), data, 1)
    model = mlp(hvkit.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    hvkit.distribute(model, optimizer, lr_scaling="none")
    steps(model, optimizer, local(data), hvkit.size() if multiplied else 1)
    different = largest_difference(arrays(model.parameters()), arrays(reference.parameters()))
    assert (different < 1e-5) == multiplied


def functional_embedding(weight, words, sparse):
    return F.embedding(words, weight, sparse=sparse).sum()


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
    weight = nn.Parameter(torch.zeros(6, 2))
    other = nn.Parameter(torch.zeros(1))
    model = nn.ParameterList([weight, other])
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kind = kind_of_rank.get(hvkit.rank())
    for _ in range(3):
        model.zero_grad()
        loss = other.sum()
        if kind:
            words = torch.tensor([hvkit.rank(), 5])
            loss = loss + functional_embedding(weight, words, sparse=kind == "sparse")
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
    model = nn.ParameterList([weight, nn.Parameter(torch.zeros(2))])
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    factor = torch.randn(5, 3, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    (weight * factor.to(dtype)).sum().abs().backward()
    alone = nn.Parameter(torch.zeros(5, 3, dtype=dtype))
    (alone * factor.to(dtype)).sum().abs().backward()
    assert weight.grad.dtype == dtype
    wide = torch.complex64 if dtype.is_complex else torch.float64
    torch.testing.assert_close(weight.grad, mean_over_ranks(alone.grad.to(wide)).to(dtype))


@pytest.mark.parametrize("width", [4, 600], ids=["small", "large"])
def test_means_are_those_of_the_ranks_gradients(width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))
    alone = copy.deepcopy(model)
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(hvkit.rank()))
    for _ in range(2):
        for each in model, alone:
            each.zero_grad()
            each(x).square().sum().backward()
    for p, own in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, mean_over_ranks(own.grad))


def test_a_float16_mean_survives_a_sum_that_would_overflow():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    model = nn.ParameterList([weight])
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (weight * 60000).sum().backward()
    assert weight.grad.tolist() == [60000] * 3


def test_float64_models_made_double_after_the_call_keep_their_precision():
    model = mlp()
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.double()
    (model[2].bias * (1 + 1e-12 * hvkit.rank())).sum().backward()
    expected = 1 + 1e-12 * (hvkit.size() - 1) / 2
    assert model[2].bias.grad.tolist() == pytest.approx([expected] * 4, rel=1e-15)


def train_on(model, optimizer, steps):
    for x, y in steps:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("change", ["dtypes there and back", "data of gradients", "detached"])
def test_gradients_that_the_script_changes_after_a_step_are_averaged_again(change):
    model = mlp()
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = local(regression(steps=4))
    train_on(model, optimizer, data[:1])
    if change == "dtypes there and back":
        model.double().float()
    for p in model.parameters():
        if change == "data of gradients":
            p.grad.data = p.grad.data / 2
        elif change == "detached":
            p.grad.detach_()
            p.grad.zero_()
            p.grad.add_(0.1 * p)
    train_on(model, optimizer, data[1:])
    assert same_on_all_ranks(arrays(model.parameters()))
    assert same_on_all_ranks([p.grad.numpy() for p in model.parameters()])


@pytest.mark.parametrize("first", ["an accumulated pass", "a pass that fails"])
def test_parameters_that_thaw_between_two_passes_are_averaged(first):
    accumulate = 2 if first == "an accumulated pass" else 1
    model = mlp()
    model[0].requires_grad_(False)
    model, optimizer = hvkit.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=accumulate
    )
    (x, y), *_ = local(regression(steps=1))
    if first == "an accumulated pass":
        F.mse_loss(model(x), y).backward()
    else:
        hook = model[0].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            F.mse_loss(model(x.requires_grad_()), y).backward()
        hook.remove()
        optimizer.zero_grad()
    model[0].requires_grad_(True)
    F.mse_loss(model(x), y).backward()
    assert same_on_all_ranks([p.grad.numpy() for p in model.parameters()])
    optimizer.step()
    assert same_on_all_ranks(arrays(model.parameters()))


def test_a_group_of_parameters_may_come_between_two_accumulated_passes():
    model, extra = mlp(), nn.Parameter(torch.ones(4))
    model, optimizer = hvkit.distribute(
        model, torch.optim.SGD(model[0].parameters(), lr=0.1), accumulate=2
    )
    (x, y), *_ = local(regression(steps=1))
    F.mse_loss(model(x), y).backward()
    optimizer.add_param_group({"params": [extra]})
    (F.mse_loss(model(x), y) + extra.sum() * (1 + hvkit.rank())).backward()
    optimizer.step()
    assert same_on_all_ranks([extra.detach().numpy(), *arrays(model[0].parameters())])


def test_gradients_that_the_script_holds_become_the_means():
    model = mlp()
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)
    (x, y), *_ = local(regression(steps=1))
    F.mse_loss(model(x), y).backward()
    held = [p.grad for p in model.parameters()]
    F.mse_loss(model(x), y).backward()
    assert same_on_all_ranks([g.numpy() for g in held])
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))


def test_means_that_the_script_keeps_outlast_the_next_pass():
    model = mlp()
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept, copies = [], []
    for x, y in local(regression(steps=3)):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        kept.append([p.grad for p in model.parameters()])
        copies.append([p.grad.clone() for p in model.parameters()])
    for mine, copied in zip(kept, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, copied, strict=True))


def test_hooks_of_the_script_count_for_all_parameters_alike():
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def clear(p):
        p.grad.zero_()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clear)
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
    torch.manual_seed(0)
    model = copy.deepcopy(layer).to(memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer, **options)
    x = my_part(torch.randn(2 * hvkit.size(), *shape)).to(memory_format=memory_format)
    alone = copy.deepcopy(layer).to(memory_format=memory_format)
    alone.load_state_dict(model.state_dict())
    for each in (model, alone):
        each(x).square().mean().backward()
    assert model.weight.grad.is_contiguous(memory_format=memory_format)
    memory = model.weight.grad.untyped_storage().nbytes()
    assert (memory > model.weight.grad.nbytes) == (not options)  # the bucket's: not copied back
    within = {"rtol": 1e-2, "atol": 1e-3} if options else {}
    torch.testing.assert_close(model.weight.grad, mean_over_ranks(alone.weight.grad), **within)


def test_ranks_with_different_memory_formats_are_an_error():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    if hvkit.rank() == 1:
        model.to(memory_format=torch.channels_last)
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert raised_everywhere(
        lambda: model(torch.randn(2, 3, 8, 8)).square().mean().backward(),
        "parameter weight is in torch.channels_last on rank 1 but not on rank 0",
        "alike on every rank",
    )


def test_a_memory_format_may_change_between_steps():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = my_part(torch.randn(2 * hvkit.size(), 3, 8, 8))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model.to(memory_format=memory_format).zero_grad()
        model(x).square().mean().backward()
        assert model.weight.grad.is_contiguous(memory_format=memory_format)


def test_a_rank_that_changes_its_memory_format_alone_is_an_error():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)))
    model.append(nn.Conv2d(3, 700_000, 1))  # a bucket of its own before the last
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = my_part(torch.randn(hvkit.size(), 3, 2, 2))
    model(x).square().mean().backward()
    model.zero_grad()
    if hvkit.rank() == 1:
        model[0].to(memory_format=torch.channels_last)
    assert raised_everywhere(
        lambda: model(x).square().mean().backward(),
        "parameter 0.weight is in torch.channels_last on rank 1 but not on rank 0",
    )
