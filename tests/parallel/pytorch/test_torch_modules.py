"""Several modules in one call, parameters of no module, and modules that were left out."""

import pytest
import torch
from ranks import largest_difference, same_on_all_ranks, shared_folder
from torch import nn
from torch.nn import functional as F
from torch_nets import arrays, local, raised_everywhere, regression

import hvkit
from hvkit.frameworks.pytorch.torch_distributed import stop

pytestmark = pytest.mark.two_ranks


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, x):
        return torch.tanh(self.layer(x))


class Decoder(nn.Module):
    """With batch norm, and a buffer that every rank draws for itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))
        self.register_buffer("scale", torch.rand(1) + 1)

    def forward(self, x):
        return self.layers(x) * self.scale


def pair(seed=0):
    torch.manual_seed(seed)
    return [Encoder(), Decoder()]


def without_norm(seed=0):
    torch.manual_seed(seed)
    return [Encoder(), nn.Linear(6, 4)]


def joint(models, make=torch.optim.SGD):
    return make([p for model in models for p in model.parameters()], lr=0.05)


def train(models, optimizers, data):
    for x, y in data:
        for each in optimizers:
            each.zero_grad()
        F.mse_loss(models[1](models[0](x)), y).backward()
        for each in optimizers:
            each.step()


def state(models):
    return arrays(value for model in models for value in model.state_dict().values())


@pytest.fixture
def torch_distributed():
    yield
    stop()


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (pair, {"batch_norm": "sync"}),
        (without_norm, {"strategy": hvkit.ShardedOptimizer()}),
        (without_norm, {"strategy": hvkit.FullyShard()}),
        (without_norm, {"strategy": hvkit.LocalSGD(every=1)}),
        (without_norm, {"strategy": hvkit.ParameterServer(staleness=0)}),
    ],
    ids=["sync", "ShardedOptimizer", "FullyShard", "LocalSGD", "ParameterServer"],
)
def test_a_list_of_modules_trains_as_in_one_process(build, options, torch_distributed):
    data = regression(steps=4)
    reference = build()
    train(reference, [joint(reference)], data)
    models = build(seed=hvkit.rank())
    optimizer = joint(models)
    assert hvkit.distribute(models, optimizer, **options) == (models, optimizer)
    train(models, [optimizer], local(data))
    with hvkit.settled(models, optimizer):
        if hvkit.rank() == 0:
            assert largest_difference(state(models), state(reference)) < 1e-5


def test_statistics_of_every_module_are_averaged():
    models = pair(seed=hvkit.rank())
    hvkit.distribute(tuple(models), optimizer := joint(models))
    train(models, [optimizer], local(regression(steps=3)))
    assert same_on_all_ranks(state(models))


def test_one_checkpoint_holds_several_modules_and_their_optimizers(tmp_path_factory):
    folder, data = shared_folder(tmp_path_factory), local(regression(steps=6))

    def build(seed):
        models = pair(seed)
        optimizers = [torch.optim.Adam(model.parameters(), 0.05) for model in models]
        hvkit.distribute(models, optimizers, strategy=hvkit.LocalSGD(every=4))
        return models, optimizers, hvkit.Checkpoint(folder, model=models, optimizer=optimizers)

    models, optimizers, kept = build(hvkit.rank())
    train(models, optimizers, data[:3])
    kept.save(epoch=0, step=3)
    train(models, optimizers, data[3:])
    again, others, kept = build(hvkit.rank() + 9)
    assert kept.restore().step == 3
    train(again, others, data[3:])
    assert all((a == b).all() for a, b in zip(state(again), state(models), strict=True))


def gan(seed):
    torch.manual_seed(seed)
    models = [nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))]
    return models, [torch.optim.SGD(m.parameters(), 0.05, 0.9) for m in models]


def train_gan(models, optimizers, data):
    """Each optimizer steps after a backward pass through both models."""
    (generator, critic), (first, second) = models, optimizers
    for x, real in data:
        second.zero_grad()
        fake = generator(x)
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        second.step()
        first.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        first.step()


class Temperature(nn.Module):
    """That of soft actor-critic, a tensor that its own loss moves."""

    def __init__(self):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(1))


def actor(seed):
    torch.manual_seed(seed)
    models = [nn.Linear(8, 4), Temperature()]
    return models, [torch.optim.Adam(model.parameters(), 0.01) for model in models]


def train_actor(models, optimizers, data):
    (actor, temperature), (first, second) = models, optimizers
    for x, y in data:
        loss = (actor(x) - y).pow(2).mean() * temperature.log_alpha.exp().detach()
        first.zero_grad()
        loss.backward()
        first.step()
        second.zero_grad()
        (temperature.log_alpha * (actor(x).detach().mean() + 0.3)).mean().backward()
        second.step()


@pytest.mark.parametrize(
    ("build", "steps", "passed"),
    [(gan, train_gan, 2), (actor, train_actor, 1)],
    ids=["two models", "a parameter of no model"],
)
def test_optimizers_of_their_own_train_as_in_one_process(build, steps, passed):
    data = regression(steps=6)
    reference, own = build(0)
    steps(reference, own, data)
    models, optimizers = build(hvkit.rank())
    hvkit.distribute(models[:passed], optimizers)
    steps(models, optimizers, local(data))
    assert largest_difference(state(models), state(reference)) < 1e-5
    assert same_on_all_ranks(state(models))


class Agent(nn.Module):
    """Holds the models, and a parameter and a buffer itself."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = pair()
        self.log_alpha = nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1))


def refused(models, optimizer, *parts):
    return raised_everywhere(lambda: hvkit.distribute(models, optimizer), *parts, kind=ValueError)


def test_a_module_with_batch_norm_that_was_left_out_is_refused_and_named():
    models, agent = pair(), Agent()
    assert refused(
        models[0],
        joint(models),
        "SGD also updates Decoder, which was not passed",
        "its batch norm and its buffers",
        "hvkit.distribute([encoder, decoder], optimizer)",
    )
    assert refused(agent.actor, joint([agent]), "also updates Decoder")
    hvkit.distribute(agent.actor, [joint([agent.actor]), torch.optim.SGD([agent.log_alpha], 0.1)])


def test_a_module_that_was_left_out_but_has_nothing_else_is_named_in_a_warning(caplog):
    model, head = nn.Linear(8, 4), nn.Bilinear(4, 4, 2)
    hvkit.distribute(model, joint([model, head]))
    told = [each for each in caplog.messages if "also updates Bilinear" in each]
    assert len(told) == (hvkit.rank() == 0)


def test_models_that_share_parameters_are_refused_in_two_calls():
    shared = nn.Linear(8, 4)
    first, second = nn.Sequential(shared, nn.Linear(4, 2)), nn.Sequential(shared, nn.Linear(4, 3))
    hvkit.distribute(first, joint([first]))
    text = "parameter 0.weight of this model was passed to hvkit.distribute before"
    assert refused(second, joint([second]), text)


def test_tensors_that_differ_are_named_with_their_module():
    models = [nn.Linear(8, 4), nn.Linear(4, 4 + hvkit.rank())]
    text = "parameter weight of model 1: shape (5, 4)"
    assert raised_everywhere(lambda: hvkit.distribute(models, joint(models)), text)
