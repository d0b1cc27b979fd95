"""A rank sends its own state to rank 0 only, even if it is large."""

import keras
import numpy as np
import pytest
import torch

import hvkit
from hvkit import runtime
from hvkit.checkpoint import Checkpoint
from hvkit.communication import engines, point_to_point

WIDTH = 50_000
STATISTICS = 4 * WIDTH


def pytorch():
    model = torch.nn.BatchNorm1d(WIDTH)
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), 0.1), batch_norm="local")
    model.running_mean.fill_(hvkit.rank())
    return model, lambda: model.running_mean.numpy()


def tensorflow():
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.BatchNormalization()])
    hvkit.distribute(model, keras.optimizers.SGD(0.1), batch_norm="local")
    layer = model.layers[0]
    layer.moving_mean.assign(np.full(WIDTH, hvkit.rank(), np.float32))
    return model, lambda: layer.moving_mean.numpy()


@pytest.mark.parametrize("make", [pytorch, tensorflow])
@pytest.mark.parametrize("by_mpi", [True, False])
def test_the_ranks_states_reach_rank_0_alone_in_pieces(folder, monkeypatch, make, by_mpi):
    model, statistics = make()
    checkpoint = Checkpoint(folder, model=model)
    engine, gathered, pieces = runtime.any_engine(), [], []
    allgather, broadcast, receive = engine.allgather, engine.broadcast, point_to_point.receive

    def recorded(into, call, of):
        def recorded_call(*arguments):
            result = call(*arguments)
            into.append(of(arguments, result))
            return result

        return recorded_call

    def size(arguments, result):
        return result.size

    for limit in "CHUNK", "PIECE":
        monkeypatch.setattr(engines, limit, 50_000)
    monkeypatch.setattr(engine, "allgather", recorded(gathered, allgather, size))
    monkeypatch.setattr(engine, "broadcast", recorded(pieces, broadcast, size))
    monkeypatch.setattr(
        point_to_point, "receive", recorded(pieces, receive, lambda a, _: a[0].size)
    )
    if not by_mpi:
        monkeypatch.setattr(point_to_point, "can_send", lambda engine: False)
    checkpoint.save(epoch=0, step=1)
    monkeypatch.undo()

    assert sum(gathered) < STATISTICS / 10
    assert max(pieces) <= 50_000
    if by_mpi and hvkit.rank() > 0:
        assert sum(pieces) < STATISTICS / 10
    else:
        assert sum(pieces) > STATISTICS * (hvkit.size() - 1)

    model, statistics = make()
    Checkpoint(folder, model=model).restore()
    assert statistics().tolist() == [hvkit.rank()] * WIDTH
