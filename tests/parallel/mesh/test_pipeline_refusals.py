"""PyTorch: what a pipeline refuses, and how it says why."""

import copy

import pytest
import torch
from cases import MORE
from mesh_models import MLP, SMALL, Masked, PassesTwo, Recurrent
from mesh_training import (
    adamw,
    cross_entropy,
    distributed,
    tokens,
    train,
    vectors,
)
from ranks import error_of
from torch import nn

import hvkit
from hvkit.errors import RanksDisagreeError

pytestmark = MORE


def test_a_model_that_takes_time_before_the_batch_is_refused():
    model, own = distributed(Recurrent(batch_first=False))
    with pytest.raises(ValueError, match="batch_first=True"):
        train(model, own, tokens(1))


def test_a_rank_with_another_batch_is_named():
    model, own = distributed(SMALL())
    data = tokens(3)
    mine = data[hvkit.rank() :]
    with pytest.raises(RanksDisagreeError, match="gets another batch"):
        train(model, own, mine)


def test_weights_that_one_rank_has_loaded_since_are_named():
    model, _ = distributed(MLP())
    if hvkit.rank() == 1:
        nn.init.zeros_(model[0].bias)
    with pytest.raises(RanksDisagreeError, match=r"rank 1 holds other weights .* in 0\.bias:"):
        model(torch.ones(4, 20))


def test_refusals():
    two = hvkit.Mesh(pipeline=2)

    def refused(text, model=None, **options):
        model = MLP() if model is None else model
        options = {"mesh": two} | options
        kind, message = error_of(lambda: hvkit.distribute(model, adamw(model), **options))
        assert kind in (TypeError, ValueError), (kind, message)
        assert text in message, message

    refused("needs a number of ranks that", mesh=hvkit.Mesh(pipeline=3))
    refused("must be one of", schedule="zero")
    refused("must be a multiple of the 2 ranks", schedule="1F1B", microbatches=3)
    refused("needs a pipeline", mesh=hvkit.Mesh(tensor=2, pipeline=1), microbatches=3)
    refused("Gossip", strategy=hvkit.Gossip())
    refused("needs a mesh", mesh=None, microbatches=2)
    model = MLP()
    lbfgs = torch.optim.LBFGS(model.parameters())
    kind, text = error_of(lambda: hvkit.distribute(model, lbfgs, mesh=two))
    assert kind is ValueError
    assert "LBFGS" in text
    assert "its step() needs a closure" in text
    loose = torch.optim.SGD([*model.parameters(), torch.zeros(2, requires_grad=True)])
    kind, text = error_of(lambda: hvkit.distribute(model, loose, mesh=two))
    assert kind is ValueError
    assert "SGD updates a parameter of shape (2,) that is not in the model" in text

    model, _ = distributed(MLP(), stages=["7"])
    with pytest.raises(ValueError, match="cannot be cut after '7', only after 0"):
        model(torch.ones(4, 20))
    model, _ = distributed(MLP())
    with pytest.raises(ValueError, match="requires a gradient"):
        model(torch.ones(4, 20, requires_grad=True))
    model, _ = distributed(nn.Sequential(nn.Linear(20, 4)))
    with pytest.raises(ValueError, match="needs 1 places to cut the model, but there are 0"):
        model(torch.ones(4, 20))
    model, own = distributed(MLP())
    with pytest.raises(ValueError, match="cannot be copied"):
        copy.deepcopy(model)
    outputs = model(torch.ones(4, 20))
    outputs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        outputs.sum().backward()
    kind, text = error_of(model.state_dict)
    assert kind is ValueError
    assert "settled" in text
    kind, text = error_of(own.state_dict)
    assert kind is ValueError
    assert "settled" in text


class LooksAtValues(PassesTwo):
    def forward(self, x):
        if self.first(x).sum() > 0:
            x = x * 2
        return super().forward(x)


def test_a_forward_that_looks_at_what_weights_give_is_refused():
    model, _ = distributed(LooksAtValues())
    with pytest.raises(ValueError, match="looks at a value that depends on its weights"):
        model(vectors(1)[0][0])


def test_one_from_the_first_batch_on_is_refused():
    model, _ = distributed(Masked())
    with pytest.raises(ValueError, match="whole batch of 10 samples, but not a micro-batch of 3"):
        model(torch.ones(10, 20), torch.randn(10, 10))
    # Not the plain forward, without the other ranks.
    with pytest.raises(ValueError, match="but not a micro-batch of 3"):
        model(torch.ones(10, 20), torch.randn(10, 10))


def test_modules_of_other_stages_outside_of_forward():
    model, own = distributed(MLP())
    train(model, own, vectors(1))
    other = model[-1] if hvkit.rank() == 0 else model[0]
    kind, text = error_of(lambda: other(torch.ones(2, other.in_features)))
    assert kind is ValueError
    assert "another rank of the pipeline has its weights" in text


def test_a_model_that_is_compiled_as_a_whole_is_refused():
    kind, text = error_of(lambda: distributed(torch.compile(MLP(), backend="eager")))
    assert kind is ValueError
    assert "compile its blocks" in text


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


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_the_older_weight_norm_is_refused_with_what_replaces_it():
    model = nn.Sequential(MLP(), nn.utils.weight_norm(nn.Linear(10, 4)))
    kind, text = error_of(lambda: distributed(model))
    assert kind is ValueError
    assert "use torch.nn.utils.parametrizations.weight_norm" in text


def test_spectral_norm_in_micro_batches_is_named(capfd):
    norm = nn.utils.parametrizations.spectral_norm
    model, _ = distributed(nn.Sequential(MLP(), nn.Tanh(), norm(nn.Linear(10, 4)), nn.Tanh()))
    model(torch.ones(4, 20))
    warned = "takes a step of its power iteration for each micro-batch" in capfd.readouterr().err
    assert warned == (hvkit.rank() == 0)
