"""Ranks that no longer train the same model, or that do the same work: what is said, and when."""

import pytest
import torch
from nets import arrays, local, mlp, regression, train
from ranks import error_of, same_on_all_ranks
from torch import nn
from torch.nn import functional as F

import hvkit
from hvkit import main_rank


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(main_rank, "_said", set())


def distributed(make=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), **options):
    model = mlp()
    return hvkit.distribute(model, make(model.parameters()), **options)


def on_rank(rank, function):
    if hvkit.rank() == rank:
        with torch.no_grad():
            function()


def raised_everywhere(function, *parts):
    """Whether ``function`` raises the same RanksDisagreeError with these parts on all ranks."""
    kind, text = error_of(function)
    assert kind is hvkit.RanksDisagreeError, text
    assert hvkit.allgather(text) == [text] * hvkit.size()
    for part in parts:
        assert part in text
    return True


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


def test_values_that_are_not_numbers_are_alike_where_their_bits_are():
    model, optimizer = distributed()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    train(model, optimizer, local(regression(steps=1)))


def test_buffers_belong_to_the_ranks():
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


def test_without_check_every_nothing_is_sent_after_the_first_step(monkeypatch):
    from hvkit import runtime

    sent = []
    hvd = runtime.engine("torch").hvd
    allgather = hvd.allgather_async
    monkeypatch.setattr(
        hvd, "allgather_async", lambda *a, **k: (sent.append(k["name"]), allgather(*a, **k))[1]
    )
    model, optimizer = distributed()
    train(model, optimizer, local(regression(steps=5)))
    assert len(sent) == 1
    model, optimizer = distributed(check_every=2)
    train(model, optimizer, local(regression(steps=5)))
    assert len(sent) == 1 + 3


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


def test_rounding_after_the_start_is_said_once_and_is_no_error(tmp_path, capsys):
    folder = hvkit.broadcast(tmp_path)
    model, optimizer = distributed(check_every=1)
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
    data = local(regression(steps=4))
    train(model, optimizer, data[:2])
    on_rank(1, lambda: model[0].weight.view(torch.int32).add_(1))
    train(model, optimizer, data[2:])
    checkpoint.save(epoch=0, step=4)
    said = capsys.readouterr().err
    assert said.count("parameter 0.weight of rank 1 differs") == (hvkit.rank() == 0)
    assert said.count("rounding") == (hvkit.rank() == 0)


def test_the_same_work_on_all_ranks_is_said_once_with_both_causes(capsys):
    model, optimizer = distributed()
    data = [(x[:6], y[:6]) for x, y in regression(steps=2)]
    train(model, optimizer, data)
    train(*distributed(), data)
    said = capsys.readouterr().err
    assert said.count("all ranks computed the same gradients") == (hvkit.rank() == 0)
    if hvkit.rank() == 0:
        assert "hvkit.shard(data)" in said
        assert "seed + hvkit.rank()" in said


def test_the_same_data_with_other_dropout_is_not_the_same_work(capsys):
    torch.manual_seed(1 + hvkit.rank())
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, [(x[:6], y[:6]) for x, y in regression(steps=2)])
    assert "same gradients" not in capsys.readouterr().err


def test_the_same_data_in_a_later_step_is_not_looked_at(capsys):
    model, optimizer = distributed(check_every=1)
    data = regression(steps=2)
    train(model, optimizer, [*local(data[:1]), *data[1:]])
    assert "same gradients" not in capsys.readouterr().err


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf")])
def test_gradients_that_say_nothing_are_not_the_same_work(factor, capsys):
    model, optimizer = distributed()
    x, y = local(regression(steps=1))[0]
    (F.mse_loss(model(x), y) * factor).backward()
    optimizer.zero_grad()
    assert "same gradients" not in capsys.readouterr().err
    x, y = (each[:6] for each in regression(steps=1)[0])
    train(model, optimizer, [(x, y)])
    assert ("same gradients" in capsys.readouterr().err) == (hvkit.rank() == 0)


def test_two_models_whose_backwards_come_in_another_order_on_each_rank():
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


# Optimizers that were not passed.


@pytest.mark.parametrize("compiled", [False, True])
def test_an_optimizer_made_after_the_call_is_refused_at_its_first_step(compiled):
    model, _ = distributed()
    other = torch.optim.Adam(model[2].parameters(), lr=0.1)
    step = torch.compile(other.step, backend="eager") if compiled else other.step
    before = arrays(model.parameters())
    x, y = local(regression(steps=1))[0]
    F.mse_loss(model(x), y).backward()
    kind, text = error_of(step)
    assert kind is ValueError
    assert "optimizer Adam updates parameters of a model that was passed to" in text
    assert "distribute(model, [first, second])" in text
    assert all((a == b).all() for a, b in zip(before, arrays(model.parameters()), strict=True))


