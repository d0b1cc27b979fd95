"""Messages between the ranks of a pipeline, how long a rank waits for them, and equal batches."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvkit.errors import HvkitError, RanksDisagreeError, ranks_text
from hvkit.watch.calls import call, translated, waiting, working
from hvkit.watch.spans import PASS, mark, observers

# Bytes of the message that describes tensors before they come.
_HEADER = 8192

# How many passes of all models are running.
_running = 0


@dataclass(frozen=True)
class TensorSpec:
    """Describes a tensor before it arrives.

    Attributes:
        shape: of the tensor.
        dtype: the framework's own; None if there is no tensor, as where Keras has no mask.
        requires_grad: whether a gradient comes back.
    """

    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool = False


NO_TENSOR = TensorSpec((), None)


class StageTimes:
    """How long a rank computes its stages, by the clock of the host, which runs ahead of a GPU.

    Attributes:
        computed: seconds in which the rank computed its stages.
        passed: seconds of the rank's forward and backward passes.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start anew, also within a pass."""
        self.computed = self.passed = 0.0
        self._since = time.monotonic()

    @property
    def bubble(self) -> float:
        """The share of its passes in which the rank did not compute: from 0 to 1."""
        return 1 - self.computed / self.passed if self.passed else 0.0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Surrounds a forward or backward pass."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self.passed += time.monotonic() - self._since

    @contextmanager
    def computing(self, what: str, microbatch: int, stage: int) -> Iterator[None]:
        """Surrounds the work of a stage on a micro-batch, which is a span of a timeline.

        Args:
            what: ``forward``, ``backward``, or a part of them.
            microbatch: its number in the batch, from 0.
            stage: its number in the model, from 0.
        """
        with working():
            begun = time.monotonic()
            yield
            ended = time.monotonic()
        self.computed += ended - begun
        if observers:
            mark(f"{what} {microbatch} of stage {stage}", begun, ended)


