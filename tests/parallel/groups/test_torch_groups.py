"""Two groups of two ranks each train a PyTorch model of their own at the same time."""

import numpy as np
import pytest
import torch
from ranks import error_of, largest_difference, same_on_all_ranks
from torch.nn import functional as F
from torch_nets import arrays, convnet, local, mlp, regression, sgd, train

import hvkit
from hvkit.communication.collectives import gather

FRAMEWORK = "torch"
ROWS, COLUMNS = [(0, 1), (2, 3)], [(0, 2), (1, 3)]


def data_of(group, steps, shape=(8,)):
    """Batches of the whole group in float64, and this rank's part of them."""
    seed = group.first + 10 * group.members[-1]
    both = [(x.double(), y.double()) for x, y in regression(steps, 3, shape, seed)]
    return both, local(both, group)


def adam(parameters, lr=0.01):
    return torch.optim.Adam(parameters, lr)


def of_its_own(group, seed):
    """A model: groups have different ones, of other shapes and numbers of parameters."""
    return (convnet(seed) if group.first == 0 else mlp(seed)).double()


def trained_like_one_process(group, make, steps, **options):
    shape = (1, 8, 8) if group.first == 0 else (8,)
    both, own = data_of(group, steps, shape)
    factor = group.size if options.get("lr_scaling") == "linear" else 1
    reference = of_its_own(group, seed=group.first)
    lr = make(reference.parameters()).param_groups[0]["lr"]
    train(reference, make(reference.parameters(), lr * factor), both)

    model = of_its_own(group, seed=hvkit.rank())
    optimizer = make(model.parameters(), lr)
    hvkit.distribute(model, optimizer, _group=group, **options)
    start = of_its_own(group, seed=group.first)
    assert all(map(np.array_equal, parameters(model), parameters(start)))
    train(model, optimizer, own)

    assert same_on_all_ranks(parameters(model), group)
    assert largest_difference(parameters(model), parameters(reference)) < 1e-12
    assert largest_difference(parameters(model), parameters(start)) > 1e-3


def parameters(model):
    return arrays(model.parameters())


@pytest.mark.parametrize("group", [ROWS, COLUMNS], indirect=True, ids=["rows", "columns"])
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("lr_scaling", ["none", "linear"])
def test_each_group_trains_the_model_of_one_process_with_both_batches(group, make, lr_scaling):
    steps = 9 if group.first == 0 else 14
    trained_like_one_process(group, make, steps, lr_scaling=lr_scaling)
    hvkit.barrier()


def test_the_state_of_an_optimizer_is_divided_within_a_group(group):
    steps = 9 if group.first == 0 else 14
    trained_like_one_process(group, adam, steps, strategy=hvkit.ShardedOptimizer())
    hvkit.barrier()


@pytest.mark.parametrize("strategy", [hvkit.LocalSGD(1), hvkit.DiLoCo(1, 1.0, 0.0)], ids=str)
def test_rounds_of_one_step_give_the_weights_of_one_process(group, strategy):
    trained_like_one_process(group, sgd, 5 + group.first, strategy=strategy)
    hvkit.barrier()


def test_rounds_end_in_each_group_by_itself(group):
    """The agreed weights are the mean over the group, which no other rank takes part in."""
    model = mlp(seed=hvkit.rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hvkit.distribute(model, optimizer, strategy=hvkit.LocalSGD(every=4), _group=group)
    _, own = data_of(group, 3 if group.first == 0 else 6)
    train(model, optimizer, [(x.float(), y.float()) for x, y in own])
    before = gather("test", parameters(model), group)
    with hvkit.settled(model):
        mean = [(a + b) / 2 for a, b in zip(*before, strict=True)]
        assert largest_difference(parameters(model), mean) < 1e-5
        assert same_on_all_ranks(parameters(model), group)
    hvkit.barrier()


def test_a_model_of_a_group_and_one_of_all_ranks_train_in_one_script(group):
    both, own = data_of(group, 4)
    everyones, theirs = mlp(seed=hvkit.rank()).double(), mlp(seed=hvkit.rank()).double()
    first, second = sgd(everyones.parameters()), sgd(theirs.parameters())
    if group.first == 0:  # whose names of collectives then run ahead
        hvkit.distribute(other := mlp(), sgd(other.parameters()), _group=group)
    hvkit.distribute(everyones, first)
    hvkit.distribute(theirs, second, _group=group)
    for x, y in own:
        (F.mse_loss(everyones(x), y) + F.mse_loss(theirs(x), y)).backward()
        first.step(), second.step()
        first.zero_grad(), second.zero_grad()
    alone = mlp(seed=group.first).double()
    train(alone, sgd(alone.parameters()), both)
    assert largest_difference(parameters(theirs), parameters(alone)) < 1e-12
    assert same_on_all_ranks(parameters(everyones))


def test_synchronised_batch_norm_and_averaged_statistics_are_those_of_the_group(group):
    for batch_norm in ("sync", "average"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)).double()
        alone = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)).double()
        alone.load_state_dict(model.state_dict())
        optimizer = sgd(model.parameters())
        hvkit.distribute(model, optimizer, batch_norm=batch_norm, _group=group)
        both, own = data_of(group, 4)
        train(model, optimizer, own)
        assert same_on_all_ranks(arrays([*model.parameters(), model[0].running_mean]), group)
        if batch_norm == "sync":
            train(alone, sgd(alone.parameters()), both)
            assert largest_difference(parameters(model), parameters(alone)) < 1e-12
            assert torch.allclose(model[0].running_var, alone[0].running_var, rtol=1e-12)
    hvkit.barrier()


