"""Ranks that no longer train the same model, or that do the same work."""

import pytest
import torch
from ranks import error_of, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch_nets import arrays, distributed, local, mlp, raised_everywhere, regression, train

import hvkit
from hvkit import main_rank


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(main_rank, "_logged", set())


def on_rank(rank, function):
    if hvkit.rank() == rank:
        with torch.no_grad():
            function()


@pytest.mark.parametrize("loader", [0, 1])
def test_weights_loaded_on_one_rank_after_the_call_are_an_error_in_the_first_step(loader):
    model, optimizer = distributed()
    on_rank(loader, lambda: model.load_state_dict(mlp(seed=7).state_dict()))
    others = "ranks 1, 2" if loader == 0 and hvkit.size() > 2 else "rank 1"
    assert raised_everywhere(
        lambda: train(model, optimizer, local(regression(steps=1))),
        f"parameter 0.weight of {others} differs from that of rank 0 by about ",
        "load before the call, or on every rank, or with hvkit.Checkpoint",
    )


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
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    error, text = error_of(lambda: hvkit.distribute(model, optimizer))
    assert error is ValueError
    assert f"layer '0' is an {make.__name__} with max_norm=0.5" in text
    assert "layer.weight.renorm_(2.0, 0, 0.5)" in text


def test_rows_that_are_renormalised_after_each_step_are_the_same_on_all_ranks():
    torch.manual_seed(hvkit.rank())
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 4))
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(0, 50, (6,))).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight.renorm_(2.0, 0, 0.5)
    assert same_on_all_ranks(arrays(model.parameters()))
    assert model[0].weight.norm(dim=1).max() < 0.501


def test_one_bit_is_seen_before_the_first_update():
    model, optimizer = distributed()
    last = model[2].bias.detach()
    on_rank(hvkit.size() - 1, lambda: last[3:].view(torch.int32).bitwise_xor_(1))
    assert raised_everywhere(
        lambda: train(model, optimizer, local(regression(steps=1))), "parameter 2.bias of rank"
    )


def test_exchanged_elements_are_seen():
    model, optimizer = distributed()
    on_rank(1, lambda: model[0].weight.copy_(model[0].weight.flip(0)))
    assert raised_everywhere(
        lambda: train(model, optimizer, local(regression(steps=1))), "parameter 0.weight of rank 1"
    )


def test_frozen_weights_are_compared():
    model = mlp()
    model[0].requires_grad_(False)
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    on_rank(1, lambda: model[0].weight.add_(1))
    assert raised_everywhere(
        lambda: train(model, optimizer, local(regression(steps=1))), "parameter 0.weight of rank 1"
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_optimizer_loaded_on_one_rank_after_the_call_is_an_error_in_the_first_step(accumulate):
    state = []
    for _ in range(2):
        model, optimizer = distributed(torch.optim.Adam, accumulate=accumulate)
        if state:
            on_rank(0, lambda: optimizer.load_state_dict(state[0]))  # noqa: B023
            break
        train(model, optimizer, local(regression(steps=4)))
        state.append(optimizer.state_dict())
    others = "rank 1" if hvkit.size() == 2 else "ranks 1, 2"
    assert raised_everywhere(
        lambda: train(model, optimizer, local(regression(steps=2))),
        f"the state of Adam for its parameter 0 of {others} differs",
    )


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_rate_set_on_one_rank_is_an_error_in_the_next_step(steps, kind):
    model, optimizer = distributed()
    train(model, optimizer, local(regression(steps=steps)))
    on_rank(1, lambda: optimizer.param_groups[0].update(lr=kind(0.5)))
    assert raised_everywhere(
        lambda: train(model, optimizer, local(regression(steps=1))),
        "parameter group 0 of SGD is 0.01 on rank 0 but 0.5 on rank 1",
    )


def test_other_options_set_on_one_rank_are_an_error_in_the_first_step():
    model, optimizer = distributed()
    on_rank(1, lambda: optimizer.param_groups[0].update(momentum=0.5))
    assert raised_everywhere(
        lambda: train(model, optimizer, local(regression(steps=1))),
        "parameter group 0 of SGD of rank 1 differs",
    )


def test_nothing_is_updated_when_weights_differ():
    model, optimizer = distributed()
    on_rank(1, lambda: model[2].weight.add_(1))
    before = arrays(model.parameters())
    error_of(lambda: train(model, optimizer, local(regression(steps=1))))
    for a, b in zip(before, arrays(model.parameters()), strict=True):
        assert (a == b).all()


def test_nans_with_equal_bits_are_equal():
    model, optimizer = distributed()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    train(model, optimizer, local(regression(steps=1)))


def test_buffers_may_differ_between_ranks():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen += hvkit.rank()
            return self.net(x)

    model = Counting()
    model, optimizer = hvkit.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), check_every=1
    )
    train(model, optimizer, local(regression(steps=3)))
    assert not same_on_all_ranks([model.seen.numpy()])


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_changed_in_mid_training_are_an_error_within_check_every_steps(rank):
    model, optimizer = distributed(check_every=3)
    data = local(regression(steps=12))
    train(model, optimizer, data[:4])  # compared at steps 0 and 3
    on_rank(rank, lambda: model.load_state_dict(mlp(seed=7).state_dict()))
    train(model, optimizer, data[4:6])
    assert raised_everywhere(
        lambda: train(model, optimizer, data[6:7]), "parameter 0.weight of rank"
    )


