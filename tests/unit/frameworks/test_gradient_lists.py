"""Compiled loops over gradients give the results of those in Python."""

import sys

import numpy as np
import pytest
import torch

from hvkit.frameworks.pytorch.gradients import gradient_lists
from hvkit.frameworks.pytorch.gradients.gradient_lists import Lists, running_pass

# Of hvkit's own build of Horovod.
COMPILED = gradient_lists.lists()


@pytest.fixture(params=[COMPILED, Lists()], ids=["compiled", "in Python"])
def lists(request):
    return request.param


def parameters(*gradients):
    made = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in gradients]
    for p, gradient in zip(made, gradients, strict=True):
        p.grad = gradient
    return made


def ones():
    return torch.ones(2, 3)


def sparse():
    return ones().to_sparse(1)


def test_the_build_has_the_compiled_ones():
    assert type(COMPILED).__name__ == "module"


@pytest.mark.parametrize(
    ("gradients", "present", "dense"),
    [((ones, ones), [0, 1], True), ((None, ones), [1], False), ((ones, sparse), [0, 1], False)],
)
def test_gradients_that_are_there(lists, gradients, present, dense):
    some = parameters(*(make and make() for make in gradients))
    views = [torch.full((2, 3), 7.0) for _ in some]
    assert lists.present(some) == present
    assert lists.dense(some) == dense
    assert lists.pack(some, views) == dense
    assert all((view == (1 if dense else 7)).all() for view in views)


@pytest.mark.parametrize(
    "gradient",
    [
        torch.randn(2, 3),
        torch.randn(3, 2).T,
        torch.randn(2, 3)[:, [2, 0, 1]][:, ::1],
        torch.randn(2, 1).expand(2, 3),
        torch.randn(2, 3, requires_grad=True).exp(),
        torch._neg_view(torch.randn(2, 3)),
    ],
    ids=["plain", "transposed", "indexed", "expanded", "with a graph", "negative view"],
)
@pytest.mark.parametrize("order", ["rows", "columns"])
def test_packed_gradients_are_the_same_numbers(lists, gradient, order):
    view = torch.zeros(2, 3) if order == "rows" else torch.zeros(3, 2).T
    (p,) = parameters(gradient)
    assert lists.pack([p], [view])
    assert torch.equal(view, gradient.detach())
    assert not view.requires_grad


def test_gradients_in_other_dtypes_are_converted(lists):
    p = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    p.grad = torch.full((2, 3), 1.5, dtype=torch.bfloat16)
    view = torch.zeros(2, 3)
    assert lists.pack([p], [view])
    assert (view == 1.5).all()


def test_a_gradient_of_another_shape_is_refused(lists):
    (p,) = parameters(ones())
    with pytest.raises(RuntimeError):
        lists.pack([p], [torch.zeros(5)])
    with pytest.raises(RuntimeError):
        lists.give([p], [torch.zeros(3, 2)])


def test_means_become_gradients_themselves(lists):
    some, means = parameters(None, ones()), [torch.rand(2, 3) for _ in range(2)]
    lists.give(some, means)
    assert all(p.grad is mean for p, mean in zip(some, means, strict=True))


@pytest.mark.parametrize("use", ["none", "gradient", "kept", "moved", "needs a gradient"])
def test_means_that_something_uses_are_noticed(lists, use):
    flat = torch.zeros(6)
    means = [flat[:3].data, flat[3:].data]
    references = sys.getrefcount(means[0])
    addresses = [mean.data_ptr() for mean in means]
    p, kept = torch.nn.Parameter(torch.zeros(3)), None
    if use == "gradient":
        p.grad = means[1]
    elif use == "kept":
        kept = means[1]
    elif use == "moved":
        means[1].data = torch.zeros(3)
    elif use == "needs a gradient":
        means[1].requires_grad_()
    assert lists.unused(means, addresses, references) == (use == "none")
    del kept


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (lambda p: None, 0),
        (lambda p: p.grad.mul_(2), 1),
        (lambda p: p.grad.mul_(2).add_(1), 2),
        (lambda p: setattr(p, "grad", torch.ones(2, 3)), None),
        (lambda p: setattr(p, "grad", None), None),
    ],
)
def test_versions_show_how_often_a_gradient_has_changed(lists, change, counts):
    some, first = parameters(ones(), None, ones()), []
    first.append(some[0].grad)  # its address is not to be used again
    before = np.frombuffer(lists.versions(some), np.int64).reshape(-1, 2)
    change(some[0])
    after = np.frombuffer(lists.versions(some), np.int64).reshape(-1, 2)
    assert (before[1:] == after[1:]).all()
    if counts is None:
        assert before[0, 0] != after[0, 0]
    else:
        assert (after - before)[0].tolist() == [0, counts]


def test_versions_of_tensors_of_inference_mode_are_none(lists):
    with torch.inference_mode():
        gradient = ones()
    assert np.frombuffer(lists.versions(parameters(gradient)), np.int64)[1] == -1


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.requires_grad_(False),
        lambda p: setattr(p, "data", p.data.double()),
        lambda p: setattr(p, "data", torch.zeros(3, 2).T),
    ],
    ids=["frozen", "dtype", "order"],
)
def test_properties_change_with_what_decides_a_layout(lists, change):
    some = parameters(None, None)
    before = lists.properties(some)
    assert lists.properties(some) == before
    change(some[1])
    assert lists.properties(some) != before


def test_a_hook_counts_but_for_the_last_and_in_other_passes(lists):
    seen, model = [], torch.nn.Linear(2, 2)
    running, full, left = (lists.number() for _ in range(3))

    def otherwise(parameter):
        seen.append((left.value, running.value == running_pass(), full.value))
        running.value = running_pass()
        left.value -= 1

    hook = lists.hook(running, full, left, otherwise)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    running.value, left.value = -2, 4
    model(torch.ones(1, 2)).sum().backward()
    assert seen == [(4, False, 0)]  # the first of a pass; the second was counted
    assert left.value == 2
    running.value = -2
    model(torch.ones(1, 2)).sum().backward()
    assert seen[1:] == [(2, False, 0), (1, True, 0)]  # the last is not only counted
    left.value, full.value = 10, 1
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 5  # a full bucket is sent first
    assert left.value == 8


def test_an_error_in_a_hook_ends_the_pass(lists):
    def otherwise(parameter):
        raise KeyError("label 17")

    model = torch.nn.Linear(2, 2)
    hook = lists.hook(lists.number(), lists.number(), lists.number(), otherwise)
    model.weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(KeyError, match="label 17"):
        model(torch.ones(1, 2)).sum().backward()


def test_hooks_and_numbers_are_freed(lists):
    def otherwise(parameter):
        pass

    numbers = [lists.number() for _ in range(3)]
    before = [sys.getrefcount(each) for each in (*numbers, otherwise)]
    for _ in range(3):
        lists.hook(*numbers, otherwise)
    assert [sys.getrefcount(each) for each in (*numbers, otherwise)] == before
