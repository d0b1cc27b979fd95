"""Kinds of gradients, and accumulation, clipping and scaling before the step."""

import pytest
import torch
from nets import arrays, local, mean_over_ranks, mlp, regression, train, train_with_closure
from ranks import largest_difference, my_part, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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


def test_channels_last_gradients_keep_their_layout():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = my_part(torch.randn(2 * hvkit.size(), 3, 8, 8)).to(memory_format=torch.channels_last)
    model(x).square().mean().backward()
    assert model.weight.grad.is_contiguous(memory_format=torch.channels_last)
    alone = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    alone.load_state_dict(model.state_dict())
    alone(x).square().mean().backward()
    torch.testing.assert_close(model.weight.grad, mean_over_ranks(alone.weight.grad))


@pytest.mark.parametrize("passed", [True, False], ids=["accumulate=k", "not passed"])
def test_accumulation_equals_the_k_times_larger_batch(passed):
    k = 4
    data = regression(steps=5, per_rank=3 * k)
    reference = mlp()
    train(reference, torch.optim.Adam(reference.parameters(), lr=0.01), data)

    model = mlp()
    model, optimizer = hvkit.distribute(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        lr_scaling="none",
        accumulate=k if passed else 1,
    )
    for x, y in local(data):
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(k), y.chunk(k), strict=True):
            (F.mse_loss(model(part_x), part_y) / k).backward()
        optimizer.step()
    assert same_on_all_ranks(arrays(model.parameters()))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


def test_accumulation_reduces_once_in_k_passes(monkeypatch):
    from hvkit.adapters.pytorch.buckets import Bucket

    launches = []
    launch = Bucket.launch
    monkeypatch.setattr(
        Bucket, "launch", lambda self, wire: (launches.append(self.name), launch(self, wire))
    )
    model = mlp()
    model, optimizer = hvkit.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=3
    )
    for i, (x, y) in enumerate(local(regression(steps=6))):
        F.mse_loss(model(x), y).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert len(launches) == 2


def test_a_shorter_last_accumulation_is_reduced_by_the_step():
    data = regression(steps=2)
    model = mlp()
    model, optimizer = hvkit.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=4
    )
    for x, y in local(data):
        F.mse_loss(model(x), y).backward()
    optimizer.step()
    assert same_on_all_ranks(arrays(model.parameters()))
    assert same_on_all_ranks([p.grad.numpy() for p in model.parameters()])


def test_clipping_acts_on_the_mean():
    def steps(model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            F.mse_loss(model(x), 100 * y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    data = regression(steps=8)
    reference = mlp()
    steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1), data)
    model = mlp()
    model, optimizer = hvkit.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lr_scaling="none"
    )
    steps(model, optimizer, local(data))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    model = mlp()
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step, (x, y) in enumerate(local(regression(steps=4))):
        if step == 1 and hvkit.rank() == hvkit.size() - 1:
            y = y * float("inf")
        before = arrays(model.parameters())
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed = largest_difference(arrays(model.parameters()), before) > 0
        assert changed == (step != 1)
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert same_on_all_ranks(arrays(model.parameters()))


@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_models(compiled_first):
    data = regression(steps=5)
    reference = mlp()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), data)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if compiled_first:
        compiled, _ = hvkit.distribute(
            torch.compile(model, backend="aot_eager"), optimizer, lr_scaling="none"
        )
    else:
        hvkit.distribute(model, optimizer, lr_scaling="none")
        compiled = torch.compile(model, backend="aot_eager")
    train(compiled, optimizer, local(data))
    assert same_on_all_ranks(arrays(model.parameters()))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    """With a layer that is used inside and outside of the checkpointed segment."""

    def forward(model, x):
        x = torch.tanh(model[0](x))
        x = checkpoint(lambda t: torch.tanh(model[1](t)), x, use_reentrant=use_reentrant)
        return model[2](torch.tanh(model[1](x)))

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            F.mse_loss(forward(model, x.clone().requires_grad_()), y).backward()
            optimizer.step()

    data = regression(steps=6)
    reference, optimizer = make()
    steps(reference, optimizer, data)
    model, optimizer = hvkit.distribute(*make(), lr_scaling="none")
    steps(model, optimizer, local(data))
    assert same_on_all_ranks(arrays(model.parameters()))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


def test_a_backward_pass_that_failed_leaves_nothing_behind():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("out of memory, say")

    x, y = local(regression(steps=1))[0]
    model = mlp()
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="out of memory"):
        F.mse_loss(model[2](Fails.apply(torch.tanh(model[0](x)))), y).backward()
    model.zero_grad(set_to_none=False)
    F.mse_loss(model[0](x)[:, :4], y).backward()
    alone = mlp()
    F.mse_loss(alone[0](x)[:, :4], y).backward()
    for p, q in zip(model[0].parameters(), alone[0].parameters(), strict=True):
        torch.testing.assert_close(p.grad, mean_over_ranks(q.grad))
    for p in model[2].parameters():
        assert torch.equal(p.grad, torch.zeros_like(p))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=5),
        lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
    ],
    ids=["SGD", "LBFGS", "LBFGS with line search"],
)
def test_a_closure_passed_to_step(make):
    data = regression(steps=3)

    reference = mlp()
    train_with_closure(reference, make(reference.parameters()), data)
    model = mlp()
    model, optimizer = hvkit.distribute(model, make(model.parameters()), lr_scaling="none")
    train_with_closure(model, optimizer, local(data))
    assert same_on_all_ranks(arrays(model.parameters()))
    # A line search amplifies rounding, because it compares losses to decide how far to go.
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-3


def test_a_step_inside_backward_is_refused():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(ValueError, match="call it after backward"):
        model(torch.ones(2, 8)).sum().backward()
