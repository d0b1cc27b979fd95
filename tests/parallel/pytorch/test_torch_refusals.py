"""Models and optimizers that hvkit refuses, because something else would train them as well."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from cases import MORE
from ranks import error_of, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch_nets import arrays, distributed, local, mlp, raised_everywhere, regression, train

import hvkit
from hvkit import main_rank
from hvkit.frameworks.pytorch import divided_state

pytestmark = pytest.mark.two_ranks


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
def test_optimizers_of_other_models_still_step(compiled):
    distributed()
    plain = mlp()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    before = plain[0].weight.clone()
    x, y = regression(steps=1)[0]
    F.mse_loss(plain(x), y).backward()
    step()
    assert not torch.equal(plain[0].weight, before)


@pytest.fixture
def own_models(caplog):
    """The warnings of models that each rank trains for itself, on rank 0."""
    main_rank._logged.discard("own models")
    return lambda: hvkit.broadcast(
        [each for each in caplog.messages if "each rank trains a model of its own" in each]
    )


def test_a_copy_that_trains_without_distribute_is_named_in_one_warning(own_models):
    model, _ = distributed()
    for each in (copy.deepcopy(model), mlp()):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        train(each, optimizer, local(regression(steps=2)))
    (said,) = own_models()
    assert said.startswith("optimizer SGD updates a model, but neither was passed to hvkit")


class MySGD(torch.optim.SGD):
    """One that hvkit tries before it divides its state."""


class WithMasterWeights(torch.optim.Optimizer):
    """Updates copies of the parameters, with an optimizer of its own for them."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        (group,) = self.param_groups
        self.copies = [nn.Parameter(p.detach().double()) for p in group["params"]]
        self.base = torch.optim.SGD(self.copies, lr=0.1)

    @torch.no_grad()
    def step(self, closure=None):
        for p, master in zip(self.param_groups[0]["params"], self.copies, strict=True):
            master.grad = p.grad.double()
        self.base.step()
        for p, master in zip(self.param_groups[0]["params"], self.copies, strict=True):
            p.copy_(master)


@pytest.mark.parametrize("kind", ["around", "inside", "of inputs", "in a trial"])
def test_optimizers_that_train_no_other_model_give_no_warning(kind, own_models):
    batches = local(regression(steps=2))
    if kind == "inside":
        train(*distributed(WithMasterWeights), batches)
    elif kind == "in a trial":
        distributed()
        distributed(MySGD, strategy=hvkit.ShardedOptimizer())
    else:
        model, optimizer = distributed()
        x = batches[0][0].clone().requires_grad_()
        other = Around(optimizer) if kind == "around" else torch.optim.Adam([x], lr=0.1)
        model(x).sum().backward()
        other.step()
    assert own_models() == []


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


@MORE
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


def test_torch_distributed_with_one_process_is_allowed(tmp_path):
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


# What imports PyTorch's fully_shard to change what it sends.
OF_FULLY_SHARD = [
    "hvkit.frameworks.pytorch.divided_state.fully_shard",
    *(f"hvkit.frameworks.pytorch.model_parallel.{name}" for name in ("parts", "shard_axis")),
    *(f"hvkit.frameworks.pytorch.model_parallel.{name}" for name in ("parallel_model", "port")),
]


@pytest.mark.parametrize(
    "options", [{"strategy": hvkit.FullyShard()}, {"mesh": hvkit.Mesh(tensor=2)}], ids=str
)
def test_a_pytorch_without_what_fully_shard_needs_is_refused_before_anything_changes(
    options, monkeypatch
):
    """As 2.8 is, in whose fully_shard nobody can take part."""
    for name in OF_FULLY_SHARD:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(divided_state, "fully_shard", raising=False)
    closed = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
    monkeypatch.setitem(sys.modules, closed, SimpleNamespace())
    model = mlp(hvkit.rank())
    optimizer, before = torch.optim.SGD(model.parameters(), 0.1), arrays(model.parameters())
    kind, text = error_of(lambda: hvkit.distribute(model, optimizer, **options))
    assert kind is hvkit.HvkitError
    assert "need PyTorch 2.9 or newer, whose fully_shard lets hvkit take part in" in text
    assert f"and PyTorch {torch.__version__} is installed: upgrade it" in text
    assert all((a == b).all() for a, b in zip(before, arrays(model.parameters()), strict=True))
    train(*hvkit.distribute(model, optimizer), local(regression(steps=1)))
    assert same_on_all_ranks(arrays(model.parameters()))


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
def test_modules_that_another_library_distributes_are_refused(wrap, message):
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
