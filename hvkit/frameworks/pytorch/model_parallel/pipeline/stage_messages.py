"""Messages between the ranks of a pipeline: tensors, with their shapes the first time."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hvkit.frameworks.pytorch.model_parallel.pipeline.stage_times import StageTimes
from hvkit.transport.traffic import count
from hvkit.watch.calls import call, translated, waiting
from hvkit.watch.spans import PASS

# Passes of all models that are under way.
_under_way = 0

# Bytes of the message with shapes.
_HEADER = 8192


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it arrives.

    Attributes:
        shape: of it.
        dtype: of it.
        trained: whether a gradient comes back for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @classmethod
    def of(cls, t: torch.Tensor) -> TensorSpec:
        """Of a tensor."""
        return cls(tuple(t.shape), t.dtype, t.requires_grad)

    @property
    def nbytes(self) -> int:
        """Of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """A tensor like it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Arriving:
    """Tensors that another rank sends."""

    def __init__(self, tensors: list[torch.Tensor], works: list[Any], link: StageLinks) -> None:
        self._tensors, self._works, self._link = tensors, works, link

    def wait(self) -> list[torch.Tensor]:
        """Return them when they are there."""
        with self._link.waiting():
            for work in self._works:
                work.wait()
        self._works = []
        return [t.to(self._link.device) for t in self._tensors]


class StageLinks:
    """Sends between this rank and others of its pipeline; each pair in the order of sending.

    Args:
        group: the ranks of the pipeline.
        ranks: their numbers among all ranks, in the order of the pipeline.
        device: on which tensors arrive.
        name: of the model; the same on every rank.
        through_host: whether tensors of a GPU travel through the host's memory.

    Attributes:
        step: the number of the pass.
        times: of the passes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        device: torch.device,
        name: str,
        *,
        through_host: bool = False,
    ) -> None:
        self.group, self.ranks, self.device, self.name = group, tuple(ranks), device, name
        self._carrier = torch.device("cpu") if through_host else device
        self.step, self.times = 0, StageTimes()
        self._known: dict[Hashable, list[TensorSpec]] = {}
        # What was sent must stay in memory until it is there.
        self._sending: list[tuple[Any, torch.Tensor]] = []

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Surrounds a forward or backward pass, for messages about waits."""
        global _under_way
        _under_way += 1
        try:
            with call(PASS, self.step, self.name):
                yield
        finally:
            _under_way -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surrounds a wait for other ranks of the pipeline."""
        with translated(), waiting(self.ranks):
            yield

    def send(self, tensors: Sequence[torch.Tensor], to: int, key: Hashable) -> None:
        """Start to send the results of a stage.

        Args:
            tensors: with as many, and with the shapes, that were sent with this key before.
            to: the rank along the pipeline.
            key: what the shapes depend on; the same on both ranks.

        Raises:
            ValueError: they have other shapes, although the model's inputs have the same.
        """
        specs = [TensorSpec.of(t) for t in tensors]
        known = self._known.setdefault(("to", to, key), specs)
        if known is specs:
            self._start(_encoded(specs), to)
        elif known != specs:
            raise ValueError(
                f"a stage has sent tensors like {known} and now like {specs} for inputs of the "
                "same shapes: in a pipeline the shapes of results may depend on the shapes of "
                "inputs only"
            )
        self.send_plain(tensors, to)

    def send_plain(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        """Start to send tensors whose shapes the other rank knows."""
        for t in tensors:
            count("activations", t.numel() * t.element_size())
            self._start(t.detach().to(self._carrier).contiguous(), to)

    def _start(self, t: torch.Tensor, to: int) -> None:
        self._sending.append((dist.isend(t, self.ranks[to], group=self.group), t))

    def knows(self, source: int, key: Hashable) -> bool:
        """Whether the shapes of what comes with this key are known."""
        return ("from", source, key) in self._known

    def receive(self, source: int, key: Hashable) -> tuple[list[TensorSpec], Arriving]:
        """Start to receive what ``send`` sends; wait for shapes the first time."""
        if not self.knows(source, key):
            header = torch.empty(_HEADER, dtype=torch.uint8)
            with self.waiting():
                dist.recv(header, self.ranks[source], group=self.group)
            self._known["from", source, key] = _decoded(header)
        specs = self._known["from", source, key]
        return specs, self.receive_plain(specs, source)

    def receive_plain(self, specs: Sequence[TensorSpec], source: int) -> Arriving:
        """Start to receive tensors of known shapes."""
        tensors = [each.empty(self._carrier) for each in specs]
        start = functools.partial(dist.irecv, src=self.ranks[source], group=self.group)
        return Arriving(tensors, [start(t) for t in tensors], self)

    def flush(self) -> None:
        """Wait until all that was sent is on its way or there."""
        with self.waiting():
            for work, _ in self._sending:
                work.wait()
        self._sending.clear()

    def from_rank(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors of one rank of the pipeline to the others, in place."""
        with self.waiting():
            for t in tensors:
                if self.ranks[source] == dist.get_rank():
                    count("activations", t.numel() * t.element_size())
                dist.broadcast(t, self.ranks[source], group=self.group)

    def object_from_rank(self, source: int, thing: Any) -> Any:
        """One rank's object on all ranks of the pipeline."""
        box = [thing]
        with self.waiting():
            dist.broadcast_object_list(box, self.ranks[source], group=self.group)
        return box[0]

    def gather_numbers(self, numbers: Sequence[int]) -> torch.Tensor:
        """Numbers of all ranks, of shape ``(ranks, len(numbers))``."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in self.ranks]
        with self.waiting():
            dist.all_gather(everyone, mine, group=self.group)
        return torch.stack(everyone)


def in_pass() -> bool:
    """Whether a forward or backward pass through stages is under way."""
    return _under_way > 0


def _encoded(specs: Sequence[TensorSpec]) -> torch.Tensor:
    text = json.dumps([[each.shape, str(each.dtype), each.trained] for each in specs])
    if len(text) > _HEADER:
        raise ValueError(
            f"a stage passes {len(specs)} tensors to the next, more than a pipeline can describe"
        )
    return torch.frombuffer(bytearray(text.encode().ljust(_HEADER)), dtype=torch.uint8)


def _decoded(header: torch.Tensor) -> list[TensorSpec]:
    text = bytes(header.tolist()).decode()
    return [
        TensorSpec(tuple(shape), getattr(torch, dtype.removeprefix("torch.")), trained)
        for shape, dtype, trained in json.loads(text)
    ]
