"""Every rank gets the same clear error, and none waits for the others."""

import pytest
import torch
from ranks import error_of
from torch import nn
from torch_nets import raised_everywhere

import hvkit


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def on_last_rank(this, otherwise):
    return this if hvkit.rank() == hvkit.size() - 1 else otherwise


DIFFERENT_MODELS = {
    "count": (
        lambda: nn.Sequential(nn.Linear(2, 2)),
        r"SGD with parameter groups of \[2\] on rank \d, but parameter 1.weight",
    ),
    "names": (
        lambda: nn.Sequential(nn.Identity(), nn.Linear(2, 2), nn.Linear(2, 2)),
        r"parameter 1.weight: shape \(2, 2\), torch.float32 on rank \d, but parameter 0.weight",
    ),
    "shapes": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)),
        r"parameter 0.weight: shape \(3, 2\), .* but parameter 0.weight: shape \(2, 2\)",
    ),
    "dtypes": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()),
        r"parameter 1.weight: shape \(2, 2\), torch.float64 on rank \d, but parameter 1.weight",
    ),
}


@pytest.mark.parametrize("kind", DIFFERENT_MODELS)
def test_models_that_differ_are_an_error_that_names_the_first_difference(kind):
    make, message = DIFFERENT_MODELS[kind]
    model = on_last_rank(make, lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))()
    with pytest.raises(hvkit.RanksDisagreeError, match=message) as raised:
        hvkit.distribute(model, sgd(model))
    assert len(set(hvkit.allgather(str(raised.value)))) == 1
    assert isinstance(raised.value, ValueError)


def test_arguments_that_differ_are_an_error_everywhere():
    model = nn.Linear(2, 2)
    scaling = on_last_rank("sqrt", "linear")
    assert raised_everywhere(
        lambda: hvkit.distribute(model, sgd(model), lr_scaling=scaling),
        "lr_scaling=sqrt",
        "lr_scaling=linear",
    )


def test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all():
    model = nn.Linear(2, 2)
    error, text = error_of(
        lambda: hvkit.distribute(model, on_last_rank("not an optimizer", sgd(model)))
    )
    assert error is TypeError
    assert "must be a torch.optim.Optimizer" in text
    assert text.startswith(f"on rank {hvkit.size() - 1}: ") == (hvkit.rank() != hvkit.size() - 1)


WRONG = {
    "model": (lambda m: (object(), sgd(m)), {}, TypeError, "a keras.Model or an nnx.Module"),
    "optimizer": (lambda m: (m, "adam"), {}, TypeError, "must be a torch.optim.Optimizer"),
    "strange optimizer": (
        lambda m: (m, sgd(nn.Linear(2, 2))), {}, ValueError, "holds none of the 2 parameters",
    ),
    "no optimizer": (lambda m: (m, []), {}, ValueError, "at least one optimizer"),
    "wrapped model": (
        lambda m: (nn.DataParallel(m), sgd(m)), {}, TypeError, "pass the plain module",
    ),
    "scaling": (
        lambda m: (m, sgd(m)), {"lr_scaling": "cubic"}, ValueError, "sqrt; got 'cubic'",
    ),
    "accumulate": (
        lambda m: (m, sgd(m)), {"accumulate": 0}, ValueError, "must be at least 1, got 0",
    ),
    "warm-up": (
        lambda m: (m, sgd(m)), {"warmup_steps": 1.5}, TypeError, "must be an int, got 1.5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_say_what_came_and_what_is_accepted(kind):
    arguments, options, expected, message = WRONG[kind]
    model = nn.Linear(2, 2)
    call = lambda: hvkit.distribute(*arguments(model), **options)  # noqa: E731
    assert raised_everywhere(call, message, kind=expected)


def test_a_second_call_is_an_error():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    joint = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    hvkit.distribute(model, joint)
    for again in ((model, sgd(model)), (other, joint)):
        with pytest.raises(ValueError, match=r"was passed to hvkit.distribute before"):
            hvkit.distribute(*again)
