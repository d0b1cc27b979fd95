"""Several modules in one call, parameters of no module, and modules that were left out."""

import pytest
import torch
from ranks import error_of, largest_difference, same_on_all_ranks, shared_folder
from torch import nn
from torch.nn import functional as F
from torch_nets import arrays, my_part, regression

import hvkit
from hvkit.frameworks.pytorch.divided_state import process_group

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


def joint(models, make=torch.optim.SGD, **options):
    return make([p for model in models for p in model.parameters()], lr=0.05, **options)


def train(models, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        F.mse_loss(models[1](models[0](x)), y).backward()
        optimizer.step()


def local(data):
    return [(my_part(x), my_part(y)) for x, y in data]


def state(models):
    return arrays(value for model in models for value in model.state_dict().values())


def one_process(data, steps=train, make=torch.optim.SGD):
    models = pair()
    steps(models, joint(models, make), data)
    return state(models)


def test_a_list_of_modules_trains_as_in_one_process():
    data = regression(steps=6)
    models = pair(seed=hvkit.rank())
    optimizer = joint(models)
    returned, same = hvkit.distribute(models, optimizer, batch_norm="sync")
    assert (returned, same) == (models, optimizer)
    train(models, optimizer, local(data))
    assert largest_difference(state(models), one_process(data)) < 1e-5
    assert same_on_all_ranks(state(models))


def test_statistics_of_every_module_are_averaged():
    models = pair(seed=hvkit.rank())
    optimizer = joint(models)
    hvkit.distribute(tuple(models), optimizer)
    train(models, optimizer, local(regression(steps=3)))
    assert same_on_all_ranks(state(models))


STRATEGIES = [hvkit.ShardedOptimizer(), hvkit.FullyShard(), hvkit.LocalSGD(every=1)]


@pytest.fixture
def torch_distributed():
    yield
    process_group.stop()


def without_norm(seed):
    torch.manual_seed(seed)
    return [Encoder(), nn.Linear(6, 4)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_strategies_take_several_modules(strategy, torch_distributed):
    data = regression(steps=4)
    reference = without_norm(0)
    train(reference, joint(reference), data)
    models = without_norm(hvkit.rank())
    optimizer = joint(models)
    hvkit.distribute(models, optimizer, strategy=strategy)
    train(models, optimizer, local(data))
    with hvkit.settled(models, optimizer):
        if hvkit.rank() == 0:
            assert largest_difference(state(models), state(reference)) < 1e-5


def test_a_parameter_server_holds_several_modules():
    models = without_norm(hvkit.rank())
    optimizer = joint(models)
    hvkit.distribute(models, optimizer, strategy=hvkit.ParameterServer(staleness=0))
    train(models, optimizer, local(regression(steps=4)))
    with hvkit.settled(models):
        assert same_on_all_ranks(state(models))


def test_one_checkpoint_holds_several_modules_and_their_optimizers(tmp_path_factory):
    folder, data = shared_folder(tmp_path_factory), regression(steps=6)

    def build(seed):
        models = pair(seed)
        optimizers = [torch.optim.Adam(model.parameters(), 0.05) for model in models]
        hvkit.distribute(models, optimizers, strategy=hvkit.LocalSGD(every=4))
        kept = hvkit.Checkpoint(folder, model=models, optimizer=optimizers)
        return models, optimizers, kept

    def steps(models, optimizers, data):
        for x, y in data:
            for each in optimizers:
                each.zero_grad()
            F.mse_loss(models[1](models[0](x)), y).backward()
            for each in optimizers:
                each.step()

    models, optimizers, kept = build(hvkit.rank())
    steps(models, optimizers, local(data[:3]))
    kept.save(epoch=0, step=3)
    steps(models, optimizers, local(data[3:]))
    again, others, kept = build(hvkit.rank() + 9)
    assert kept.restore().step == 3
    steps(again, others, local(data[3:]))
    pairs = zip(state(again), state(models), strict=True)
    assert all((a == b).all() for a, b in pairs)


class Generator(nn.Linear):
    pass


def test_two_models_with_an_optimizer_each_in_one_call():
    """A GAN: each optimizer steps after a backward pass through both."""
    data = regression(steps=6, shape=(4,))

    def build(seed):
        torch.manual_seed(seed)
        models = Generator(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        return list(models), [torch.optim.SGD(m.parameters(), 0.05, 0.9) for m in models]

    def steps(models, optimizers, data):
        (generator, critic), (first, second) = models, optimizers
        for x, real in data:
            second.zero_grad()
            fake = generator(x)
            (critic(fake.detach()).mean() - critic(real).mean()).backward()
            second.step()
            first.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            first.step()

    reference, own = build(0)
    steps(reference, own, data)
    models, optimizers = hvkit.distribute(*build(hvkit.rank()))
    steps(models, optimizers, local(data))
    assert largest_difference(state(models), state(reference)) < 1e-5
    assert same_on_all_ranks(state(models))


def test_a_parameter_of_no_module_has_an_optimizer_of_its_own():
    """The temperature of soft actor-critic, a tensor that its own loss moves."""
    data = regression(steps=6)

    def build(seed):
        torch.manual_seed(seed)
        actor, log_alpha = nn.Linear(8, 4), torch.zeros(1, requires_grad=True)
        optimizers = torch.optim.Adam(actor.parameters(), 0.01), torch.optim.Adam([log_alpha], 0.01)
        return actor, log_alpha, list(optimizers)

    def steps(actor, log_alpha, optimizers, data):
        for x, y in data:
            loss = (actor(x) - y).pow(2).mean() * log_alpha.exp().detach()
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (log_alpha * (actor(x).detach().mean() + 0.3)).mean().backward()
            optimizers[1].step()

    actor, log_alpha, optimizers = build(0)
    steps(actor, log_alpha, optimizers, data)
    reference = [*state([actor]), log_alpha.detach().numpy()]
    actor, log_alpha, optimizers = build(hvkit.rank())
    hvkit.distribute(actor, optimizers)
    steps(actor, log_alpha, optimizers, local(data))
    found = [*state([actor]), log_alpha.detach().numpy()]
    assert largest_difference(found, reference) < 1e-5
    assert same_on_all_ranks(found)


class Agent(nn.Module):
    """Holds the models, and a parameter and a buffer itself."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = pair()
        self.log_alpha = nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1))


def test_a_module_with_batch_norm_that_was_left_out_is_refused_and_named():
    models = pair()
    error, text = error_of(lambda: hvkit.distribute(models[0], joint(models)))
    assert error is ValueError
    assert "SGD also updates Decoder, which was not passed" in text
    assert "its batch norm and its buffers" in text
    assert "hvkit.distribute([encoder, decoder], optimizer)" in text
    agent = Agent()
    error, text = error_of(lambda: hvkit.distribute(agent.actor, joint([agent])))
    assert "also updates Decoder" in text
    hvkit.distribute(agent.actor, [joint([agent.actor]), torch.optim.SGD([agent.log_alpha], 0.1)])


def test_a_module_that_was_left_out_but_has_nothing_else_is_named_in_a_warning(caplog):
    model, head = nn.Linear(8, 4), Generator(4, 4)
    hvkit.distribute(model, joint([model, head]))
    told = [each for each in caplog.messages if "also updates Generator" in each]
    assert len(told) == (hvkit.rank() == 0)


def test_models_that_share_parameters_are_refused_in_two_calls():
    shared = nn.Linear(8, 4)
    first, second = nn.Sequential(shared, nn.Linear(4, 2)), nn.Sequential(shared, nn.Linear(4, 3))
    hvkit.distribute(first, joint([first]))
    error, text = error_of(lambda: hvkit.distribute(second, joint([second])))
    assert error is ValueError
    assert "parameter 0.weight of this model was passed to hvkit.distribute before" in text


def test_tensors_that_differ_are_named_with_their_module():
    models = [nn.Linear(8, 4), nn.Linear(4, 4 + hvkit.rank())]
    error, text = error_of(lambda: hvkit.distribute(models, joint(models)))
    assert error is hvkit.RanksDisagreeError
    assert "parameter weight of model 1: shape (5, 4)" in text
