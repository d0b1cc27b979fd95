"""GPipe's order and messages, with stages that multiply a number, on ranks that are threads."""

import queue
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvkit.errors import HvkitError
from hvkit.pipeline.gpipe import GPipe
from hvkit.pipeline.messages import Channel, TensorSpec

PARTS = [1.0, 2.0, 3.0]


class InMemory(Channel):
    """Sends arrays between threads."""

    def __init__(self, rank, ranks, queues):
        super().__init__(range(ranks), rank, "model")
        self.queues, self.sent = queues, []

    def start(self, data, to):
        self.queues[self.rank, to].put(data)
        self.sent.append(len(data))
        return lambda: None

    def expect(self, spec, source):
        return lambda: self.queues[source, self.rank].get(timeout=5)

    def bytes_from(self, source, size):
        return self.queues[source, self.rank].get(timeout=5)

    def spec_of(self, tensor):
        return TensorSpec(tensor.shape, str(tensor.dtype))


class Doubling:
    """Each stage doubles what it gets; a gradient is the one that it gets, doubled."""

    def __init__(self, fails_at=()):
        self.fails_at, self.order, self.results, self.backs = fails_at, [], {}, {}

    def run(self, stage, part, specs, tensors):
        self.order.append((stage, part))
        if (stage, part) == self.fails_at:
            raise ValueError("no such layer")
        found = 2 * tensors[0] if tensors else np.array([PARTS[part]])
        self.results[stage, part] = float(found[0])
        return [TensorSpec(found.shape, "float64", requires_grad=True)], [found]

    def grad(self, stage, part, gradients):
        self.order.append((stage, part))
        self.backs[stage, part] = float(gradients[0][0])
        return [2 * gradients[0]] if stage else []


def on_ranks(ranks, run):
    queues = {(a, b): queue.Queue() for a in range(ranks) for b in range(ranks)}
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: run(InMemory(rank, ranks, queues)), range(ranks)))


@pytest.mark.parametrize("rank_of", [(0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1), (0,)])
def test_all_micro_batches_go_forward_through_all_stages_and_then_backward(rank_of):
    def run(channel):
        for keys in ([None] * 3, ["a", "a", "b"]):
            work, order = Doubling(), GPipe(channel, rank_of, keys)
            order.forward(work)
            order.backward(work, [[np.array([part])] for part in PARTS])
        return work

    own = on_ranks(max(rank_of) + 1, run)
    for stage, rank in enumerate(rank_of):
        for part, value in enumerate(PARTS):
            assert own[rank].results[stage, part] == value * 2**stage
            assert own[rank].backs[stage, part] == value * 2 ** (len(rank_of) - 1 - stage)
    stages = [s for s, rank in enumerate(rank_of) if rank == 0]
    assert own[0].order == [(s, p) for s in [*stages, *reversed(stages)] for p in range(3)]


def test_shapes_are_sent_once_for_each_key():
    def run(channel):
        for _ in range(2):
            GPipe(channel, (0, 1), ["a", "a", "b"]).forward(Doubling())
        return channel.sent

    first, _ = on_ranks(2, run)
    assert [n for n in first if n > 1] == [8192] * 2
    assert len(first) == 8


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_in_one_stage_reaches_all_ranks(stage):
    def run(channel):
        for fails_at in ((stage, 1), ()):  # and leaves nothing behind
            work = Doubling(fails_at)
            try:
                GPipe(channel, (0, 1, 2), [None] * 3).forward(work)
                found = channel.from_rank(2, [np.array([work.results.get((2, 0))])])
            except (HvkitError, ValueError) as error:
                text = type(error), str(error)
        return text, float(found[0][0])

    for rank, (error, value) in enumerate(on_ranks(3, run)):
        kind, text = error
        assert kind is (ValueError if rank == stage else HvkitError)
        assert "no such layer" in text
        assert value == 4 * PARTS[0]


def test_numbers_of_all_ranks():
    found = on_ranks(3, lambda channel: channel.gather_numbers([channel.rank, 7]).tolist())
    assert found == [[[0, 7], [1, 7], [2, 7]]] * 3


def test_a_second_backward_is_an_error():
    work, order = Doubling(), GPipe(InMemory(0, 1, {}), (0,), [None] * 3)
    order.forward(work)
    order.require_first_backward()
    order.backward(work, [[np.array([part])] for part in PARTS])
    with pytest.raises(RuntimeError, match="a second time"):
        order.require_first_backward()
