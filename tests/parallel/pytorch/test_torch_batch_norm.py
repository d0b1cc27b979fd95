"""Which statistics batch-norm layers use and keep."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from ranks import largest_difference, same_on_all_ranks
from torch import nn
from torch_nets import arrays, local, regression, train

import hvkit
from hvkit import main_rank


def normalised(seed=0, **options):
    torch.manual_seed(seed)
    first = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6, **options), nn.ReLU()
    second = nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(64, 4), nn.BatchNorm1d(4))


def images(steps=8):
    return regression(steps, shape=(1, 8, 8))


def distributed(**options):
    model = normalised(hvkit.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return hvkit.distribute(model, optimizer, lr_scaling="none", **options)


def state(model):
    return [t.double().numpy() for t in model.state_dict().values()]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_synchronised_layers_equal_one_process_with_all_ranks_batches(momentum):
    data = images()
    reference = normalised(momentum=momentum)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.05), data)
    model = normalised(hvkit.rank(), momentum=momentum)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hvkit.distribute(model, optimizer, lr_scaling="none", batch_norm="sync")
    train(model, optimizer, local(data))
    assert largest_difference(state(model), state(reference)) < 1e-5
    assert same_on_all_ranks(state(model))


@pytest.mark.parametrize("strategy", [hvkit.Synchronous(), hvkit.ShardedOptimizer()])
def test_pytorchs_own_synchronised_layers_stay_synchronised(strategy):
    data = images()
    reference = normalised()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.05), data)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normalised())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hvkit.distribute(model, optimizer, strategy=strategy)
    train(model, optimizer, local(data))
    assert largest_difference(state(model), state(reference)) < 1e-5
    assert same_on_all_ranks(state(model))


def test_where_ranks_train_alone_synchronised_layers_are_said_to_be_local(caplog, monkeypatch):
    monkeypatch.setattr(main_rank, "_logged", set())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normalised())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hvkit.distribute(model, optimizer, strategy=hvkit.LocalSGD(2))
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
    assert same_on_all_ranks(arrays(model.parameters()))
    assert not same_on_all_ranks(arrays(model.buffers()))


def test_frozen_layers_keep_their_statistics_bit_for_bit():
    model, optimizer = distributed()
    train(model, optimizer, local(images(steps=2)))
    model[1].eval()
    before = model[1].running_mean.clone()
    train(model, optimizer, local(images(steps=5)))
    assert torch.equal(model[1].running_mean, before)
    assert same_on_all_ranks(state(model))


@pytest.mark.parametrize("batch_norm", ["average", "sync"])
def test_two_forward_passes_may_come_before_their_backward_passes(batch_norm):
    model, optimizer = distributed(batch_norm=batch_norm)
    (a, _), (b, _) = local(images(steps=2))
    losses = [model(x).square().mean() for x in (a, b)]
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
    model = nn.Sequential(nn.Conv2d(1, 6, 3), OwnForward(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"OwnForward, which has a forward of its own"):
        hvkit.distribute(model, optimizer, batch_norm="sync")


def test_statistics_of_layers_that_are_not_synchronised_are_averaged():
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.InstanceNorm2d(6, track_running_stats=True), nn.BatchNorm2d(6)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer, batch_norm="sync")
    for x, _ in local(images(steps=2)):
        model(x).square().mean().backward()
        optimizer.step()
    assert same_on_all_ranks(state(model))


def test_statistics_wait_for_the_last_pass_of_an_accumulation():
    model, optimizer = distributed(accumulate=3)
    for x, y in local(images(steps=6)):
        nn.functional.mse_loss(model(x), y).backward()
        alike = same_on_all_ranks(arrays(model.buffers()))
        if model[1].num_batches_tracked % 3 == 0:
            assert alike
            optimizer.step()
            optimizer.zero_grad()
        else:
            assert not alike


@pytest.mark.every_combination
def test_models_with_synchronised_layers_load_without_hvkit(tmp_path):
    model, optimizer = distributed(batch_norm="sync")
    train(model, optimizer, local(images(steps=1)))
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(model))
    code = (
        "import pickle, sys; sys.modules['hvkit'] = None; "
        "model = pickle.load(open(sys.argv[1], 'rb')); import torch; "
        "model.train()(torch.ones(4, 1, 8, 8)); print(type(model[1]).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.stdout == "BatchNorm2d\n", done.stderr


def test_in_evaluation_synchronised_layers_work_on_one_rank_alone():
    model, optimizer = distributed(batch_norm="sync")
    train(model, optimizer, local(images(steps=2)))
    model.eval()
    outputs = []
    if hvkit.rank() == 0:
        with torch.no_grad():
            outputs = model(images(steps=1)[0][0]).numpy()
        assert np.isfinite(outputs).all()
    hvkit.barrier()