def test_an_optimizer_with_parameters_of_a_distributed_and_another_model_is_refused():
    model, _ = distributed()
    other = torch.optim.SGD([*mlp().parameters(), model[0].weight], lr=0.1)
    x, y = local(regression(steps=1))[0]
    F.mse_loss(model(x), y).backward()
    assert error_of(other.step)[0] is ValueError


def test_an_optimizer_that_comes_to_hold_a_distributed_parameter_is_refused():
    model, _ = distributed()
    other = torch.optim.SGD(mlp().parameters(), lr=0.1)
    other.step()
    other.add_param_group({"params": [model[0].weight]})
    assert error_of(other.step)[0] is ValueError


@pytest.mark.parametrize("compiled", [False, True])
def test_optimizers_of_other_models_step_as_ever(compiled):
    distributed()
    plain = mlp()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    before = plain[0].weight.clone()
    x, y = regression(steps=1)[0]
    F.mse_loss(plain(x), y).backward()
    step()
    assert not torch.equal(plain[0].weight, before)


def test_an_optimizer_inside_the_one_that_was_passed_may_step():
    """As sharpness-aware minimisation does."""

    class Around(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            self.base = torch.optim.SGD(self.param_groups, lr=0.1)
            self.param_groups = self.base.param_groups

        def step(self, closure=None):
            self.base.step()

    model, optimizer = distributed(Around)
    train(model, optimizer, local(regression(steps=2)))
    optimizer.base.step()
    assert same_on_all_ranks(arrays(model.parameters()))


def test_a_compiled_step_of_the_optimizer_that_was_passed_goes_on():
    model, optimizer = distributed()
    step = torch.compile(optimizer.step, backend="eager")
    for x, y in local(regression(steps=3)):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        step()
    assert same_on_all_ranks(arrays(model.parameters()))


def test_optimizers_of_later_phases_that_were_passed_may_step():
    model = mlp()
    phases = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())]
    model, phases = hvkit.distribute(model, phases)
    for optimizer in phases:
        train(model, optimizer, local(regression(steps=2)))
    assert same_on_all_ranks(arrays(model.parameters()))


# torch.distributed beside hvkit.


@pytest.fixture
def start_torch_distributed(tmp_path):
    folder = hvkit.broadcast(tmp_path)

    def start():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=hvkit.rank(), world_size=hvkit.size()
        )

    yield start
    hvkit.barrier()
    torch.distributed.destroy_process_group()


def test_torch_distributed_started_before_the_call_is_refused(start_torch_distributed):
    start_torch_distributed()
    kind, text = error_of(distributed)
    assert kind is ValueError
    assert f"torch.distributed is initialised with {hvkit.size()} processes beside hvkit" in text
    assert "Accelerator" in text


def test_torch_distributed_started_after_the_call_is_refused_in_the_first_step(
    start_torch_distributed,
):
    model, optimizer = distributed()
    start_torch_distributed()
    assert raised_everywhere(
        lambda: train(model, optimizer, local(regression(steps=1))),
        f"torch.distributed is initialised with {hvkit.size()} processes beside hvkit",
    )


def test_torch_distributed_with_one_process_is_nobody_elses_business(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        train(*distributed(), local(regression(steps=1)))
    finally:
        torch.distributed.destroy_process_group()


def fully_sharded(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def with_fully_sharded_part(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[2])
    return model


def tensor_parallel(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    distribute_module(model[2], init_device_mesh("cpu", (1,)))
    return model


def in_a_part(model):
    return nn.Sequential(nn.parallel.DistributedDataParallel(model))


class Around(torch.optim.Optimizer):
    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure=None):
        self.base.step()


def test_an_optimizer_may_be_made_around_a_distributed_one_but_not_of_its_groups():
    model, optimizer = distributed()
    x, y = local(regression(steps=1))[0]
    F.mse_loss(model(x), y).backward()
    Around(optimizer).step()
    error, text = error_of(torch.optim.SGD(optimizer.param_groups, lr=0.1).step)
    assert error is ValueError
    assert "was not passed itself" in text


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (fully_sharded, "model is wrapped in FullyShardedDataParallel"),
        (with_fully_sharded_part, "model part '2' is wrapped in FSDPModule"),
        (tensor_parallel, "parameter 2.weight is a DTensor"),
        (nn.DataParallel, "model is wrapped in DataParallel"),
        (in_a_part, "model part '0' is wrapped in DistributedDataParallel"),
    ],
)
def test_modules_that_share_their_work_themselves_are_refused(wrap, message):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = wrap(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kind, text = error_of(lambda: hvkit.distribute(model, optimizer))
        assert kind is TypeError
        assert message in text
    finally:
        torch.distributed.destroy_process_group()
