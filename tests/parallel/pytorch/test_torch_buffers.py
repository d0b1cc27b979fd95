"""Buffers that forward passes learn: averaged on request, and named where they differ."""

import copy

import torch
from ranks import all_but_rank_0, largest_difference, same_on_all_ranks, shared_folder
from torch import nn
from torch.optim import swa_utils
from torch_nets import (
    arrays,
    backward,
    distributed,
    local,
    my_part,
    raised_everywhere,
    regression,
    sgd,
)

import hvkit
from hvkit.frameworks.pytorch import buffers


class Scaled(nn.Module):
    """Divides by a running mean of the batch's size, as codebooks and normalisers do."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.scale.lerp_(x.detach().abs().mean(0), 0.3)
            self.seen += len(x)
        return x / self.scale


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 6), Scaled(6), nn.BatchNorm1d(6), nn.Linear(6, 4))


def train(model, optimizer, data, average=lambda module: None):
    for x, y in data:
        optimizer.zero_grad()
        backward(model, (x, y))
        optimizer.step()
        average(model[1])


def said(caplog):
    """What rank 0 has warned of, on every rank."""
    return hvkit.broadcast([each for each in caplog.messages if "same on all ranks" in each])


def test_averaged_buffers_are_those_of_one_process_if_they_are_means():
    data = regression(steps=1)
    reference = net(0)
    train(reference, sgd(reference.parameters()), data)
    model, optimizer = distributed(model=net(hvkit.rank()), batch_norm="sync")
    train(model, optimizer, local(data), hvkit.average_buffers)
    assert largest_difference(arrays([model[1].scale]), arrays([reference[1].scale])) < 1e-6
    train(model, optimizer, local(regression(steps=4)), hvkit.average_buffers)
    assert same_on_all_ranks(arrays(model.state_dict().values()))


class OfTheRank(nn.Linear):
    """Has a parameter and a buffer that it does not name."""

    def __init__(self):
        super().__init__(8, 4)
        self.own = nn.Parameter(torch.full((2,), float(hvkit.rank())))
        self.register_buffer("noise", torch.full((2,), float(hvkit.rank())))

    def named_parameters(self, *args, **kwargs):
        return (each for each in super().named_parameters(*args, **kwargs) if each[0] != "own")

    def named_buffers(self, *args, **kwargs):
        return (each for each in super().named_buffers(*args, **kwargs) if each[0] != "noise")


def test_parameters_and_buffers_that_a_model_does_not_name_stay_each_ranks_own():
    model, optimizer = distributed(model=OfTheRank(), check_every=1)
    for batch in local(regression(steps=2)):
        backward(model, batch)
        optimizer.step()
    hvkit.average_buffers(model)
    assert [*model.own.tolist(), *model.noise.tolist()] == [hvkit.rank()] * 4
    assert same_on_all_ranks(arrays(model.parameters()))


def test_learnt_buffers_are_named_in_the_first_step(caplog):
    train(*distributed(model=net(0)), local(regression(steps=2)))
    (text,) = said(caplog)
    assert f"buffer 1.scale of {all_but_rank_0()}" in text
    assert "hvkit.average_buffers(module)" in text
    assert "running_mean" not in text


def test_a_model_whose_buffers_are_alike_is_not_warned_of(caplog, tmp_path_factory):
    model, optimizer = distributed(model=net(0)[2:], batch_norm="local")
    batch = torch.randn(6, 6) + hvkit.rank()
    train(nn.Sequential(*model, nn.Identity()), optimizer, [(batch, torch.randn(6, 4))])
    folder = shared_folder(tmp_path_factory)
    hvkit.Checkpoint(folder, model=model, optimizer=optimizer).save(epoch=0, step=1)
    assert not said(caplog)


def test_a_teacher_that_was_not_passed_is_named_at_a_save(caplog, tmp_path_factory):
    model, optimizer = distributed(model=nn.Linear(8, 4))
    torch.manual_seed(hvkit.rank())
    teacher = nn.Linear(8, 4)
    folder = shared_folder(tmp_path_factory)
    kept = hvkit.Checkpoint(folder, model=model, teacher=teacher, optimizer=optimizer)
    kept.save(epoch=0, step=1)
    (text,) = said(caplog)
    assert f"parameter weight of teacher of {all_but_rank_0()}" in text
    assert "hvkit.distribute([model, teacher], optimizer)" in text


def test_a_teacher_that_was_passed_follows_alike_on_all_ranks():
    model, teacher = net(hvkit.rank()), net(hvkit.rank() + 7).requires_grad_(False)
    hvkit.distribute([model, teacher], optimizer := sgd(model.parameters()), check_every=1)
    for batch in local(regression(steps=4)):
        teacher(batch[0])
        train(model, optimizer, [batch], hvkit.average_buffers)
        hvkit.average_buffers(teacher)
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    assert same_on_all_ranks(arrays(teacher.state_dict().values()))


def test_statistics_of_averaged_weights_are_averaged():
    model = net(0)[2:]
    averaged = swa_utils.AveragedModel(model)
    batches = [my_part(torch.randn(4 * hvkit.size(), 6)) for _ in range(3)]
    swa_utils.update_bn(batches, averaged)
    assert not same_on_all_ranks(arrays(averaged.buffers()))
    hvkit.average_buffers(averaged)
    assert same_on_all_ranks(arrays(averaged.buffers()))


def test_integers_that_differ_are_named(caplog):
    scaled = Scaled(2)
    scaled.seen += hvkit.rank()
    hvkit.average_buffers([scaled, copy.deepcopy(scaled)])
    (text,) = hvkit.broadcast([t for t in caplog.messages if "average_buffers leaves" in t])
    assert f"buffer seen of model 0 of {all_but_rank_0()}" in text


def test_integers_are_compared_in_the_first_call_and_modules_in_each(monkeypatch):
    compared, scaled = [], Scaled(5)
    monkeypatch.setattr(buffers, "fingerprints_of", lambda each: compared.append(len(each)) or [])
    for _ in range(3):
        hvkit.average_buffers(scaled)
    assert compared == [1]
    other = scaled if hvkit.rank() else nn.BatchNorm1d(7)
    assert raised_everywhere(lambda: hvkit.average_buffers(other), "running_mean: (7,)")
    hvkit.average_buffers(scaled)


def test_buffers_of_every_dtype_are_averaged():
    module, rank = nn.Module(), hvkit.rank()
    for number, dtype in enumerate((torch.float64, torch.bfloat16, torch.complex64)):
        module.register_buffer(f"of_{number}", torch.full((2, 1), rank + 1).to(dtype))
    hvkit.average_buffers(module)
    assert all((each == (hvkit.size() + 1) / 2).all() for each in module.buffers())


def test_other_modules_and_other_things_are_refused():
    assert raised_everywhere(lambda: hvkit.average_buffers(Scaled(2 + hvkit.rank())), "(3,)")
    text = "a torch.nn.Module, or a Keras model or layer"
    assert raised_everywhere(lambda: hvkit.average_buffers(torch.ones(2)), text, kind=TypeError)
