"""PyTorch: ``hvkit.settled`` shows the agreed weights in the middle of a round."""

import gc

import numpy as np
import pytest
import torch
from ranks import identical, largest_difference
from torch_nets import (
    alike,
    backward,
    distributed,
    in_rounds,
    local,
    mlp,
    regression,
    train,
    weights,
)

import hvkit
from hvkit.communication.exchanges import Messages, by_rank
from hvkit.frameworks.pytorch.wire import Wire


def test_settled_holds_the_agreed_weights_and_leaves_no_trace():
    data = local(regression(steps=8))
    undisturbed, optimizer = in_rounds(hvkit.LocalSGD(5))
    train(undisturbed, optimizer, data)

    model, optimizer = in_rounds(hvkit.LocalSGD(5))
    train(model, optimizer, data[:3])
    own = weights(model)
    mean = [np.mean(each, axis=0) for each in zip(*hvkit.allgather(own), strict=True)]
    with hvkit.settled(model):
        assert alike(model)
        assert largest_difference(weights(model), mean) < 1e-6
        with hvkit.settled(model):
            assert alike(model)
        assert alike(model)
    assert identical(weights(model), own)
    train(model, optimizer, data[3:])
    assert identical(weights(model), weights(undisturbed))


@pytest.mark.parametrize("compression", ["none", "bf16", "int8", hvkit.TopK(0.5)])
def test_settled_in_inference_mode(compression):
    model, optimizer = in_rounds(hvkit.LocalSGD(4), compression=compression)
    train(model, optimizer, local(regression(steps=6)))
    with torch.inference_mode(), hvkit.settled(model):
        assert alike(model)
    train(model, optimizer, local(regression(steps=2)))
    assert alike(model)


def test_ranks_send_each_other_messages_in_inference_mode():
    rank, size = hvkit.rank(), hvkit.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    with torch.inference_mode():
        rows = torch.full((2, 3), float(rank))
        sent, received = by_rank(2, [after], size), by_rank(2, [before], size)
        exchange = Wire("weights").start(Messages(rows, sent, received), "messages")
        assert exchange().tolist() == [[before] * 3] * 2


def test_settled_is_for_any_model():
    plain, (averaged, _) = mlp(), distributed()
    before = [*weights(plain), *weights(averaged)]
    with hvkit.settled(plain, averaged):
        pass
    assert identical([*weights(plain), *weights(averaged)], before)


def test_settled_between_forward_and_backward():
    model, optimizer = in_rounds(hvkit.LocalSGD(4))
    data = local(regression(steps=2))
    train(model, optimizer, data[:1])
    model.zero_grad()
    backward(model, data[1])
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    loss = torch.nn.functional.mse_loss(model(data[1][0]), data[1][1])
    with hvkit.settled(model):
        pass
    loss.backward()
    assert torch.equal(model[0].weight.grad, expected)


def test_settled_after_the_optimizer_is_gone():
    model, optimizer = in_rounds(hvkit.LocalSGD(4))
    train(model, optimizer, local(regression(steps=2)))
    del optimizer
    gc.collect()
    assert not alike(model)
    with hvkit.settled(model):
        assert alike(model)