@pytest.mark.parametrize(("every", "steps"), [(None, [0, 1, 2, 4, 8]), (3, [0, 3, 6, 9])])
def test_weights_are_compared_after_1_2_4_8_steps_or_every_so_many(every, steps, monkeypatch):
    from hvkit import runtime

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
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=0.01 * (1 + hvkit.rank()))


def test_an_optimizer_that_uses_the_ranks_own_batch_is_an_error_after_its_first_step():
    model = mlp()
    model, optimizer = hvkit.distribute(model, OwnBatch(model.parameters(), lr=0.01))
    data = local(regression(steps=2))
    train(model, optimizer, data[:1])
    assert raised_everywhere(
        lambda: train(model, optimizer, data[1:]), "parameter 0.weight of rank"
    )


def test_masks_that_each_rank_draws_after_the_call_are_named(capsys):
    model, optimizer = distributed()
    data = local(regression(steps=2))
    train(model, optimizer, data[:1])
    torch.manual_seed(hvkit.rank())
    prune.random_unstructured(model[0], "weight", 0.5)
    train(model, optimizer, data[1:])
    assert ("0.weight_mask" in capsys.readouterr().err) == hvkit.is_main()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_of_weights_that_differ_is_an_error_and_saves_nothing(rank, tmp_path):
    folder = hvkit.broadcast(tmp_path)
    model, optimizer = distributed()
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
    data = local(regression(steps=4))
    train(model, optimizer, data[:2])
    kept = checkpoint.save(epoch=0, step=2)
    on_rank(rank, lambda: model[2].weight.copy_(mlp(seed=7)[2].weight))
    assert raised_everywhere(
        lambda: checkpoint.save(epoch=0, step=4), "parameter 2.weight of model of rank"
    )
    assert hvkit.broadcast([each.name for each in folder.iterdir() if each.is_dir()]) == [kept.name]


def test_a_save_of_a_state_that_one_rank_lacks_is_an_error(tmp_path):
    folder = hvkit.broadcast(tmp_path)
    model, optimizer = distributed()
    train(model, optimizer, local(regression(steps=2)))
    on_rank(1, lambda: optimizer.state.clear())
    assert raised_everywhere(
        lambda: hvkit.Checkpoint(folder, model=model, optimizer=optimizer).save(epoch=0, step=2),
        "only one of them has momentum_buffer in the state of SGD for its parameter 0 of optimizer",
    )


def test_a_model_that_was_not_distributed_may_differ_in_a_save(tmp_path):
    folder = hvkit.broadcast(tmp_path)
    model, optimizer = distributed()
    own = mlp(seed=hvkit.rank())
    train(model, optimizer, local(regression(steps=1)))
    hvkit.Checkpoint(folder, model=model, optimizer=optimizer, own=own).save(epoch=0, step=1)


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


def test_the_same_work_on_all_ranks_is_one_warning_with_both_causes(capsys):
    model, optimizer = distributed()
    data = [(x[:6], y[:6]) for x, y in regression(steps=2)]
    train(model, optimizer, data)
    train(*distributed(), data)
    logged = capsys.readouterr().err
    assert logged.count("all ranks computed the same gradients") == (hvkit.rank() == 0)
    if hvkit.rank() == 0:
        assert "hvkit.shard(data)" in logged
        assert "seed + hvkit.rank()" in logged


def test_the_same_data_with_other_dropout_is_not_the_same_work(capsys):
    torch.manual_seed(1 + hvkit.rank())
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, [(x[:6], y[:6]) for x, y in regression(steps=2)])
    assert "same gradients" not in capsys.readouterr().err


def test_the_same_data_in_a_later_step_is_no_warning(capsys):
    model, optimizer = distributed(check_every=1)
    data = regression(steps=2)
    train(model, optimizer, [*local(data[:1]), *data[1:]])
    assert "same gradients" not in capsys.readouterr().err


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf")])
def test_zero_and_infinite_gradients_are_not_the_same_work(factor, capsys):
    model, optimizer = distributed()
    x, y = local(regression(steps=1))[0]
    (F.mse_loss(model(x), y) * factor).backward()
    optimizer.zero_grad()
    assert "same gradients" not in capsys.readouterr().err
    x, y = (each[:6] for each in regression(steps=1)[0])
    train(model, optimizer, [(x, y)])
    assert ("same gradients" in capsys.readouterr().err) == (hvkit.rank() == 0)


def test_two_models_may_run_backward_in_a_different_order_on_each_rank():
    one, two = mlp(), mlp(seed=1)
    one, first = hvkit.distribute(one, torch.optim.SGD(one.parameters(), lr=0.1), check_every=1)
    two, second = hvkit.distribute(two, torch.optim.SGD(two.parameters(), lr=0.1), check_every=1)
    for x, y in local(regression(steps=3)):
        first.zero_grad()
        second.zero_grad()
        losses = [F.mse_loss(one(x), y), F.mse_loss(two(x), y)]
        if hvkit.rank() == 0:
            sum(losses).backward()
        else:
            losses[0].backward()
            losses[1].backward()
        first.step()
        second.step()
    assert same_on_all_ranks(arrays([*one.parameters(), *two.parameters()]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_weights_of_other_kinds_are_compared(dtype):
    weight = nn.Parameter(torch.ones(5, dtype=dtype))
    model = nn.ParameterList([weight])
    model, _ = hvkit.distribute(model, torch.optim.SGD([weight], lr=0.1))
    on_rank(1, lambda: weight[4:].mul_(2))

    def step():
        (weight * (1 + hvkit.rank())).abs().sum().backward()

    assert raised_everywhere(step, "parameter 0 of rank 1 differs")
