"""The tensors of both frameworks, and means over ranks that take turns in one process."""

from typing import NamedTuple

import numpy as np
import pytest

from hvkit.communication.exchanges import AllToAll, Gather, Mean, Messages


class Place(NamedTuple):
    """A rank's place among the ranks."""

    rank: int
    size: int


class Torch:
    """PyTorch's functions, and the way from and to NumPy."""

    def __init__(self):
        self.torch = pytest.importorskip("torch")
        from hvkit.frameworks.pytorch import ops

        self.ops, self.tensor_of, self.join = ops, self.torch.from_numpy, self.torch.cat

    def tensor(self, array):
        return self.tensor_of(np.array(array, np.float32))


class TensorFlow:
    """The same for TensorFlow."""

    def __init__(self):
        self.tf = pytest.importorskip("tensorflow")
        from hvkit.frameworks.keras.tensorflow import ops

        self.ops, self.tensor_of = ops, self.tf.constant

    def tensor(self, array):
        return self.tensor_of(np.array(array, np.float32))

    def join(self, parts):
        return self.tf.concat(parts, axis=0)


class Ranks:
    """Some ranks that average vectors, and keep what the compression keeps.

    Args:
        compression: what is tested.
        shapes: of the tensors in a vector.
        count: how many ranks.
        library: ``Torch()`` or ``TensorFlow()``.
    """

    def __init__(self, compression, shapes, count, library):
        self.compression, self.shapes, self.library = compression, shapes, library
        begun = [compression.begin(shape) for shape in shapes]
        self.states = [
            {name: [library.tensor(each[name]) for each in begun] for name in begun[0]}
            for _ in range(count)
        ]
        self.handed_over = []
        """By collective: the bytes that a rank has handed to it."""

    def mean(self, vectors):
        """What each rank gets for its vector of shape (n,)."""
        ranks, library = len(vectors), self.library
        flows = [
            self.compression.reduce(
                library.tensor(v), self.shapes, state, library.ops, Place(rank, ranks)
            )
            for rank, (v, state) in enumerate(zip(vectors, self.states, strict=True))
        ]
        results, ends = [None] * ranks, []
        while True:
            asked = []
            for flow, result in zip(flows, results, strict=True):
                try:
                    asked.append(flow.send(result))
                except StopIteration as end:
                    ends.append(end.value)
            if ends:
                break
            results = self._exchanged(asked)
        self.states = [state for _, state in ends]
        return [np.asarray(mean) for mean, _ in ends]

    def _exchanged(self, asked):
        join, ranks = self.library.join, len(asked)
        if isinstance(asked[0], Mean):
            self.handed_over.append(np.asarray(asked[0].vector).nbytes)
            return [sum(each.vector for each in asked) / ranks] * ranks
        self.handed_over.append(np.asarray(asked[0].rows).nbytes)
        if isinstance(asked[0], Gather):
            return [join([each.rows for each in asked])] * ranks
        if isinstance(asked[0], Messages):
            return self._delivered(asked)
        assert isinstance(asked[0], AllToAll)
        share = asked[0].rows.shape[0] // ranks
        return [
            join([each.rows[r * share : (r + 1) * share] for each in asked]) for r in range(ranks)
        ]

    def _delivered(self, asked):
        pieces = [np.split(np.asarray(each.rows), np.cumsum(each.sent)[:-1]) for each in asked]
        received = [[sent[to] for sent in pieces] for to in range(len(asked))]
        for each, rows in zip(asked, received, strict=True):
            assert each.received == tuple(map(len, rows))
        return [self.library.tensor_of(np.concatenate(rows)) for rows in received]

    def state(self, name):
        """One row for each rank: all that it keeps under a name."""
        return np.stack(
            [np.concatenate([np.asarray(t) for t in state[name]]) for state in self.states]
        )
