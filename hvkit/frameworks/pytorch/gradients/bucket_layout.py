"""Which gradients share a bucket, which are compressed, and where the report on a step travels.

A layout is made only when the parameters of a model have changed.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hvkit.communication.exchanges import RunningExchanges, chunks
from hvkit.frameworks.pytorch.gradients.buckets import NO_PARAMETER, Bucket, Extra
from hvkit.frameworks.pytorch.gradients.gradient_lists import lists
from hvkit.frameworks.pytorch.wire import Wire, wire_dtype
from hvkit.sync.compression_state import CompressionState

Properties = tuple[Any, Set[int]]
"""The parameter properties that determine the layout: see ``Layouts.arrange``."""


_LAYOUTS_KEPT = 4


# How to average only once in a step, by the call that averages.
_FIXES = {
    "backward()": (
        "pass accumulate=, the number of backward passes before each step, to hvkit.distribute, "
        "and do not skip steps; where gradients pass through one model to train another, as in a "
        "GAN, set requires_grad_(False) on the first"
    ),
    "hvkit.reduce_gradients()": (
        "pass accumulate= one more than the backward passes of a step to hvkit.distribute, so that "
        "only this call averages"
    ),
}


def refuse_another_mean(state: CompressionState, call: str) -> None:
    """Raise if a residual counts for a mean that no update has used."""
    if state.compression.keeps_state and state.pending:
        raise ValueError(
            f"{call} again before optimizer.step(): {state.compression} has already averaged the "
            "gradients of this step, and keeps what it has not sent for the next one: "
            f"{_FIXES[call]}"
        )


class CompressedBucket(Bucket):
    """A bucket of float32 gradients that travel compressed, with the model's state of it."""

    _keeps_formats = False

    def __init__(
        self, name: str, members: Sequence[tuple[int, torch.Tensor]], state: CompressionState
    ) -> None:
        super().__init__(name, members)
        self._large = False  # a compression gets the gradients as they are
        self._state = state
        self._running: RunningExchanges[torch.Tensor]

    def launch(self, wire: Wire) -> None:
        self.left.value = 0
        flow = self._state.reduce(self.indices, self._shapes, self.flat)
        self._running = RunningExchanges(wire.start, flow, self.name)
        self.handle = self._running.waiting

    def exchange(self, wire: Wire) -> None:
        self._running.next()
        self.handle = self._running.waiting

    def wait(self, wire: Wire) -> None:
        self.flat.copy_(self._running.result())
        del self._running  # which holds the mean
        self.handle = None


@dataclass(frozen=True)
class StepReport:
    """The gradients of one rank, or of any rank, in one reduction: indices of parameters."""

    dense: Set[int]
    sparse: Set[int]
    outdated: Set[int]  # some whose gradient changed after their bucket had been sent
    trained: Set[int]  # they require a gradient


class Layout(NamedTuple):
    """The buckets of a model in the order in which backward fills them.

    The last has one name in all layouts, and every rank sends it, also if layouts differ.
    """

    properties: Properties
    buckets: list[Bucket]
    bucket_of: dict[int, Bucket]  # by the parameter's index
    report: Extra  # at the end of the last bucket, in the host's memory
    statistics: Extra  # at the end of a bucket on the parameters' device
    usual: StepReport  # of a rank that has all gradients, none of them sparse
    channels_last: frozenset[int]  # indices of those whose numbers lie in that order
    checksum: int  # of these indices


