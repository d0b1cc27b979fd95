"""Ranks that no longer train the same model, or that do the same work."""

import pytest
import torch
from cases import cases
from ranks import all_but_rank_0
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch_nets import distributed, local, mlp, raised_everywhere, regression, train, weights

import hvkit
from hvkit import runtime


def on_rank(rank, function):
    if hvkit.rank() == rank:
        with torch.no_grad():
            function()


def loaded(model, optimizer):
    model.load_state_dict(mlp(seed=7).state_dict())


def one_bit(model, optimizer):
    model[2].bias.detach()[3:].view(torch.int32).bitwise_xor_(1)


def exchanged(model, optimizer):
    model[0].weight.copy_(model[0].weight.flip(0))


def frozen(model, optimizer):
    """Added to a weight that no rank trains."""
    model[0].weight.add_(1)


def rate(model, optimizer):
    optimizer.param_groups[0].update(lr=0.5)


def tensor_rate(model, optimizer):
    optimizer.param_groups[0].update(lr=torch.tensor(0.5))


def momentum(model, optimizer):
    optimizer.param_groups[0].update(momentum=0.5)


OTHER_WEIGHT = "parameter 0.weight of rank 1 differs from that of rank 0"
OTHER_RATE = "parameter group 0 of SGD is 0.05 on rank 0 but 0.5 on rank 1"
CHANGES = [
    (0, 1, loaded, OTHER_WEIGHT),
    (0, 0, loaded, f"parameter 0.weight of {all_but_rank_0()} differs"),
    (0, 1, one_bit, "parameter 2.bias of rank 1"),
    (0, 1, exchanged, OTHER_WEIGHT),
    (0, 1, frozen, OTHER_WEIGHT),
    (0, 1, rate, OTHER_RATE),
    (0, 1, tensor_rate, OTHER_RATE),
    (3, 1, rate, OTHER_RATE),
    (0, 1, momentum, "parameter group 0 of SGD of rank 1 differs"),
]


