"""Messages between the ranks of a pipeline: tensors with their shapes, and a few numbers."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from keras import ops
from numpy.typing import NDArray

from hvkit import runtime
from hvkit.communication.mailboxes import open_mailbox
from hvkit.errors import HvkitError
from hvkit.frameworks.keras.backends import numpy_dtype
from hvkit.transport.mailbox import Mailbox, Sending
from hvkit.watch.calls import call, translated, waiting

# Bytes of the message with shapes.
_HEADER = 2048

_tags = itertools.count()


@functools.cache
def _mailbox() -> Mailbox:
    """One for all models; the first call is a collective of all ranks."""
    return open_mailbox("a pipeline of Keras models")


class StageLinks:
    """Sends between this rank and others of its pipeline, in order between any two.

    To create one is a collective of all ranks.

    Args:
        ranks: their numbers among all ranks, in the order of the pipeline.
        name: of the model; the same on every rank.

    Raises:
        LaunchError: a rank cannot send messages; on every rank, with the fix.
    """

    def __init__(self, ranks: Sequence[int], name: str) -> None:
        self.ranks, self.name = tuple(ranks), name
        self.rank = self.ranks.index(runtime.rank())
        self.step = 0
        self._mailbox = _mailbox()
        self._tag = next(_tags)
        self._sending: list[Sending] = []

    @contextmanager
    def in_call(self, what: str = "the model's forward or backward pass") -> Iterator[None]:
        """Surrounds a call that all ranks of the pipeline make, for messages about waits."""
        with call(what, self.step, self.name):
            yield

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Surrounds a wait for other ranks of the pipeline."""
        with translated(), waiting(self.ranks):
            yield

    def send(self, tensors: Sequence[Any], to: int) -> None:
        """Start to send tensors.

        Args:
            tensors: of any shapes; None stands for none.
            to: the rank along the pipeline.
        """
        arrays = [
            None if t is None else np.ascontiguousarray(ops.convert_to_numpy(t)) for t in tensors
        ]
        facts = [None if a is None else [list(a.shape), a.dtype.name] for a in arrays]
        self._send_header(facts, to)
        for a in arrays:
            if a is not None:
                self._start(a.reshape(-1).view(np.uint8), to)

    def _send_header(self, facts: Any, to: int) -> None:
        text = json.dumps(facts).encode()
        if len(text) > _HEADER:
            raise ValueError(f"a message of a stage has {len(text)} bytes of shapes: {facts}")
        self._start(np.frombuffer(text.ljust(_HEADER), np.uint8), to)

    def send_error(self, text: str, to: int) -> None:
        """Have a rank that waits for tensors of this one raise an error instead."""
        self._send_header(text[: _HEADER // 8], to)

    def _start(self, data: NDArray[Any], to: int) -> None:
        sending = self._mailbox.start_to_send(data, self.ranks[to], self._tag, "activations")
        self._sending.append(sending)

    def receive(self, source: int) -> list[Any]:
        """The tensors that a rank along the pipeline sends next.

        Raises:
            HvkitError: it could not compute them.
        """
        facts = json.loads(bytes(self._bytes_from(source, _HEADER)))
        if isinstance(facts, str):
            raise HvkitError(facts)
        return [None if each is None else self._tensor_from(source, *each) for each in facts]

    def _tensor_from(self, source: int, shape: list[int], name: str) -> Any:
        dtype = numpy_dtype(name)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return ops.convert_to_tensor(
            self._bytes_from(source, size).view(dtype).reshape(shape), name
        )

    def _bytes_from(self, source: int, size: int) -> NDArray[np.uint8]:
        data = np.empty(size, np.uint8)
        with self._waiting():
            self._mailbox.receive(data, self.ranks[source], self._tag)
        return data

    def flush(self) -> None:
        """Wait until all that was sent has gone."""
        with self._waiting():
            for each in self._sending:
                self._mailbox.finish(each)
        self._sending.clear()

    def from_rank(self, source: int, tensors: Sequence[Any] | None) -> list[Any]:
        """One rank's tensors on all ranks of the pipeline.

        Args:
            source: the rank along the pipeline that passes them.
            tensors: None on the others.
        """
        if tensors is None:
            return self.receive(source)
        for to in range(len(self.ranks)):
            if to != source:
                self.send(tensors, to)
        self.flush()
        return list(tensors)

    def gather(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """The numbers of all ranks of the pipeline, of shape ``(ranks, len(numbers))``.

        Args:
            numbers: as many, and of one dtype, on every rank.
        """
        rows = np.empty((len(self.ranks), *numbers.shape), numbers.dtype)
        rows[self.rank] = numbers
        others = [each for each in range(len(self.ranks)) if each != self.rank]
        for to in others:
            self._start(np.ascontiguousarray(numbers).view(np.uint8), to)
        for source in others:
            data = self._bytes_from(source, numbers.nbytes)
            rows[source] = data.view(numbers.dtype)
        self.flush()
        return rows
