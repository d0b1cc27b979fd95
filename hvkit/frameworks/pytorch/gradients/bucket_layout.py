"""Which gradients share a bucket, and where the report on a step travels.

Runs only when the parameters of a model have changed.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import torch

from hvkit.communication.exchanges import chunks
from hvkit.frameworks.pytorch.gradients.buckets import NO_PARAMETER, Bucket, Extra, wire_dtype
from hvkit.frameworks.pytorch.gradients.compressed_buckets import CompressedBucket
from hvkit.frameworks.pytorch.gradients.step_report import StepReport
from hvkit.sync.compression_state import CompressionState

Kind = tuple[list[torch.dtype], list[int], list[bool], list[bool], Set[int]]
"""What decides the layout: the parameters' dtypes, the indices of their devices, whether each is
contiguous and requires a gradient, and the indices of those whose gradients are row-sparse."""

# A device itself takes twice the time.
device_index = torch.Tensor.get_device
"""The index of a tensor's device; -1 for the host's memory."""

_LAYOUTS_KEPT = 4


class Layout(NamedTuple):
    """The buckets of a model whose parameters are of one kind.

    Attributes:
        kind: of the parameters.
        buckets: in the order in which backward fills them; the last has one name in all layouts,
            and every rank sends it, also if layouts differ.
        of: the bucket of each parameter that is in one, by the parameter's index.
        trained: indices of the parameters that require a gradient.
        report: numbers at the end of the last bucket, in the host's memory.
        statistics: numbers at the end of a bucket on the parameters' device.
        usual: what a rank reports that has all gradients, of which none is sparse.
        channels_last: indices of the parameters whose numbers lie in their bucket in that order.
        checksum: of those indices.
    """

    kind: Kind
    buckets: list[Bucket]
    of: dict[int, Bucket]
    trained: frozenset[int]
    report: Extra
    statistics: Extra
    usual: StepReport
    channels_last: frozenset[int]
    checksum: int


class Layouts:
    """The layouts of one model, for when its parameters change.

    Args:
        name: the same on every rank, and no other model's.
        compression: how float32 gradients travel; None for as they are.
    """

    def __init__(self, name: str, compression: CompressionState | None = None) -> None:
        self._name = name
        self._compression = compression
        self._known: list[Layout] = []
        self._made = itertools.count()

    def of(
        self, kind: Kind, parameters: Sequence[torch.Tensor], report: int, statistics: int
    ) -> Layout:
        """The layout for parameters of one kind; the same object each time.

        Args:
            kind: of the parameters as they are now.
            parameters: all parameters, in the same order on every rank.
            report: how many numbers the report on a step has.
            statistics: how many numbers of running statistics travel along.
        """
        for known in self._known:
            if known.kind == kind:
                return known
        # GANs freeze and thaw parameters in every step, which comes back to few layouts.
        del self._known[: -_LAYOUTS_KEPT + 1]
        layout = self._new(kind, parameters, report, statistics)
        self._known.append(layout)
        return layout

    def _new(
        self, kind: Kind, parameters: Sequence[torch.Tensor], report: int, statistics: int
    ) -> Layout:
        *_, sparse = kind
        trained = frozenset(i for i, p in enumerate(parameters) if p.requires_grad)
        dense = [(i, parameters[i]) for i in sorted(trained - sparse)]
        device = parameters[0].device
        buckets, at_report, at_statistics = make_buckets(
            f"{self._name}.{next(self._made)}",
            f"{self._name}.last",
            # The extra numbers need a bucket, too.
            dense or [(NO_PARAMETER, torch.zeros(1, device=device))],
            report,
            statistics,
            self._compression,
        )
        of = {i: bucket for bucket in buckets for i in bucket.indices if i != NO_PARAMETER}
        usual = StepReport(frozenset(of), frozenset(), frozenset(), trained)
        last = frozenset().union(*(bucket.channels_last for bucket in buckets))
        checksum = zlib.crc32(repr(sorted(last)).encode())
        return Layout(kind, buckets, of, trained, at_report, at_statistics, usual, last, checksum)


def make_buckets(
    name: str,
    last_name: str,
    members: Iterable[tuple[int, torch.Tensor]],
    report: int,
    statistics: int = 0,
    compression: CompressionState | None = None,
) -> tuple[list[Bucket], Extra, Extra]:
    """Make the buckets for some parameters, and say where the extra numbers lie.

    These follow the last gradients, if they travel in full precision in the host's memory. Else
    they have buckets of their own: the report must not wait for a GPU.

    Args:
        name: what the buckets' names begin with.
        last_name: the name of the last bucket.
        members: indices and parameters, at least one.
        report: how many numbers the report has.
        statistics: how many numbers of running statistics there are.
        compression: of float32 gradients.
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
    if together:
        last = Bucket(last_name, spread[-1], report + statistics)
        return [*buckets, last], Extra(last, slice(report)), Extra(last, slice(report, None))
    nobody = NO_PARAMETER, torch.zeros(1, device="cpu")
    if device.type == "cpu" or not statistics:
        last = Bucket(last_name, [nobody], report + statistics)
        return [*buckets, last], Extra(last, slice(report)), Extra(last, slice(report, None))
    like = nobody[1].to(device, wire_dtype(spread[-1][-1][1].dtype))
    there = Bucket(f"{name}.statistics", [(NO_PARAMETER, like)], statistics)
    last = Bucket(last_name, [nobody], report)
    return [*buckets, there, last], Extra(last, slice(report)), Extra(there, slice(statistics))


def _spread(members: Iterable[tuple[int, torch.Tensor]]) -> list[list[tuple[int, torch.Tensor]]]:
    """Divide numbered parameters into runs, one for each bucket.

    Backward reaches the parameters that were registered last first, so the runs begin there.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
    for i, p in reversed(list(members)):
        kinds.setdefault((wire_dtype(p.dtype), p.device), []).append((i, p))
    return [
        [group[position] for position in run]
        for group in kinds.values()
        for run in chunks(
            [p.numel() * p.element_size() for _, p in group],
            on_gpu=group[0][1].device.type != "cpu",
        )
    ]