class Layouts:
    """The layouts of one model; its list of parameters may grow."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[torch.nn.Parameter],
        compression: CompressionState | None,
        statistics: int,
    ) -> None:
        self.sparse: Set[int] = frozenset()  # indices of parameters with row-sparse gradients
        self._name, self._parameters = name, parameters
        self._compression, self._statistics = compression, statistics
        self._current: Layout | None = None
        self._known: list[Layout] = []
        self._made = itertools.count()

    @property
    def current(self) -> Layout:
        """The layout that ``arrange`` returned last."""
        assert self._current is not None
        return self._current

    def arrange(self, report: int) -> Layout:
        """The layout for the parameters as they are now; the last one if a bucket is in flight.

        It is the same object for parameters that are the same in everything that decides it.
        """
        parameters: Any = self._parameters
        properties = lists().properties(parameters), self.sparse
        if self._current:
            in_flight = any(bucket.handle is not None for bucket in self._current.buckets)
            if properties == self._current.properties or in_flight:
                return self._current
        for known in self._known:
            if known.properties == properties:
                self._current = known
                return known
        # GANs freeze and thaw parameters in every step, which comes back to few layouts.
        del self._known[: -_LAYOUTS_KEPT + 1]
        self._current = self._new(properties, report)
        self._known.append(self._current)
        return self._current

    def _new(self, properties: Properties, report: int) -> Layout:
        parameters = self._parameters
        trained = frozenset(i for i, p in enumerate(parameters) if p.requires_grad)
        dense = [(i, parameters[i]) for i in sorted(trained - self.sparse)]
        device = parameters[0].device
        buckets, at_report, statistics = make_buckets(
            f"{self._name}.{next(self._made)}",
            f"{self._name}.last",
            # The extra numbers need a bucket, too.
            dense or [(NO_PARAMETER, torch.zeros(1, device=device))],
            report,
            self._statistics,
            self._compression,
        )
        bucket_of = {i: bucket for bucket in buckets for i in bucket.indices if i != NO_PARAMETER}
        usual = StepReport(frozenset(bucket_of), frozenset(), frozenset(), trained)
        last = frozenset().union(*(bucket.channels_last for bucket in buckets))
        checksum = zlib.crc32(repr(sorted(last)).encode())
        return Layout(properties, buckets, bucket_of, at_report, statistics, usual, last, checksum)

    def report(self, outdated: Set[Bucket]) -> StepReport:
        """Which gradients this rank has; the same object as long as it has all dense ones."""
        layout = self.current
        complete = all(b.complete for b in layout.buckets if b.indices[0] != NO_PARAMETER)
        if complete and not outdated and not self.sparse & layout.usual.trained:
            return layout.usual
        gradients = {i: self._parameters[i].grad for i in layout.usual.trained}
        there = {i: g.is_sparse for i, g in gradients.items() if g is not None}
        return StepReport(
            dense=frozenset(i for i, sparse in there.items() if not sparse),
            sparse=frozenset(i for i, sparse in there.items() if sparse),
            outdated=frozenset(bucket.indices[0] for bucket in outdated) - {NO_PARAMETER},
            trained=layout.usual.trained,
        )

    def gradients_to_keep(self) -> set[int]:
        """Indices of parameters whose gradients must stay the same tensors; call before a pass."""
        if torch.is_grad_enabled():  # backward(create_graph=True): they carry their graph
            return set(range(len(self._parameters)))
        return set().union(*(bucket.kept() for bucket in self.current.buckets))


def make_buckets(
    name: str,
    last_name: str,
    members: Iterable[tuple[int, torch.Tensor]],
    report: int,
    statistics: int = 0,
    compression: CompressionState | None = None,
) -> tuple[list[Bucket], Extra, Extra]:
    """Make the buckets for some parameters, and say where the report and the statistics lie.

    These follow the last gradients, if they travel in full precision in the host's memory. Else
    they have separate buckets: the report must not wait for a GPU.
    """
    spread = _spread(members)
    device = spread[-1][-1][1].device
    together = compression is None and device.type == "cpu"
    buckets = [
        CompressedBucket(f"{name}.{b}", run, compression)
        if compression and compression.suits(wire_dtype(run[0][1].dtype))
        else Bucket(f"{name}.{b}", run)
        for b, run in enumerate(spread[:-1] if together else spread)
    ]
    extra_only = NO_PARAMETER, torch.zeros(1, device="cpu")
    if device.type == "cpu" or not statistics:
        last = Bucket(last_name, spread[-1] if together else [extra_only], report + statistics)
        return [*buckets, last], Extra(last, slice(report)), Extra(last, slice(report, None))
    like = extra_only[1].to(device, wire_dtype(spread[-1][-1][1].dtype))
    there = Bucket(f"{name}.statistics", [(NO_PARAMETER, like)], statistics)
    last = Bucket(last_name, [extra_only], report)
    return [*buckets, there, last], Extra(last, slice(report)), Extra(there, slice(statistics))


def _spread(members: Iterable[tuple[int, torch.Tensor]]) -> list[list[tuple[int, torch.Tensor]]]:
    """Divide parameters into runs, one for each bucket, in the order of backward."""
    by_dtype: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
    for i, p in reversed(list(members)):
        by_dtype.setdefault((wire_dtype(p.dtype), p.device), []).append((i, p))
    return [
        [group[position] for position in run]
        for group in by_dtype.values()
        for run in chunks([p.nbytes for _, p in group], on_gpu=group[0][1].device.type != "cpu")
    ]
