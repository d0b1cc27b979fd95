"""PyTorch: what strategies with rounds refuse, and the errors of ranks that cannot agree."""

import gc

import pytest
from ranks import error_of
from torch import nn
from torch_nets import (
    alike,
    in_rounds,
    local,
    mlp,
    raised_everywhere,
    regression,
    sgd,
    train,
)

import hvkit

pytestmark = pytest.mark.two_ranks


def test_ranks_that_disagree_are_named():
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    data = local(regression(steps=3))
    train(model, optimizer, data[:1])
    optimizer.param_groups[0]["lr"] = 0.1 + hvkit.rank()
    assert raised_everywhere(lambda: train(model, optimizer, data[1:2]), "learning rate", "rank 1")

    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    model[0].requires_grad_(hvkit.rank() == 0)
    assert raised_everywhere(lambda: train(model, optimizer, data), "0.weight requires a gradient")

    model = mlp()
    optimizers = sgd(model[0].parameters()), sgd(model[2].parameters())
    hvkit.distribute(model, optimizers, strategy=hvkit.LocalSGD(1))
    own = optimizers[hvkit.rank() % 2]
    assert raised_everywhere(lambda: train(model, own, data), "of optimizer 1 of model hvkit.")


def test_weights_that_one_rank_loaded_alone_are_found_before_the_first_step():
    model, optimizer = in_rounds(hvkit.LocalSGD(8))
    if hvkit.rank() == 1:
        nn.init.zeros_(model[2].weight)
    step = lambda: train(model, optimizer, local(regression(steps=1)))  # noqa: E731
    assert raised_everywhere(step, "parameter 2.weight of rank 1 differs")


def refused(kind, *parts, strategy, **options):
    model = mlp()
    error, text = error_of(
        lambda: hvkit.distribute(model, sgd(model.parameters()), strategy=strategy, **options)
    )
    assert error is kind, text
    for part in parts:
        assert part in text
    return True


def test_contradictions_are_refused():
    rounds = hvkit.LocalSGD(4)
    assert refused(ValueError, "LocalSGD(every=4)", "sync", strategy=rounds, batch_norm="sync")
    assert refused(ValueError, "check_every=10", strategy=rounds, check_every=10)
    assert refused(TypeError, "hvkit.DiLoCo(...)", strategy=hvkit.DiLoCo)
    assert refused(TypeError, "'local'", strategy="local")
    other = hvkit.LocalSGD(4 + hvkit.rank())
    assert refused(hvkit.RanksDisagreeError, "LocalSGD(every=5)", strategy=other)


def test_an_optimizer_that_was_not_passed_is_refused():
    model, _ = in_rounds(hvkit.LocalSGD(4))
    error, text = error_of(lambda: train(model, sgd(model.parameters()), regression(steps=1)))
    assert error is ValueError
    assert "was not passed" in text


def test_a_later_optimizer_is_refused_though_the_first_is_gone():
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    data = local(regression(steps=2))
    train(model, optimizer, data)
    del optimizer
    gc.collect()
    error, _ = error_of(lambda: train(model, sgd(model.parameters()), data))
    assert error is ValueError


def test_ranks_that_train_different_parameters_are_named():
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    data = local(regression(steps=2))
    model[2 * (hvkit.rank() % 2)].requires_grad_(False)
    train(model, optimizer, data[:1])
    model.requires_grad_(False)
    optimizer.zero_grad()
    assert raised_everywhere(optimizer.step, "was trained in this round on rank", "but not on")


def test_ranks_with_different_numbers_of_steps_cannot_settle():
    model, optimizer = in_rounds(hvkit.LocalSGD(4))
    data = local(regression(steps=3))
    train(model, optimizer, data[: 1 + (hvkit.rank() == 1)])

    def settle():
        with hvkit.settled(model):
            pass

    assert raised_everywhere(settle, "rank 1 has taken 2 steps", "rank 0 1")


def test_a_step_inside_settled_is_refused():
    model, optimizer = in_rounds(hvkit.LocalSGD(4))
    data = local(regression(steps=2))
    train(model, optimizer, data[:1])
    with hvkit.settled(model):
        error, text = error_of(lambda: train(model, optimizer, data[1:]))
    assert error is ValueError
    assert "hvkit.settled" in text


@pytest.mark.parametrize("wrong", [[1], None, "model"])
def test_settled_takes_models(wrong):
    with (
        pytest.raises(TypeError, match="settled takes models and optimizers"),
        hvkit.settled(wrong),
    ):
        pass


def test_settled_names_a_parameter_that_only_one_rank_has_trained():
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    data = local(regression(steps=3))
    train(model, optimizer, data[:2])
    optimizer.zero_grad()
    model[2].requires_grad_(hvkit.rank() == 0)
    train(model, optimizer, data[2:])
    text = "2.weight was trained in this round on rank 0 but not on rank 1"
    assert raised_everywhere(lambda: hvkit.settled(model).__enter__(), text)


def test_the_rates_of_an_optimizer_that_one_rank_has_dropped_do_not_count():
    model = mlp()
    first, second = sgd(model[0].parameters()), sgd(model[2].parameters())
    hvkit.distribute(model, [first, second], strategy=hvkit.LocalSGD(2))
    data = local(regression(steps=4))
    train(model, first, data[:2])
    kept = [first] if hvkit.rank() == 0 else []
    first.param_groups[0]["lr"] = 0.5
    del first
    gc.collect()
    train(model, second, data[2:])
    assert alike(model)
    assert len(kept) == (hvkit.rank() == 0)
