"""Carries out what strategies need of the other ranks, beside training if they allow it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import tensorflow as tf

from hvkit.adapters.keras.graph_collectives import CompressedMeans, GraphWait
from hvkit.adapters.keras.wire import Wire
from hvkit.engines import waiting_for_all_ranks
from hvkit.exchanges import Mean, Messages, Neighbours, by_rank, circle


class Network:
    """How vectors travel between ranks.

    Args:
        wait: counts the waits in graphs; None in a thread.
        wire: counts the bytes.
        compressed: for float32 vectors, if they travel compressed.
        keep: whether the round ends, so that what the compression keeps changes.
    """

    def __init__(
        self, wait: GraphWait | None, wire: Wire, compressed: CompressedMeans | None, keep: bool
    ) -> None:
        self._wait = wait
        self._wire = wire
        self._compressed = compressed
        self._keep = keep

    def carry_out(
        self, flow: Generator[Mean | Neighbours, Any, Any], variables: Sequence[Any], name: str
    ) -> Any:
        """Make all exchanges of a strategy, and return what it returns; a collective.

        Args:
            flow: the strategy's generator.
            variables: of its vectors, all of one dtype.
            name: the same on every rank, and no other collective's.
        """
        answer: Any = None
        while True:
            try:
                exchange = flow.send(answer)
            except StopIteration as end:
                return end.value
            match exchange:
                case Mean(vector):
                    answer = self._mean(vector, variables, name)
                case Neighbours():
                    answer = self._neighbours(exchange, name)

    def _mean(self, vector: tf.Tensor, variables: Sequence[Any], name: str) -> tf.Tensor:
        compressed = self._compressed
        if compressed and compressed.suits(vector.dtype):
            return self._around(
                vector, lambda v: compressed.mean(v, variables, name, keep=self._keep)
            )
        return self._around(vector, lambda v: self._wire.mean(v, name))

    def _neighbours(self, exchange: Neighbours, name: str) -> list[tf.Tensor]:
        to, sources = circle(exchange.offsets, self._wire)
        length = exchange.vector.shape[0]
        messages = Messages(
            tf.tile(exchange.vector, [len(to)]),
            by_rank(length, to, self._wire.size),
            by_rank(length, sources, self._wire.size),
        )
        received = self._around(
            messages.rows, lambda _: self._wire.exchange(messages, f"{name}.exchange")
        )
        of = dict(zip(sorted(sources), tf.split(received, len(sources)), strict=True))
        return [of[source] for source in sources]

    def _around(self, sent: tf.Tensor, collective: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        return self._wait.around(sent, collective) if self._wait else collective(sent)


class Thread:
    """Runs a function that waits for other ranks while this one trains.

    Args:
        function: without arguments.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        # A daemon: it must not hold up a rank that ends because another one has.
        self._thread = threading.Thread(target=self._run, name="hvkit-agreement", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with tf.device("CPU:0"):
                self._result = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """Wait for the function; return what it returns, or raise what it raises."""
        with waiting_for_all_ranks():
            self._thread.join()
            if self._error is not None:
                raise self._error
        return self._result