@pytest.mark.parametrize(("steps", "rank", "change", "text"), CHANGES)
def test_a_change_on_one_rank_is_an_error_before_the_next_update(steps, rank, change, text):
    model = mlp()
    model[0].requires_grad_(change is not frozen)
    model, optimizer = distributed(model=model)
    data = local(regression(steps=4))
    train(model, optimizer, data[:steps])
    on_rank(rank, lambda: change(model, optimizer))
    before = weights(model)
    assert raised_everywhere(lambda: train(model, optimizer, data[steps:]), text)
    assert all((a == b).all() for a, b in zip(before, weights(model), strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_optimizer_loaded_on_one_rank_after_the_call_is_an_error_in_the_first_step(accumulate):
    data = local(regression(steps=4))
    trained, its = distributed(torch.optim.Adam)
    train(trained, its, data)
    model, optimizer = distributed(torch.optim.Adam, accumulate=accumulate)
    on_rank(0, lambda: optimizer.load_state_dict(its.state_dict()))
    text = f"the state of Adam for its parameter 0 of {all_but_rank_0()} differs"
    assert raised_everywhere(lambda: train(model, optimizer, data), text)


def test_a_perturbation_that_a_rank_adds_and_subtracts_is_called_rounding():
    model, optimizer = distributed()
    noise = torch.full_like(model[0].weight, 0.1 * hvkit.rank())
    with torch.no_grad():
        model[0].weight.add_(noise).sub_(noise)
    assert raised_everywhere(
        lambda: train(model, optimizer, local(regression(steps=1))),
        "parameter 0.weight of rank",
        "this is rounding",
        "put back a copy of the weights",
    )


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_whose_forward_pass_changes_weights_is_refused(make):
    model = nn.Sequential(make(50, 4, max_norm=0.5), nn.Linear(4, 4))
    assert raised_everywhere(
        lambda: distributed(model=model),
        f"layer '0' is an {make.__name__} with max_norm=0.5",
        "layer.weight.renorm_(2.0, 0, 0.5)",
        kind=ValueError,
    )


def test_nans_with_equal_bits_are_equal():
    model, optimizer = distributed()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    train(model, optimizer, local(regression(steps=1)))


@pytest.mark.parametrize("rank", cases([0, 1]))
def test_weights_changed_in_mid_training_are_an_error_within_check_every_steps(rank):
    model, optimizer = distributed(check_every=3)
    data = local(regression(steps=7))
    train(model, optimizer, data[:4])  # compared at steps 0 and 3
    on_rank(rank, lambda: loaded(model, optimizer))
    train(model, optimizer, data[4:6])
    text = "parameter 0.weight of rank"
    assert raised_everywhere(lambda: train(model, optimizer, data[6:]), text)


@pytest.mark.parametrize(("every", "steps"), [(None, [0, 1, 2, 4, 8]), (3, [0, 3, 6, 9])])
def test_weights_are_compared_after_1_2_4_8_steps_or_every_so_many(every, steps, monkeypatch):
    sent, done = [], []
    hvd = runtime.engine("torch").hvd
    allgather = hvd.allgather_async
    monkeypatch.setattr(
        hvd, "allgather_async", lambda *a, **k: (sent.append(len(done)), allgather(*a, **k))[1]
    )
    model, optimizer = distributed(check_every=every)
    for batch in local(regression(steps=12)):
        train(model, optimizer, [batch])
        done.append(batch)
    assert sent == steps


class OwnBatch(torch.optim.SGD):
    """Scales its update by something that it computes from the rank's own batch."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad, alpha=0.01 * (1 + hvkit.rank()))


def test_an_optimizer_that_uses_the_ranks_own_batch_is_an_error_after_its_first_step():
    model, optimizer = distributed(OwnBatch)
    data = local(regression(steps=2))
    train(model, optimizer, data[:1])
    text = "parameter 0.weight of rank"
    assert raised_everywhere(lambda: train(model, optimizer, data[1:]), text)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_weights_of_other_kinds_are_compared(dtype):
    weight = nn.Parameter(torch.ones(5, dtype=dtype))
    distributed(model=nn.ParameterList([weight]))
    on_rank(1, lambda: weight[4:].mul_(2))
    backward = (weight * (1 + hvkit.rank())).abs().sum().backward
    assert raised_everywhere(backward, "parameter 0 of rank 1 differs")


def test_masks_that_each_rank_draws_after_the_call_are_named(capsys):
    model, optimizer = distributed()
    data = local(regression(steps=2))
    train(model, optimizer, data[:1])
    torch.manual_seed(hvkit.rank())
    prune.random_unstructured(model[0], "weight", 0.5)
    train(model, optimizer, data[1:])
    assert ("0.weight_mask" in capsys.readouterr().err) == hvkit.is_main()


@pytest.mark.parametrize("change", [loaded, lambda model, optimizer: optimizer.state.clear()])
def test_a_save_of_what_differs_is_an_error_and_saves_nothing(change, tmp_path):
    """But a model that was not distributed may differ."""
    folder = hvkit.broadcast(tmp_path)
    model, optimizer = distributed()
    own = mlp(seed=hvkit.rank())
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer, own=own)
    train(model, optimizer, local(regression(steps=2)))
    kept = checkpoint.save(epoch=0, step=2)
    on_rank(1, lambda: change(model, optimizer))
    text = (
        "parameter 0.weight of model of rank 1"
        if change is loaded
        else "only one of them has momentum_buffer in the state of SGD for its parameter 0 of optim"
    )
    assert raised_everywhere(lambda: checkpoint.save(epoch=0, step=4), text)
    assert hvkit.broadcast([each.name for each in folder.iterdir() if each.is_dir()]) == [kept.name]


def test_rounding_after_the_start_is_one_warning(tmp_path, capsys):
    folder = hvkit.broadcast(tmp_path)
    model, optimizer = distributed(check_every=1)
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
    data = local(regression(steps=4))
    train(model, optimizer, data[:2])
    on_rank(1, lambda: model[0].weight.view(torch.int32).add_(1))
    train(model, optimizer, data[2:])
    checkpoint.save(epoch=0, step=4)
    logged = capsys.readouterr().err
    assert logged.count("parameter 0.weight of rank") == (hvkit.rank() == 0)
    assert logged.count("rounding") == (hvkit.rank() == 0)


SAME_WORK = "all ranks computed the same gradients"


def of_rank_0(data):
    """What rank 0 takes of each batch, for all ranks."""
    return [(x[:6], y[:6]) for x, y in data]


def test_the_same_work_on_all_ranks_is_one_warning_with_both_causes(capsys):
    data = of_rank_0(regression(steps=2))
    train(*distributed(), data)
    train(*distributed(), data)
    logged = capsys.readouterr().err
    for part in (SAME_WORK, "hvkit.shard(data)", "seed + hvkit.rank()"):
        assert logged.count(part) == (hvkit.rank() == 0)


def test_other_dropout_and_the_same_data_in_a_later_step_are_not_the_same_work(capsys):
    torch.manual_seed(1 + hvkit.rank())
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    data = regression(steps=2)
    train(*distributed(model=model), of_rank_0(data))
    train(*distributed(check_every=1), [*local(data[:1]), *data[1:]])
    assert SAME_WORK not in capsys.readouterr().err


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf")])
def test_zero_and_infinite_gradients_are_not_the_same_work(factor, capsys):
    model, optimizer = distributed()
    data = regression(steps=1)
    x, y = local(data)[0]
    (F.mse_loss(model(x), y) * factor).backward()
    optimizer.zero_grad()
    assert SAME_WORK not in capsys.readouterr().err
    train(model, optimizer, of_rank_0(data))
    assert (SAME_WORK in capsys.readouterr().err) == (hvkit.rank() == 0)