def test_weights_that_differ_within_a_group_are_named_by_their_numbers_among_all_ranks(group):
    model = mlp()
    optimizer = sgd(model.parameters())
    hvkit.distribute(model, optimizer, _group=group)
    if group.rank == 1 and group.members[-1] == 3:
        with torch.no_grad():
            model[0].weight[0, 0] += 1
    _, own = data_of(group, 1)
    kind, text = error_of(lambda: train(model, optimizer, [(x.float(), y.float()) for x, y in own]))
    if group.members[-1] == 3:
        assert kind is hvkit.RanksDisagreeError
        assert f"parameter 0.weight of rank 3 differs from that of rank {group.first}" in text
    else:
        assert kind is None
    hvkit.barrier()


def test_models_that_differ_within_a_group_are_named_by_their_numbers_among_all_ranks(group):
    width = 5 if hvkit.rank() == 3 else 4
    model = torch.nn.Linear(8, width)
    kind, text = error_of(lambda: hvkit.distribute(model, sgd(model.parameters()), _group=group))
    if group.members[-1] == 3:
        assert kind is hvkit.RanksDisagreeError
        assert f"of rank 3 differs from that of rank {group.first}" in text
        assert "weight: shape (5, 8)" in text
    else:
        assert kind is None
    hvkit.barrier()


@pytest.mark.parametrize("action", ["skip", "stop"])
def test_gradients_that_are_not_finite_are_a_matter_of_their_group(group, action, capfd):
    model = mlp()
    optimizer = sgd(model.parameters())
    hvkit.distribute(model, optimizer, on_nonfinite=action, _group=group)
    _, ((x, y),) = data_of(group, 1)
    x = x.float()
    if hvkit.rank() == 3:
        x[0, 0] = float("nan")
    before = parameters(model)
    kind, text = error_of(lambda: train(model, optimizer, [(x, y.float())]))
    of_rank_3 = group.members[-1] == 3
    assert kind is (FloatingPointError if of_rank_3 and action == "stop" else None)
    stays = all(map(np.array_equal, before, parameters(model)))
    assert stays == of_rank_3
    text += "".join(gather("test", capfd.readouterr().err, group))
    assert ("rank 3 has a NaN or infinite gradient of parameters 0.weight" in text) == of_rank_3
    hvkit.barrier()


def test_a_frozen_parameter_and_another_rate_are_named_by_ranks_numbers(group):
    _, own = data_of(group, 1)
    data = [(x.float(), y.float()) for x, y in own]
    model = mlp()
    optimizer = sgd(model.parameters())
    hvkit.distribute(model, optimizer, _group=group)
    train(model, optimizer, data)
    model[0].weight.requires_grad_(hvkit.rank() != 3)
    kind, text = error_of(lambda: train(model, optimizer, data))
    if group.members[-1] == 3:
        assert kind is hvkit.RanksDisagreeError
        assert f"requires a gradient on rank {group.first} but not on rank 3" in text
    else:
        assert kind is None
    hvkit.barrier()


@pytest.mark.parametrize(
    "strategy",
    [
        hvkit.Gossip(),
        hvkit.ParameterServer(0),
        hvkit.FullyShard(),
        hvkit.Centralized(),
        hvkit.DeMo(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_strategies_of_all_ranks_refuse_a_group(group, strategy):
    model = mlp()
    kind, text = error_of(
        lambda: hvkit.distribute(
            model, torch.optim.SGD(model.parameters(), 0.1), strategy=strategy, _group=group
        )
    )
    assert kind is ValueError
    assert "needs all ranks, but" in text


def test_what_takes_a_model_for_that_of_all_ranks_refuses_one_of_a_group(group, tmp_path):
    model = mlp()
    optimizer = sgd(model.parameters())
    hvkit.distribute(model, optimizer, _group=group)
    for take in (
        lambda: hvkit.Checkpoint(tmp_path, model=model, optimizer=optimizer),
        lambda: hvkit.average_buffers(model[0]),
    ):
        kind, text = error_of(take)
        assert (kind, "is trained by" in text) == (ValueError, True), text
    hvkit.barrier()
