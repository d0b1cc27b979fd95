"""PyTorch: batches that the parameter server hands out, to the ranks that have time."""

import numpy as np
import pytest
import torch
from ranks import Busy
from torch.utils.data import DataLoader, TensorDataset
from torch_nets import served

import hvkit
from hvkit.sync import parameter_server_client


def rows_in_batches(length=40, batch_size=2, **options):
    return DataLoader(TensorDataset(torch.arange(length)), batch_size, **options)


def train_on(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch[0].float()[:, None].expand(-1, 8) / 100).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{"shuffle": True}, {"num_workers": 1}])
def test_batches_go_to_the_ranks_that_have_time(options, tmp_path):
    busy = Busy(hvkit.broadcast(tmp_path), number=15)
    loader = hvkit.shard(rows_in_batches(**options), dynamic=True)
    model, optimizer = served(None)
    for epoch in range(2):
        mine = []
        for batch in loader:
            train_on(model, optimizer, batch)
            mine.append(batch[0].tolist())
            busy.take(epoch, len(mine))
        everyone = hvkit.allgather(mine)
        assert sorted(row for theirs in everyone for batch in theirs for row in batch) == [
            *range(40)
        ]
        assert len(everyone[0]) <= 20 - 15
    assert len(loader) == -(-20 // hvkit.size())


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_resumed_epoch_has_the_batches_that_no_rank_has_taken(drop_last, tmp_path):
    folder = hvkit.broadcast(tmp_path)

    def run(until=None, batch_size=2):
        whole = rows_in_batches(41, batch_size, shuffle=True, drop_last=drop_last)
        loader = hvkit.shard(whole, dynamic=True)
        model, optimizer = served(None)
        checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer, data=loader)
        checkpoint.restore()
        mine = []
        for step, batch in enumerate(loader, 1):
            train_on(model, optimizer, batch)
            mine += batch[0].tolist()
            if step == until:
                checkpoint.save(epoch=0, step=step)
                break
        return hvkit.allgather(mine)

    before, after = run(until=4), run(batch_size=5)
    rows = [row for theirs in before + after for row in theirs]
    rest = 41 - 8 * hvkit.size()
    assert len(rows) == len(set(rows)) == 41 - (rest % 5 if drop_last else 0)
    assert all(len(theirs) == 8 for theirs in before)


@pytest.mark.parametrize(
    ("data", "options", "kind", "text"),
    [
        (rows_in_batches(), {"exact": True}, ValueError, "choose one"),
        (rows_in_batches(), {"dynamic": 1}, TypeError, "dynamic must be True or False, got 1"),
        (np.zeros((4, 2)), {}, TypeError, "or a tf.data.Dataset, got numpy.ndarray"),
        (rows_in_batches(sampler=[3, 1]), {}, TypeError, "got the sampler list"),
        (DataLoader(range(4), batch_size=None), {}, TypeError, "needs a DataLoader with a batch"),
    ],
)
def test_data_and_options_that_cannot_be_handed_out_are_refused(data, options, kind, text):
    with pytest.raises(kind, match=text):
        hvkit.shard(data, **{"dynamic": True, **options})


def test_batches_are_handed_out_by_a_parameter_server_alone(monkeypatch):
    monkeypatch.setattr(parameter_server_client, "_client", None)
    loader = hvkit.shard(rows_in_batches(), dynamic=True)
    with pytest.raises(ValueError, match=r"pass strategy=hvkit\.ParameterServer"):
        next(iter(loader))


@pytest.mark.parametrize("all_look", [True, False])
def test_epochs_that_some_ranks_begin_alone_are_logged(all_look, capsys):
    loader = hvkit.shard(rows_in_batches(), dynamic=True)
    model, optimizer = served(None)
    if all_look or hvkit.rank() == 1:
        train_on(model, optimizer, next(iter(loader)))
    train_on(model, optimizer, next(iter(loader)))
    for _ in range(2):
        with hvkit.settled(model):
            pass
    logged = capsys.readouterr().err
    count = 0 if all_look or hvkit.rank() else 1
    assert logged.count("different numbers of epochs") == count
    assert logged.count("(rank 0: 1, rank 1: 2") == count
