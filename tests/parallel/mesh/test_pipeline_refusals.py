"""PyTorch: what a pipeline refuses, and how it says why."""

import copy

import pytest
import torch
from cases import MORE
from mesh_models import MLP, SMALL, Masked, PassesTwo, Recurrent
from mesh_training import adamw, cross_entropy, distributed, tokens, train, vectors
from ranks import error_of
from torch import nn

import hvkit
from hvkit.errors import RanksDisagreeError

pytestmark = MORE


def with_old_weight_norm():
    return nn.Sequential(MLP(), nn.utils.weight_norm(nn.Linear(10, 4)))


def with_a_loose_parameter(model):
    return torch.optim.SGD([*model.parameters(), torch.zeros(2, requires_grad=True)])


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    ("make", "optimizer", "options", "text"),
    [
        (MLP, adamw, {"mesh": hvkit.Mesh(pipeline=3)}, "needs a number of ranks that"),
        (MLP, adamw, {"schedule": "zero"}, "must be one of"),
        (MLP, adamw, {"schedule": "1F1B", "microbatches": 3}, "must be a multiple of the 2 ranks"),
        (MLP, adamw, {"mesh": hvkit.Mesh(tensor=2, pipeline=1)}, "needs a pipeline"),
        (MLP, adamw, {"strategy": hvkit.Gossip()}, "Gossip"),
        (MLP, adamw, {"mesh": None}, "needs a mesh"),
        (MLP, lbfgs, {}, "its step() needs a closure"),
        (MLP, with_a_loose_parameter, {}, "SGD updates a parameter of shape (2,) that is not in"),
        (lambda: torch.compile(MLP(), backend="eager"), adamw, {}, "compile its blocks"),
        (with_old_weight_norm, adamw, {}, "use torch.nn.utils.parametrizations.weight_norm"),
    ],
)
def test_distribute_refuses_models_and_options_without_a_pipeline(make, optimizer, options, text):
    kind, message = error_of(lambda: distributed(make(), optimizer, **options))
    assert kind in (TypeError, ValueError), (kind, message)
    assert text in message


class LooksAtValues(PassesTwo):
    def forward(self, x):
        if self.first(x).sum() > 0:
            x = x * 2
        return super().forward(x)


def with_one_layer():
    return nn.Sequential(nn.Linear(20, 4))


@pytest.mark.parametrize(
    ("make", "options", "inputs", "text"),
    [
        (MLP, {"stages": ["7"]}, [torch.ones(4, 20)], "cannot be cut after '7', only after 0"),
        (MLP, {}, [torch.ones(4, 20, requires_grad=True)], "requires a gradient"),
        (with_one_layer, {}, [torch.ones(4, 20)], "needs 1 places to cut the model, but there are"),
        (LooksAtValues, {}, [torch.ones(4, 20)], "looks at a value that depends on its weights"),
        (
            Masked,
            {},
            [torch.ones(10, 20), torch.eye(10)],
            "whole batch of 10 samples, but not a micro-batch of 3",
        ),
    ],
)
def test_models_that_do_not_fit_a_pipeline_are_refused_at_every_call(make, options, inputs, text):
    torch.set_default_dtype(torch.float32)
    model, _ = distributed(make(), **options)
    for _ in range(2):  # not the plain forward, without the other ranks, in the second call
        kind, message = error_of(lambda: model(*inputs))
        assert kind is ValueError
        assert text in message


def test_a_model_that_takes_time_before_the_batch_is_refused():
    model, own = distributed(Recurrent(batch_first=False))
    with pytest.raises(ValueError, match="batch_first=True"):
        train(model, own, tokens(1))


def test_a_rank_with_another_batch_is_named():
    model, own = distributed(SMALL())
    with pytest.raises(RanksDisagreeError, match="gets another batch"):
        train(model, own, tokens(3)[hvkit.rank() :])


def test_weights_that_one_rank_has_loaded_since_are_named():
    model, _ = distributed(MLP())
    if hvkit.rank() == 1:
        nn.init.zeros_(model[0].bias)
    with pytest.raises(RanksDisagreeError, match=r"rank 1 holds other weights .* in 0\.bias:"):
        model(torch.ones(4, 20))


def test_a_divided_model_refuses_copies_and_a_second_backward():
    model, own = distributed(MLP())
    with pytest.raises(ValueError, match="cannot be copied"):
        copy.deepcopy(model)
    outputs = model(torch.ones(4, 20))
    outputs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        outputs.sum().backward()
    for each in (model, own):
        kind, text = error_of(each.state_dict)
        assert kind is ValueError
        assert "settled" in text


def test_modules_of_other_stages_outside_of_forward():
    model, own = distributed(MLP())
    train(model, own, vectors(1))
    other = model[-1] if hvkit.rank() == 0 else model[0]
    kind, text = error_of(lambda: other(torch.ones(2, other.in_features)))
    assert kind is ValueError
    assert "another rank of the pipeline has its weights" in text


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBVZeroBubble"])
def test_gradients_of_chosen_parameters_are_refused(schedule):
    model, _ = distributed(SMALL(), schedule=schedule)
    x, y = tokens(1)[0]
    for _ in range(2):  # the first batch of a shape takes GPipe
        cross_entropy(model(x), y).backward()
    loss = cross_entropy(model(x), y)
    chosen = list(model.parameters())
    for way in (
        lambda: loss.backward(inputs=chosen),
        lambda: torch.autograd.grad(loss, chosen, allow_unused=True),
    ):
        with pytest.raises(ValueError, match="inputs="):
            way()
    loss.backward()


def test_spectral_norm_in_micro_batches_is_named(capfd):
    norm = nn.utils.parametrizations.spectral_norm
    model, _ = distributed(nn.Sequential(MLP(), nn.Tanh(), norm(nn.Linear(10, 4)), nn.Tanh()))
    model(torch.ones(4, 20))
    warned = "takes a step of its power iteration for each micro-batch" in capfd.readouterr().err
    assert warned == (hvkit.rank() == 0)
