"""Which statistics batch-norm layers use and keep."""

import numpy as np
import pytest
import torch
from ranks import largest_difference, same_on_all_ranks
from torch import nn
from torch_nets import arrays, backward, local, regression, train, weights
from torch_nets import distributed as distributed_model

import hvkit


def normalised(seed=0, **options):
    torch.manual_seed(seed)
    first = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6, **options), nn.ReLU()
    second = nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(64, 4), nn.BatchNorm1d(4))


def images(steps=4):
    return regression(steps, shape=(1, 8, 8))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def distributed(model=None, **options):
    return distributed_model(sgd, model or normalised(hvkit.rank()), **options)


def state(model):
    return [t.double().numpy() for t in model.state_dict().values()]


def of_pytorch():
    return nn.SyncBatchNorm.convert_sync_batchnorm(normalised())


@pytest.mark.parametrize(
    ("of_layers", "options"),
    [
        ({}, {"batch_norm": "sync"}),
        ({"momentum": None}, {"batch_norm": "sync"}),
        ({}, {"strategy": hvkit.Synchronous()}),
        ({}, {"strategy": hvkit.ShardedOptimizer()}),
    ],
    ids=str,
)
def test_synchronised_layers_equal_one_process_with_all_ranks_batches(of_layers, options):
    """hvkit's, and PyTorch's own."""
    data = images()
    reference = normalised(**of_layers)
    train(reference, sgd(reference.parameters()), data)
    model = normalised(hvkit.rank(), **of_layers) if "batch_norm" in options else of_pytorch()
    model, optimizer = distributed(model, **options)
    train(model, optimizer, local(data))
    assert largest_difference(state(model), state(reference)) < 1e-5
    assert same_on_all_ranks(state(model))


def test_where_ranks_train_alone_synchronised_layers_are_said_to_be_local(caplog):
    distributed(of_pytorch(), strategy=hvkit.LocalSGD(2))
    said = "SyncBatchNorm layers normalise with each rank's own batch" in caplog.text
    assert said == (hvkit.rank() == 0)


def test_ranks_with_unequal_batches_normalise_over_all_samples():
    model, _ = distributed(batch_norm="sync")
    x = images(1)[0][0]
    rows = 1 if hvkit.rank() == 0 else len(x) // hvkit.size() + 2
    mine = x[:rows] + hvkit.rank()
    together = torch.cat(hvkit.allgather(mine))
    model(mine)
    reference = normalised()
    reference(together)
    assert largest_difference(state(model), state(reference)) < 1e-5


def test_running_statistics_are_averaged_with_every_step():
    data = local(images(steps=1))
    twin = normalised()
    twin(data[0][0])
    expected = [torch.stack(hvkit.allgather(b.double())).mean(0) for b in twin.buffers()]
    model, optimizer = distributed()
    train(model, optimizer, data)
    assert largest_difference(arrays(model.buffers()), arrays(expected)) < 1e-6
    assert same_on_all_ranks(state(model))
    assert not same_on_all_ranks(state(twin))


def test_running_statistics_stay_each_ranks_own_on_request():
    model, optimizer = distributed(batch_norm="local")
    train(model, optimizer, local(images()))
    assert same_on_all_ranks(weights(model))
    assert not same_on_all_ranks(arrays(model.buffers()))


def test_frozen_layers_keep_their_statistics_bit_for_bit():
    model, optimizer = distributed()
    train(model, optimizer, local(images(steps=2)))
    model[1].eval()
    before = model[1].running_mean.clone()
    train(model, optimizer, local(images(steps=2)))
    assert torch.equal(model[1].running_mean, before)
    assert same_on_all_ranks(state(model))


@pytest.mark.parametrize("batch_norm", ["average", "sync"])
def test_two_forward_passes_may_come_before_their_backward_passes(batch_norm):
    model, optimizer = distributed(batch_norm=batch_norm)
    losses = [model(x).square().mean() for x, _ in local(images(steps=2))]
    for loss in losses:
        loss.backward()
    optimizer.step()
    assert same_on_all_ranks(state(model))


def test_statistics_of_a_model_that_is_converted_after_the_call_are_averaged():
    model, optimizer = distributed()
    model.double()
    data = [(x.double(), y.double()) for x, y in local(images(steps=2))]
    train(model, optimizer, data)
    assert model[1].running_mean.dtype is torch.float64
    assert same_on_all_ranks(state(model))


class OwnForward(nn.BatchNorm2d):
    def forward(self, x):
        return torch.relu(super().forward(x))


def test_layers_that_cannot_be_synchronised_are_refused():
    with pytest.raises(ValueError, match=r"OwnForward, which has a forward of its own"):
        distributed(nn.Sequential(nn.Conv2d(1, 6, 3), OwnForward(6)), batch_norm="sync")


def test_statistics_of_layers_that_are_not_synchronised_are_averaged():
    layers = nn.InstanceNorm2d(6, track_running_stats=True), nn.BatchNorm2d(6)
    model, optimizer = distributed(nn.Sequential(nn.Conv2d(1, 6, 3), *layers), batch_norm="sync")
    for x, _ in local(images(steps=2)):
        model(x).square().mean().backward()
        optimizer.step()
    assert same_on_all_ranks(state(model))


def test_statistics_wait_for_the_last_pass_of_an_accumulation():
    model, optimizer = distributed(accumulate=3)
    for number, batch in enumerate(local(images(steps=6)), 1):
        backward(model, batch)
        assert same_on_all_ranks(arrays(model.buffers())) == (number % 3 == 0)
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_in_evaluation_synchronised_layers_work_on_one_rank_alone():
    model, optimizer = distributed(batch_norm="sync")
    train(model, optimizer, local(images(steps=2)))
    model.eval()
    if hvkit.rank() == 0:
        with torch.no_grad():
            assert np.isfinite(model(images(steps=1)[0][0]).numpy()).all()
    hvkit.barrier()
