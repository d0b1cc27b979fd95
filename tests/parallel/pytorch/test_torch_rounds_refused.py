"""PyTorch: what strategies with rounds refuse, and the errors of ranks that cannot agree."""

import gc

import pytest
from torch import nn
from torch_nets import (
    alike,
    distributed,
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


def settle(model):
    with hvkit.settled(model):
        pass


def test_ranks_that_disagree_are_named():
    data = local(regression(steps=3))
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    train(model, optimizer, data[:1])
    optimizer.param_groups[0]["lr"] = 0.1 + hvkit.rank()
    assert raised_everywhere(lambda: train(model, optimizer, data[1:2]), "learning rate", "rank 1")
    model = mlp()
    optimizers = sgd(model[0].parameters()), sgd(model[2].parameters())
    hvkit.distribute(model, optimizers, strategy=hvkit.LocalSGD(1))
    own = optimizers[hvkit.rank() % 2]
    assert raised_everywhere(lambda: train(model, own, data), "of optimizer 1 of model hvkit.")


STRATEGIES = [hvkit.LocalSGD(8), hvkit.ParameterServer(2)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_weights_that_one_rank_loaded_alone_are_found_before_the_first_step(strategy):
    model, optimizer = in_rounds(strategy)
    if hvkit.rank() == 1:
        nn.init.zeros_(model[2].weight)
    data, text = local(regression(steps=1)), "parameter 2.weight of rank 1 differs"
    assert raised_everywhere(lambda: train(model, optimizer, data), text)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_ranks_that_train_other_parameters_are_named(strategy):
    model, optimizer = in_rounds(strategy)
    model[2].requires_grad_(hvkit.rank() == 0)
    data = local(regression(steps=8))
    assert raised_everywhere(lambda: train(model, optimizer, data), "2.weight", "on rank 0")


def test_ranks_that_train_different_parameters_in_a_round_are_named():
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    model[2 * (hvkit.rank() % 2)].requires_grad_(False)
    train(model, optimizer, local(regression(steps=1)))
    model.requires_grad_(False)
    optimizer.zero_grad()
    assert raised_everywhere(optimizer.step, "was trained in this round on rank", "but not on")


def test_contradictions_are_refused():
    def refused(kind, *parts, **options):
        return raised_everywhere(lambda: distributed(**options), *parts, kind=kind)

    rounds = hvkit.LocalSGD(4)
    assert refused(ValueError, "LocalSGD(every=4)", "sync", strategy=rounds, batch_norm="sync")
    assert refused(ValueError, "check_every=10", strategy=rounds, check_every=10)
    assert refused(TypeError, "hvkit.DiLoCo(...)", strategy=hvkit.DiLoCo)
    assert refused(TypeError, "'local'", strategy="local")
    other = hvkit.LocalSGD(4 + hvkit.rank())
    assert refused(hvkit.RanksDisagreeError, "LocalSGD(every=5)", strategy=other)


def test_an_optimizer_that_was_not_passed_is_refused_though_the_first_may_be_gone():
    data = local(regression(steps=2))
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    train(model, optimizer, data)

    def with_another():
        train(model, sgd(model.parameters()), data)

    assert raised_everywhere(with_another, "was not passed", kind=ValueError)
    del optimizer
    gc.collect()
    assert raised_everywhere(with_another, "was not passed itself", kind=ValueError)


def test_ranks_with_different_numbers_of_steps_cannot_settle():
    model, optimizer = in_rounds(hvkit.LocalSGD(4))
    train(model, optimizer, local(regression(steps=1 + (hvkit.rank() == 1))))
    text = "rank 1 has taken 2 steps"
    assert raised_everywhere(lambda: settle(model), text, "rank 0 1")


def test_settled_names_a_parameter_that_only_one_rank_has_trained():
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    data = local(regression(steps=3))
    train(model, optimizer, data[:2])
    optimizer.zero_grad()
    model[2].requires_grad_(hvkit.rank() == 0)
    train(model, optimizer, data[2:])
    text = "2.weight was trained in this round on rank 0 but not on rank 1"
    assert raised_everywhere(lambda: settle(model), text)


def test_weights_that_only_the_script_changes_are_no_agreement():
    model, _ = in_rounds(hvkit.LocalSGD(4))
    nn.init.constant_(model[0].weight, hvkit.rank())
    assert raised_everywhere(lambda: settle(model), "0.weight")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_step_inside_settled_is_refused(strategy):
    model, optimizer = in_rounds(strategy)
    data = local(regression(steps=2))
    train(model, optimizer, data[:1])
    with hvkit.settled(model):
        inside = lambda: train(model, optimizer, data[1:])  # noqa: E731
        assert raised_everywhere(inside, "hvkit.settled", kind=ValueError)


@pytest.mark.parametrize("wrong", [[1], None, "model"])
def test_settled_takes_models(wrong):
    with pytest.raises(TypeError, match="settled takes models and optimizers"):
        settle(wrong)


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
