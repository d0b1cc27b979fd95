"""Carries out what strategies need from the other ranks, beside training if they allow it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from hvkit.communication.exchanges import Mean, Messages, Neighbours, by_rank, circle
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.gradients.buckets import Bucket
from hvkit.frameworks.pytorch.gradients.compressed_buckets import CompressedBucket, CompressionState


class Agreement:
    """An agreement that has begun on some weights of one dtype.

    Args:
        flow: the strategy's generator.
        weights: this rank's, one after the other, as the flow has them.
        members: numbers and parameters of the weights.
        name: the same on every rank, and no other agreement's that runs at the same time.
        wire: counts the bytes.
        sent: of the compression of float32 vectors, if there is one.

    Attributes:
        numbers: of the parameters.
        weights: as given.
    """

    def __init__(
        self,
        flow: Generator[Mean | Neighbours, Any, Any],
        weights: torch.Tensor,
        members: Sequence[tuple[int, torch.Tensor]],
        name: str,
        wire: Wire,
        sent: CompressionState | None,
    ) -> None:
        self.numbers = [number for number, _ in members]
        self.weights = weights
        self._flow = flow
        self._wire = wire
        self._name = name
        self._members = members
        self._sent = sent
        self._running = self._start(next(flow))

    def result(self) -> Any:
        """Wait for the other ranks, and return what the strategy returns."""
        while True:
            try:
                self._running = self._start(self._flow.send(self._running.result()))
            except StopIteration as end:
                return end.value

    def _start(self, exchange: Mean | Neighbours) -> _RunningMean | _RunningMessages:
        match exchange:
            case Mean(vector):
                if self._sent and self._sent.suits(vector.dtype):
                    bucket: Bucket = CompressedBucket(self._name, self._members, self._sent)
                else:
                    bucket = Bucket(self._name, self._members)
                return _RunningMean(vector, bucket, self._wire)
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
