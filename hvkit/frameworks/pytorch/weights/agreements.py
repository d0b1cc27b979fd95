"""Carries out what strategies need from the other ranks, also while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np
import torch

from hvkit.communication.exchanges import Mean, Messages, Neighbours, Place, by_rank, circle
from hvkit.compression import Compression
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.gradients.buckets import Bucket
from hvkit.frameworks.pytorch.gradients.compressed_buckets import CompressedBucket, CompressionState
from hvkit.frameworks.pytorch.weights.parameters import Parameters
from hvkit.strategies.strategy import Flow


class Agreements:
    """Agreements on the weights of one model; implements ``hvkit.sync.rounds.Agreements``.

    Args:
        parameters: of the model.
        compression: of float32 vectors, if there is one.
    """

    def __init__(self, parameters: Parameters, compression: Compression | None = None) -> None:
        self._wire = Wire("weights", parameters.group)
        self.place: Place = self._wire
        self._parameters = parameters
        self._sent = CompressionState(compression) if compression else None

    def start(
        self, flow: Flow[Any], values: torch.Tensor, numbers: list[int], name: str
    ) -> _Agreement:
        parameters = self._parameters.in_order
        members: list[tuple[int, torch.Tensor]] = [(i, parameters[i]) for i in numbers]

        def bucket(dtype: torch.dtype) -> Bucket:
            if self._sent and self._sent.suits(dtype):
                return CompressedBucket(name, members, self._sent)
            return Bucket(name, members)

        return _Agreement(flow, values, numbers, name, bucket, self._wire)

    def commit(self, numbers: Container[int]) -> None:
        if self._sent:
            self._sent.commit(numbers)

    def forget(self) -> None:
        if self._sent:
            self._sent.pending.clear()

    def clear(self) -> None:
        if self._sent:
            self._sent.kept.clear()

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return self._sent.arrays(self._sent.compression.common) if self._sent else {}

    def own_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return self._sent.arrays(self._sent.compression.own) if self._sent else {}

    def load(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        if self._sent:
            self._sent.load(arrays, self._parameters.in_order)


class _Agreement:
    """An agreement that has begun.

    Args:
        flow: the strategy's generator.
        values: of the weights, one after the other, as the flow has them.
        numbers: of the weights.
        name: the same on every rank, and no other agreement's that runs at the same time.
        bucket: makes one that carries a mean of vectors of some dtype.
        wire: counts the bytes.
    """

    def __init__(
        self,
        flow: Flow[Any],
        values: torch.Tensor,
        numbers: list[int],
        name: str,
        bucket: Callable[[torch.dtype], Bucket],
        wire: Wire,
    ) -> None:
        self.numbers = numbers
        self.values = values
        self._flow = flow
        self._name = name
        self._bucket = bucket
        self._wire = wire
        self._running = self._start(next(flow))

    def result(self) -> Any:
        while True:
            try:
                self._running = self._start(self._flow.send(self._running.result()))
            except StopIteration as end:
                return end.value

    def _start(self, exchange: Mean | Neighbours) -> _RunningMean | _RunningMessages:
        match exchange:
            case Mean(vector):
                return _RunningMean(vector, self._bucket(vector.dtype), self._wire)
            case Neighbours():
                return _RunningMessages(exchange, self._wire, self._name)


class _RunningMean:
    """A mean over ranks on its way."""

    def __init__(self, vector: torch.Tensor, bucket: Bucket, wire: Wire) -> None:
        self._bucket = bucket
        self._wire = wire
        bucket.flat.copy_(vector)
        bucket.launch(wire)

    def result(self) -> torch.Tensor:
        self._bucket.exchange(self._wire)
        self._bucket.wait(self._wire)
        return self._bucket.flat


class _RunningMessages:
    """Vectors of other ranks on their way."""

    def __init__(self, exchange: Neighbours, wire: Wire, name: str) -> None:
        self._wire = wire
        self._length = length = len(exchange.vector)
        to, self._sources = circle(exchange.offsets, wire)
        messages = Messages(
            exchange.vector.repeat(len(to)),
            by_rank(length, to, wire.size),
            by_rank(length, self._sources, wire.size),
        )
        self._handle = wire.start(messages, name)

    def result(self) -> list[torch.Tensor]:
        received = torch.split(self._wire.wait(self._handle), self._length)
        of = dict(zip(sorted(self._sources), received, strict=True))
        return [of[source] for source in self._sources]