class Channel(ABC):
    """Sends between this rank and others of its pipeline; each pair of ranks keeps the order.

    A framework says in the abstract methods how a tensor travels.

    Args:
        ranks: their numbers among all ranks, in the order of the pipeline.
        rank: this rank's number among all ranks.
        name: of the model; the same on every rank.

    Attributes:
        rank: this rank's number along the pipeline; all methods number ranks in this way.
        step: the number of the pass.
        times: how long this rank computes in its passes.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str) -> None:
        self.ranks, self.name = tuple(ranks), name
        self.rank = self.ranks.index(rank)
        self.step, self.times = 0, StageTimes()
        self._known: dict[Hashable, list[TensorSpec]] = {}
        # These functions wait until the messages have gone that were started.
        self._sending: list[Callable[[], object]] = []

    @abstractmethod
    def start(self, data: Any, to: int) -> Callable[[], object]:
        """Start to send a tensor or an array of bytes; return a function that waits for the end."""

    @abstractmethod
    def expect(self, spec: TensorSpec, source: int) -> Callable[[], Any]:
        """Start to receive a tensor; return a function that waits for it and returns it."""

    @abstractmethod
    def bytes_from(self, source: int, size: int) -> NDArray[np.uint8]:
        """Wait for bytes."""

    @abstractmethod
    def spec_of(self, tensor: Any) -> TensorSpec:
        """Describe a tensor for another rank."""

    def dtype_named(self, name: str) -> Any:
        """The framework's dtype with a name such as ``float32``."""
        return name

    def detached(self, tensors: list[Any]) -> list[Any]:
        """The outputs of a stage as inputs of the next one on the same rank."""
        return tensors

    @contextmanager
    def in_call(self, what: str = PASS) -> Iterator[None]:
        """Surrounds a pass, or another call of all ranks, whose name is in messages about waits."""
        global _running
        _running += 1
        try:
            with call(what, self.step, self.name):
                yield
        finally:
            _running -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surrounds a wait for other ranks of the pipeline."""
        with translated(), waiting(self.ranks):
            yield

    def send(
        self,
        tensors: Sequence[Any],
        to: int,
        specs: list[TensorSpec] | None = None,
        key: Hashable | None = None,
    ) -> None:
        """Start to send tensors.

        Args:
            tensors: None where there is no tensor.
            to: the rank along the pipeline.
            specs: describe the tensors; ``spec_of`` by default.
            key: the same on both ranks. Shapes are sent only once for a key; without a key they are
                sent each time.

        Raises:
            ValueError: the shapes are others than before with this key.
        """
        if specs is None:
            specs = [NO_TENSOR if t is None else self.spec_of(t) for t in tensors]
        known = specs if key is None else self._known.setdefault(("to", to, key), specs)
        if known is specs:
            self._send_header(list(map(_as_json, specs)), to)
        elif known != specs:
            raise ValueError(
                f"a stage has sent tensors like {known} and now like {specs} for inputs of the "
                "same shapes: in a pipeline the shapes of results may depend on the shapes of "
                "inputs only"
            )
        self.send_known(tensors, to)

    def send_known(self, tensors: Sequence[Any], to: int) -> None:
        """Start to send tensors whose shapes the other rank knows."""
        self._sending += [self.start(t, to) for t in tensors if t is not None]

    def send_error(self, text: str, to: int) -> None:
        """Let a rank that waits for a description of tensors raise an error instead."""
        self._send_header(text[: _HEADER // 8], to)

    def _send_header(self, content: Any, to: int) -> None:
        text = json.dumps(content).encode()
        if len(text) > _HEADER:
            raise ValueError(
                f"a stage passes {len(content)} tensors on, more than a pipeline can describe"
            )
        self._sending.append(
            self.start(np.frombuffer(bytearray(text.ljust(_HEADER)), np.uint8), to)
        )

    def knows(self, source: int, key: Hashable | None) -> bool:
        """Whether the shapes of tensors with this key are known."""
        return ("from", source, key) in self._known

    def receive(
        self, source: int, key: Hashable | None = None
    ) -> tuple[list[TensorSpec], Callable[[], list[Any]]]:
        """Start to receive what ``send`` sends; wait for shapes that are not known.

        Returns:
            What describes the tensors, and a function that waits for them.

        Raises:
            HvkitError: the other rank could not compute them.
        """
        if self.knows(source, key):
            specs = self._known["from", source, key]
        else:
            with self.waiting():
                content = json.loads(bytes(self.bytes_from(source, _HEADER)))
            if isinstance(content, str):
                raise HvkitError(content)
            specs = [self._spec(*each) for each in content]
            if key is not None:
                self._known["from", source, key] = specs
        return specs, self.receive_known(specs, source)

    def _spec(self, shape: list[int], dtype: str, requires_grad: bool) -> TensorSpec:
        own = None if dtype == "None" else self.dtype_named(dtype)
        return TensorSpec(tuple(shape), own, requires_grad)

    def receive_known(self, specs: Sequence[TensorSpec], source: int) -> Callable[[], list[Any]]:
        """Start to receive tensors of known shapes; return a function that waits for them."""
        arriving = [None if each.dtype is None else self.expect(each, source) for each in specs]

        def wait() -> list[Any]:
            with self.waiting():
                return [each and each() for each in arriving]

        return wait

    def flush(self) -> None:
        """Wait until all messages of this rank have left."""
        with self.waiting():
            for wait in self._sending:
                wait()
        self._sending.clear()

    def from_rank(self, source: int, tensors: Sequence[Any] = ()) -> list[Any]:
        """Copy one rank's tensors, or None, to all ranks of the pipeline.

        Raises:
            HvkitError: that rank could not compute them.
        """
        if self.rank != source:
            return self.receive(source)[1]()
        for to in self._others():
            self.send(tensors, to)
        self.flush()
        return list(tensors)

    def gather_numbers(self, numbers: Sequence[float] | NDArray[Any]) -> NDArray[Any]:
        """Gather numbers of one dtype from all ranks, in shape ``(ranks, len(numbers))``."""
        own = np.ascontiguousarray(numbers)
        rows = np.empty((len(self.ranks), *own.shape), own.dtype)
        rows[self.rank] = own
        for to in self._others():
            self._sending.append(self.start(own.view(np.uint8), to))
        with self.waiting():
            for source in self._others():
                rows[source] = self.bytes_from(source, own.nbytes).view(own.dtype)
        self.flush()
        return rows

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.ranks)) if rank != self.rank]


def in_pass() -> bool:
    """Whether a forward or backward pass through stages is running."""
    return _running > 0


def _as_json(spec: TensorSpec) -> list[Any]:
    return [spec.shape, str(spec.dtype).rpartition(".")[2], spec.requires_grad]


def refuse_other_batches(
    step: int, calls: Mapping[int, int], batches: Mapping[int, int], divide: str
) -> None:
    """Raise unless ranks that train one model make the same call with the same batch.

    Args:
        step: the number of the forward pass.
        calls: by rank, a checksum of the call, without values of tensors.
        batches: by rank, a checksum of the values.
        divide: how to divide data, for the error.

    Raises:
        RanksDisagreeError: names the first rank that differs.
    """
    for found, what in ((calls, "makes another call"), (batches, "gets another batch")):
        ranks = list(found)
        for rank in ranks:
            if found[rank] != found[ranks[0]]:
                raise RanksDisagreeError(
                    f"forward pass {step} of {ranks_text(ranks)}, which train one model together: "
                    f"rank {rank} {what} than rank {ranks[0]}. They must get the same batches in "
                    f"the same order: divide data with {divide}"
                )
