"""Scripts through ``horovod.torch``: what hvkit's build changes."""

import inspect
import warnings

import horovod.torch as hvd
import pytest
import torch
from cases import cases
from ranks import same_on_all_ranks

OPTIMIZERS = sorted(
    (
        each
        for each in vars(torch.optim).values()
        if inspect.isclass(each) and issubclass(each, torch.optim.Optimizer)
    ),
    key=lambda each: each.__name__,
)
pytestmark = pytest.mark.two_ranks
HERE = cases(
    [each for each in OPTIMIZERS if each.__name__ not in {"Optimizer", "LBFGS", "SparseAdam"}],
    # Muon is of PyTorch 2.9.
    [each for each in OPTIMIZERS if each.__name__ in {"Adam", "Muon", "SGD"}],
    name=lambda each: each.__name__,
)


@pytest.fixture(scope="module", autouse=True)
def _horovod():
    hvd.init()


def model_of(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 2, bias=False))


def train(model, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=generator)).pow(2).mean().backward()
        optimizer.step()


def values(model, optimizer):
    state = optimizer.state_dict()["state"]
    held = [v for each in state.values() for v in each.values() if torch.is_tensor(v)]
    return [t.detach().float().numpy().copy() for t in (*model.parameters(), *held)]


@pytest.mark.parametrize("cls", HERE)
def test_an_optimizer_that_has_taken_no_step_is_sent_without_one(cls):
    model = model_of(0)
    decay = {} if cls is torch.optim.Rprop else {"weight_decay": 0.1}
    optimizer = cls(model.parameters(), lr=0.1 * (1 + hvd.rank()), **decay)
    before = values(model, optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    after = values(model, optimizer)  # state also: Adagrad makes its own when it is made
    assert all((a == b).all() for a, b in zip(after, before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("cls", HERE)
@pytest.mark.parametrize("wrapped", [False, True])
def test_state_of_the_root_arrives_also_where_there_is_none(cls, wrapped):
    model = model_of(0)
    optimizer = cls(model.parameters(), lr=0.1)
    if hvd.rank() == 0:
        train(model, optimizer, 3)
    expected = values(model, optimizer)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        optimizer.load_state_dict(optimizer.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    found = values(model, optimizer)
    assert same_on_all_ranks(found)
    if hvd.rank() == 0 and not wrapped:
        assert all((a == b).all() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"amsgrad": True}], ids=str
)
def test_training_goes_on_from_a_state_that_was_sent(options):
    one = model_of(0)
    of_one = torch.optim.AdamW(one.parameters(), lr=0.1, **options)
    train(one, of_one, 6)

    model = model_of(hvd.rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 6)
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"num_groups": 1}, {"compression": hvd.Compression.fp16}], ids=str
)
def test_models_in_channels_last(options):
    def model_and_optimizer(seed):
        torch.manual_seed(seed)
        layers = torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 4, 2)
        model = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def train_on(model, optimizer, rows):
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            x = torch.randn(4, 3, 4, 4, generator=generator)[rows]
            optimizer.zero_grad()
            model(x.to(memory_format=torch.channels_last)).pow(2).mean().backward()
            optimizer.step()

    one, of_one = model_and_optimizer(0)
    train_on(one, of_one, slice(None))
    model, optimizer = model_and_optimizer(hvd.rank())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train_on(model, optimizer, slice(hvd.rank(), None, hvd.size()))
    assert not model[0].weight.is_contiguous()
    assert model[0].weight.grad.stride() == model[0].weight.stride()
    within = 1e-4 if "compression" in options else 1e-6
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=within)


def test_adasum_of_a_model_in_channels_last():
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3)
    other = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, each.named_parameters(), op=hvd.Adasum)
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(hvd.rank()))
        each(x).pow(2).mean().backward()
        optimizer.step()
    assert torch.allclose(model.weight, other.weight, rtol=0, atol=1e-6)


def test_zero_grad_takes_the_arguments_of_pytorch():
    model = model_of(0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
    )
    train(model, optimizer, 1)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


class Own(torch.optim.Optimizer):
    """Keeps state of many kinds beside weights of 16 bits."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        if hvd.rank() == 0:
            for i, p in enumerate(parameters):
                self.state[p] = {
                    "master": torch.full(p.shape, 1 / 3),
                    "count": torch.tensor(2**40 + i),
                    "codes": torch.arange(5, dtype=torch.uint8),
                    "mask": torch.tensor([True, False]),
                    "nothing": torch.empty(0),
                    "words": {"a": [1, (torch.tensor(2.5),)]},
                }


def test_state_arrives_in_its_own_dtypes():
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = Own(parameters)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for i, p in enumerate(parameters):
        state = optimizer.state[p]
        assert torch.equal(state["master"], torch.full((3,), 1 / 3))
        assert (state["count"].dtype, int(state["count"])) == (torch.int64, 2**40 + i)
        assert torch.equal(state["codes"], torch.arange(5, dtype=torch.uint8))
        assert state["mask"].tolist() == [True, False]
        assert state["nothing"].shape == (0,)
        assert float(state["words"]["a"][1][0]) == 2.5


def test_groups_that_differ_are_an_error_on_every_rank():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(1 + hvd.rank())]
    with pytest.raises(ValueError, match=r"have \[2\] parameters on rank 1, but \[1\] on rank 0"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(parameters, lr=0.1), root_rank=0)
