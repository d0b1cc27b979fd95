"""PyTorch: models whose weights are divided among the ranks."""

import copy
import math
import pickle

import pytest
import torch
from cases import MORE
from ranks import largest_difference, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch_nets import arrays, backward, local, raised_everywhere, regression
from torch_nets import distributed as distributed_model

import hvkit

pytestmark = pytest.mark.usefixtures("torch_distributed")


class Net(nn.Module):
    """Blocks in a list, a frozen layer, and one that shares its weight with another."""

    def __init__(self, seed=0, width=30):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, width)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.frozen = nn.Linear(width, 4).requires_grad_(False)
        self.last = nn.Linear(4, 4)
        self.tied = nn.ModuleList([nn.Linear(4, 4)])
        self.tied[0].weight = self.last.weight

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.tied[0](self.last(self.frozen(x)))


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.02, momentum=0.9, weight_decay=0.01)


def train(model, optimizer, data):
    for batch in data:
        optimizer.zero_grad()
        backward(model, batch)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def double(data):
    return [(x.double(), y.double()) for x, y in data]


def distributed(make=adamw, strategy=hvkit.FullyShard(), model=None, **options):  # noqa: B008
    model = Net(seed=hvkit.rank()).double() if model is None else model
    return distributed_model(make, model, strategy=strategy, **options)


def whole(model):
    """The weights, the same on every rank."""
    with hvkit.settled(model):
        state = model.state_dict() if hvkit.rank() == 0 else None
    return hvkit.broadcast(state and {name: value.numpy() for name, value in state.items()})


@pytest.mark.parametrize("strategy", [hvkit.FullyShard(), hvkit.FullyShard(False)])
@pytest.mark.parametrize("make", [adamw, momentum])
def test_it_trains_the_model_of_one_process(make, strategy):
    data = double(regression(steps=20))
    reference = Net().double()
    train(reference, make(reference.parameters()), data)
    model, optimizer = distributed(make, strategy)
    train(model, optimizer, local(data))
    expected = reference.state_dict()
    found = whole(model)
    assert found.keys() == expected.keys()
    assert largest_difference(found.values(), arrays(expected.values())) < 1e-6
    # The whole state loads into the plain model.
    Net().double().load_state_dict({n: torch.from_numpy(v) for n, v in found.items()})


def test_an_optimizer_that_keeps_the_old_parameters_would_update_nothing():
    model = Net().double()
    optimizer = adamw(model.parameters())
    old = [group["params"] for group in optimizer.param_groups]
    hvkit.distribute(model, optimizer, strategy=hvkit.FullyShard())
    start = whole(model)
    given = [group["params"] for group in optimizer.param_groups]
    for group, params in zip(optimizer.param_groups, old, strict=True):
        group["params"] = params
    with pytest.raises(ValueError, match=r"step\(\) without a gradient"):
        train(model, optimizer, local(double(regression(steps=1))))
    assert largest_difference(whole(model).values(), start.values()) == 0
    for group, params in zip(optimizer.param_groups, given, strict=True):
        group["params"] = params
    train(model, optimizer, local(double(regression(steps=2))))
    assert largest_difference(whole(model).values(), start.values()) > 1e-3


def test_each_rank_holds_its_part():
    model, optimizer = distributed()
    train(model, optimizer, local(double(regression(steps=1))))
    total = sum(p.numel() for p in model.parameters())
    mine = sum(p.to_local().numel() for p in model.parameters())
    moments = sum(s["exp_avg"].to_local().numel() for s in optimizer.state.values())
    frozen = sum(p.to_local().numel() for p in model.frozen.parameters())
    assert mine < total / hvkit.size() * 1.1
    assert moments == mine - frozen
    assert sum(hvkit.allgather(mine)) == total


KINDS = ("weights", "gradients", "objects")


