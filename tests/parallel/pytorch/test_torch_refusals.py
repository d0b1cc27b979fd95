"""Models and optimizers that hvkit refuses, because something else would train them as well."""

import contextlib
import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from cases import cases
from ranks import same_on_all_ranks
from torch import nn
from torch_nets import (
    backward,
    distributed,
    local,
    mlp,
    raised_everywhere,
    regression,
    train,
    weights,
)

import hvkit
from hvkit.frameworks.pytorch import divided_state

pytestmark = pytest.mark.two_ranks


def unchanged(model, before):
    return all((a == b).all() for a, b in zip(before, weights(model), strict=True))


class Around(torch.optim.Optimizer):
    """Steps another optimizer of the same groups, as sharpness-aware minimisation does."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure=None):
        self.base.step()


def comes_to_hold(model, optimizer):
    other = torch.optim.SGD(mlp().parameters(), lr=0.1)
    other.step()
    other.add_param_group({"params": [model[0].weight]})
    return other


NOT_PASSED = {
    "made later": lambda model, _: torch.optim.SGD(model[2].parameters(), lr=0.1),
    "of two models": lambda model, _: torch.optim.SGD(
        [*mlp().parameters(), model[0].weight], lr=0.1
    ),
    "comes to hold one": comes_to_hold,
    "of its groups": lambda _, optimizer: torch.optim.SGD(optimizer.param_groups, lr=0.1),
}


@pytest.mark.parametrize(
    ("kind", "compiled"), cases([*((each, False) for each in NOT_PASSED), ("made later", True)], 4)
)
def test_an_optimizer_that_was_not_passed_is_refused_at_its_first_step(kind, compiled):
    model, optimizer = distributed()
    other = NOT_PASSED[kind](model, optimizer)
    step = torch.compile(other.step, backend="eager") if compiled else other.step
    before = weights(model)
    backward(model, local(regression(steps=1))[0])
    text = "optimizer SGD updates parameters of a model that was passed to hvkit"
    parts = ["was not passed itself"] if kind == "of its groups" else [text]
    assert raised_everywhere(step, *parts, "distribute(model, [first, second])", kind=ValueError)
    assert unchanged(model, before)


@pytest.mark.parametrize("compiled", cases([False, True]))
def test_optimizers_of_other_models_and_around_distributed_ones_still_step(compiled):
    distributed()
    plain = mlp()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    before = weights(plain)
    backward(plain, regression(steps=1)[0])
    step()
    assert not unchanged(plain, before)
    model, optimizer = distributed()
    before = weights(model)
    backward(model, local(regression(steps=1))[0])
    Around(optimizer).step()
    assert not unchanged(model, before)
    assert same_on_all_ranks(weights(model))


def test_an_optimizer_inside_the_one_that_was_passed_may_step():
    model, optimizer = distributed(lambda p: Around(torch.optim.SGD(p, lr=0.1)))
    train(model, optimizer, local(regression(steps=2)))
    before = weights(model)
    optimizer.base.step()
    assert not unchanged(model, before)
    assert same_on_all_ranks(weights(model))


def test_optimizers_of_later_phases_that_were_passed_may_step():
    model = mlp()
    phases = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())]
    model, phases = hvkit.distribute(model, phases)
    for optimizer in phases:
        train(model, optimizer, local(regression(steps=2)))
    assert same_on_all_ranks(weights(model))


@pytest.fixture
def own_models(caplog):
    """The warnings of models that each rank trains for itself, on rank 0."""
    return lambda: hvkit.broadcast(
        [each for each in caplog.messages if "each rank trains a model of its own" in each]
    )


def test_a_copy_that_trains_without_distribute_is_named_in_one_warning(own_models):
    model, _ = distributed()
    for each in (copy.deepcopy(model), mlp()):
        train(each, torch.optim.SGD(each.parameters(), lr=0.1), local(regression(steps=2)))
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
        pairs = list(zip(self.param_groups[0]["params"], self.copies, strict=True))
        for p, master in pairs:
            master.grad = p.grad.double()
        self.base.step()
        for p, master in pairs:
            p.copy_(master)


def test_optimizers_that_train_no_other_model_give_no_warning(own_models):
    batches = local(regression(steps=2))
    train(*distributed(WithMasterWeights), batches)
    distributed(MySGD, strategy=hvkit.ShardedOptimizer())
    model, optimizer = distributed()
    x = batches[0][0].clone().requires_grad_()
    model(x).sum().backward()
    Around(optimizer).step()
    torch.optim.Adam([x], lr=0.1).step()
    assert own_models() == []


@contextlib.contextmanager
def torch_distributed_of(ranks, folder=None):
    """PyTorch's own, of one rank or of all of them."""
    if ranks == 1:
        how = {"store": torch.distributed.HashStore(), "rank": 0}
    else:
        how = {"init_method": f"file://{hvkit.broadcast(folder)}/meet", "rank": hvkit.rank()}
    torch.distributed.init_process_group("gloo", world_size=ranks, **how)
    try:
        yield
        hvkit.barrier()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("started", ["before the call", "after the call"])
def test_torch_distributed_beside_hvkit_is_refused(started, tmp_path):
    """Started after the call, in the first step."""
    text = f"torch.distributed is initialised with {hvkit.size()} processes beside hvkit"
    model, optimizer = (None, None) if started == "before the call" else distributed()
    with torch_distributed_of(hvkit.size(), tmp_path):
        if model is None:
            assert raised_everywhere(distributed, text, "remove hvkit.distribute", kind=ValueError)
        else:
            data = local(regression(steps=1))
            assert raised_everywhere(lambda: train(model, optimizer, data), text)


def test_torch_distributed_with_one_process_is_allowed():
    with torch_distributed_of(1):
        train(*distributed(), local(regression(steps=1)))


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
    with torch_distributed_of(1):
        model = wrap(mlp())
        assert raised_everywhere(lambda: distributed(model=model), message, kind=TypeError)


# What imports PyTorch's fully_shard to change what it sends.
OF_FULLY_SHARD = [
    "hvkit.frameworks.pytorch.divided_state.fully_shard",
    *(
        f"hvkit.frameworks.pytorch.model_parallel.{name}"
        for name in ("parallel_model", "mesh_checkpoints", "port")
    ),
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
    before = weights(model)
    assert raised_everywhere(
        lambda: distributed(model=model, **options),
        "need PyTorch 2.9 or newer, whose fully_shard lets hvkit take part in",
        f"and PyTorch {torch.__version__} is installed: upgrade it",
        kind=hvkit.HvkitError,
    )
    assert unchanged(model, before)
    train(*distributed(model=model), local(regression(steps=1)))
    assert same_on_all_ranks(weights(model))