def test_the_bytes_of_gathered_weights_and_scattered_gradients():
    model = nn.Sequential(*[nn.Linear(60, 60, bias=False) for _ in range(4)])
    model, optimizer = distributed(model=model)
    sent = []
    for _ in range(2):
        before = hvkit.traffic()
        model(torch.ones(2, 60)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after = hvkit.traffic()
        counts = [[t[k].bytes if k in t else 0 for k in KINDS] for t in (before, after)]
        sent.append([new - old for old, new in zip(*counts, strict=True)])
    size = 4 * sum(p.numel() for p in model.parameters())
    part = (hvkit.size() - 1) / hvkit.size() * size
    assert sent[1][0] == pytest.approx(2 * part, rel=0.03)
    assert sent[1][1] == pytest.approx(2 * part, rel=0.03)  # gloo's reduce-scatter is an allreduce
    assert sent[1][2] == 0  # clipping reduces norms, and joins no gradients


def test_a_run_that_is_resumed_is_the_undisturbed_run(tmp_path):
    folder = hvkit.broadcast(tmp_path)
    data = local(double(regression(steps=12)))
    undisturbed, optimizer = distributed()
    train(undisturbed, optimizer, data)

    model, optimizer = distributed()
    train(model, optimizer, data[:7])
    saved = hvkit.Checkpoint(folder, model=model, optimizer=optimizer).save(epoch=0, step=7)
    for each, name in ((optimizer, "optimizer"), (model, "model")):
        with pytest.raises(ValueError, match=rf"hvkit.settled\({name}\)"):
            each.state_dict()
    if hvkit.rank() == 0:
        plain = Net(1).double()
        plain.load_state_dict(torch.load(saved / "model.pt"))
        adamw(plain.parameters()).load_state_dict(torch.load(saved / "optimizer.pt"))
    hvkit.barrier()

    model, optimizer = distributed(model=Net(seed=5).double())
    hvkit.Checkpoint(folder, model=model, optimizer=optimizer).restore()
    train(model, optimizer, data[7:])
    found, expected = whole(model), whole(undisturbed)
    assert all((found[name] == expected[name]).all() for name in expected)


def test_a_state_from_before_the_call_is_divided():
    data = double(regression(steps=6))
    reference = Net().double()
    ours = adamw(reference.parameters())
    train(reference, ours, data)
    model = Net().double()
    optimizer = adamw(model.parameters())
    train(model, optimizer, data[:3])
    hvkit.distribute(model, optimizer, strategy=hvkit.FullyShard())
    train(model, optimizer, local(data[3:]))
    expected = arrays(reference.state_dict().values())
    assert largest_difference(whole(model).values(), expected) < 1e-6


def test_an_overflow_is_skipped_on_all_ranks():
    model, optimizer = distributed(momentum)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for step, (x, y) in enumerate(local(double(regression(steps=4)))):
        optimizer.zero_grad()
        overflow = float("inf") if step == 1 and hvkit.rank() == 0 else 1
        scaler.scale(overflow * F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 2.0, 2.0, 2.0]
    assert all(torch.isfinite(torch.from_numpy(each)).all() for each in whole(model).values())


def test_batch_norm_statistics_are_averaged():
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    model, optimizer = distributed(model=model)
    train(model, optimizer, local(regression(steps=3)))
    assert same_on_all_ranks(arrays(model.buffers()))
    assert not torch.equal(model[1].running_mean, torch.zeros(6))


def test_ranks_that_use_other_layers_are_named():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

        def forward(self, x):
            return self.layers[1 if hvkit.rank() == 0 else 2](self.layers[0](x))

    model, optimizer = distributed(model=Branches())
    model(torch.ones(2, 5)).sum().backward()
    assert raised_everywhere(optimizer.step, "rank 1 has computed other layers than rank 0")


def test_ranks_with_other_learning_rates_are_named():
    model, optimizer = distributed()
    optimizer.param_groups[0]["lr"] = 0.5 + hvkit.rank()
    data = local(double(regression(steps=1)))
    text = "parameter group 0 of AdamW is 0.5 on rank 0 but 1.5 on rank 1"
    assert raised_everywhere(lambda: train(model, optimizer, data), text)


def test_parts_of_a_model_and_compiled_models_save_whole_tensors(tmp_path):
    folder = hvkit.broadcast(tmp_path)
    plain = Net().double()
    compiled = torch.compile(plain, backend="eager")
    compiled, optimizer = distributed(model=compiled)
    train(compiled, optimizer, local(double(regression(steps=1))))
    with pytest.raises(ValueError, match=r"hvkit.settled\(model\)"):
        plain.blocks[0].state_dict()
    with hvkit.settled(compiled):
        if hvkit.rank() == 0:
            part = plain.blocks[0].state_dict()
            assert part["0.weight"].shape == (30, 30)
            everything = compiled.state_dict()
            assert torch.equal(part["0.weight"], everything["_orig_mod.blocks.0.0.weight"])
    saved = hvkit.Checkpoint(folder, model=compiled, optimizer=optimizer).save(epoch=0, step=1)
    if hvkit.rank() == 0:
        Net().double().load_state_dict(torch.load(saved / "model.pt"))
    hvkit.barrier()
    expected = whole(plain)
    zeros = {n: torch.zeros_like(p) for n, p in Net().double().blocks[0].state_dict().items()}
    plain.blocks[0].load_state_dict(zeros)
    assert not whole(plain)["blocks.0.0.weight"].any()
    hvkit.Checkpoint(folder, model=compiled, optimizer=optimizer).restore()
    assert (whole(plain)["blocks.0.0.weight"] == expected["blocks.0.0.weight"]).all()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_a_copy_of_a_part_of_the_state_is_refused(copied):
    for strategy in (hvkit.FullyShard(), hvkit.ShardedOptimizer()):
        model, optimizer = distributed(strategy=strategy)
        train(model, optimizer, local(double(regression(steps=1))))
        with pytest.raises(ValueError, match="a copy of AdamW"):
            copied(optimizer)


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.ModuleList([nn.Linear(2, 2)]), "ModuleList has no forward"),
        (Scalar(), "parameter scale is a single number"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "takes one dtype"),
        (nn.Sequential(nn.Embedding(3, 2, sparse=True)), "sparse=False"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(model, text):
    assert refused(text, momentum, model=model)


def refused(text, make=adamw, **options):
    call = lambda: distributed(make, **options)  # noqa: E731
    return raised_everywhere(call, text, kind=ValueError)


def test_contradictions_are_refused():
    assert refused("leave compression out", compression="int8")
    assert refused("batch_norm='sync'", batch_norm="sync")
    assert refused("check_every=5", check_every=5)
    assert refused("leave accumulate out", accumulate=2)
    assert refused("LBFGS computes its step", torch.optim.LBFGS)
    assert refused("Rprop computes with whole parameters", torch.optim.Rprop)
    with_another = lambda p: adamw([*p, nn.Parameter(torch.ones(1))])  # noqa: E731
    assert refused("1 parameters that are not the model's", with_another)
    with pytest.raises(TypeError, match="reshard_after_forward must be True or False, got 'yes'"):
        hvkit.FullyShard("yes")


@MORE
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, -math.inf])
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": hvkit.FullyShard()},
        {"mesh": hvkit.Mesh(shard=hvkit.size())},
        {"mesh": hvkit.Mesh(tensor=hvkit.size())},
    ],
    ids=["fully shard", "shard", "tensor"],
)
def test_the_norm_of_gradients_of_several_models(options, norm_type):
    """Of two divided ones, a rank of which may have no part of a bias, and of one that is not."""

    def made(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1)).double()

    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)

    def backward(models):
        for model in models:
            model(x).square().sum().backward()
        found = [p for model in models for p in model.parameters()]
        return found, [p.grad for p in found if p.grad is not None]

    expected = nn.utils.get_total_norm(backward([made(0), made(1), made(2)])[1], norm_type)
    models = [made(0), made(1)]
    for model in models:
        hvkit.distribute(model, momentum(model.parameters()), **options)
    parameters, gradients = backward([*models, made(2)])
    view = gradients[0].view(-1)
    before = hvkit.traffic()
    found = [
        nn.utils.get_total_norm(gradients, norm_type),
        nn.utils.clip_grad_norm_(iter(parameters), 0.01, norm_type),
    ]
    after = hvkit.traffic()
    assert list(map(float, found)) == pytest.approx([float(expected)] * 2, rel=1e-12)
    assert after.get("objects") == before.get("objects")  # nothing was joined
    copies = [each.clone() for each in gradients]
    view.mul_(1.0)  # the script's, which has the clipped gradient
    again = nn.utils.get_total_norm(gradients, norm_type)
    assert float(nn.utils.get_total_norm(copies, norm_type)) == pytest.approx(float(again))
    assert float(again) == pytest.approx(min(0.01, float(expected)), rel=1e-3)
