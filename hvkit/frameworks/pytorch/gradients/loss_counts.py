"""Whether ranks' losses are means over different numbers: of tokens, weights or rows.

The mean over ranks of such means is not the mean of one process. At the root of each backward pass
autograd keeps the divisor of a loss. Ranks compare these divisors when they compare their weights,
since the values may have to come from a GPU. The shapes are at hand: a checksum of the numbers of
elements travels with each step, so ranks also compare in that of a shorter last batch.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray

from hvkit.main_rank import warn_once
from hvkit.runtime import Group

_MEAN, _SUM = 1, 2  # of ``reduction=``, as autograd keeps it

_BY_WEIGHT = ("NllLossBackward0", "NllLoss2DBackward0")
_BY_ELEMENT = (
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)
# Operations between losses and the root that keep the losses' values, or add some up.
_THROUGH = (
    *("Add", "Sub", "Neg", "ToCopy", "Clone", "Alias", "Squeeze", "Unsqueeze", "View", "Reshape"),
    *("Select", "Index", "Where", "MaskedFill", "NanToNum", "Clamp"),
)
_MOST_NODES = 64
# After so many comparisons of steps with other shapes, the script seems to intend them.
_MOST_COMPARISONS = 8

# Objects that look at the next pass. A set of weak references is faster to walk than a WeakSet.
_looking: set[ref[LossCounts]] = set()

# The factors and the divisor of a mean, and its number of elements. The first two are numbers, or
# tensors of one, perhaps on a GPU. The divisor is None for a further part of an earlier mean.
_Mean = tuple[Sequence[Any], Any, int]


class LossCounts:
    """The numbers of elements that the losses of one model's passes are means over."""

    def __init__(self) -> None:
        # Returns the weight of this rank's gradients in the mean over ranks; None for 1.
        self.rank_weight: Callable[[], float] | None = None
        self._comparisons = 0
        self._noted: list[_Mean] = []
        self._means: list[_Mean] = []
        self._ref = ref(self)

    def look(self, *, wanted: bool) -> None:
        """Look at the passes from now on, or only as long as shapes are of interest."""
        interested = wanted or self._comparisons < _MOST_COMPARISONS
        (_looking.add if interested else _looking.discard)(self._ref)

    def ignore_shapes(self) -> None:
        """Compare no steps because their losses have other shapes."""
        self._comparisons = _MOST_COMPARISONS

    def note(self, roots: Any) -> None:
        """Look at the tensors of which the script wants gradients."""
        self._noted = []
        loss = roots[0] if isinstance(roots, Sequence) and len(roots) == 1 else roots
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            with suppress(RuntimeError):  # a pass has freed it already
                self._noted = list(_Walk().means_below(loss.grad_fn))

    def keep(self) -> None:
        """Count the pass that was noted last: it was a pass of this model."""
        self._means += self._noted
        self._noted = []

    def begin(self) -> None:
        """Forget all passes: the next one is of another step."""
        self._means = []

    def checksum(self) -> int:
        """A number that differs if ranks' losses have other shapes, while that is of interest."""
        elements = sum(elements for *_, elements in self._means)
        if self._comparisons >= _MOST_COMPARISONS or not elements:
            return 0
        return zlib.crc32(str(elements).encode())

    def numbers(self) -> NDArray[np.float64]:
        """For comparison: the sum of the losses' divisors, 0 if none is known, and a weight.

        That of a loss is the contribution of one element. Logarithms are added up over the losses,
        so that no loss is hidden behind one that counts much more.
        """
        totals, weight = [0.0, 0.0], 0.0
        of_rank = 1.0 if self.rank_weight is None else self.rank_weight()
        for factors, count, _ in self._means:
            if count is None:
                continue
            factor, number = math.prod(map(_value, factors)), _value(count)
            # It may be the weight of a penalty, which has no count: any other count is surer.
            guessed = isinstance(count, _Count)
            if guessed and self.rank_weight is not None:
                continue
            if number > 0 and math.isfinite(factor):
                totals[guessed] += number
                weight += math.log(max(abs(factor * of_rank) / number, 1e-300))
        return np.array([totals[0] or totals[1], weight])

    def compare(
        self, by_rank: NDArray[np.float64], group: Group, *, for_shapes: bool = False
    ) -> None:
        """Warn, once, if an element counts more on one rank than on another.

        ``by_rank`` is of shape ``(ranks, 2)``. Ranks compare ``for_shapes`` if checksums differ.
        """
        self._comparisons += for_shapes
        counts, weights = by_rank.T
        other = int(np.abs(counts - counts[0]).argmax())
        alike = np.abs(weights - weights[0]).max() <= 1e-4  # not if one is NaN
        if not alike and counts[other] != counts[0] and counts.all():
            self.ignore_shapes()
            warn_once(
                "losses over other counts",
                f"the loss is a mean over {counts[0]:.6g} elements (or their weights) on rank "
                f"{group.members[0]}, and over {counts[other]:.6g} on rank {group.members[other]}: "
                "the mean of both is not that of one process. Compute the sum (reduction='sum') "
                "and what it is divided by, and write `loss = hvkit.mean(total, count)`",
                group,
            )


def note(roots: Any) -> None:
    """Look at the pass that begins, before it frees the values that autograd keeps."""
    for each in tuple(_looking):
        if (counts := each()) is None:
            _looking.discard(each)
        else:
            counts.note(roots)


class _Factor(NamedTuple):
    """A factor or divisor of a loss: a number, or a tensor perhaps on a GPU."""

    value: Any
    divides: bool
    counts: bool  # whether it may be the divisor that makes a sum below it a mean


class _Count(NamedTuple):
    """One divided by the factor of a sum, if that is a whole number."""

    factor: Any


class _Walk:
    """Walks from the root of a pass to the means that the loss is made of."""

    def __init__(self) -> None:
        self._left = _MOST_NODES
        # Sums that are added up, and then divided, are one mean.
        self._divided: dict[int, _Factor] = {}

    def means_below(self, node: Any, factors: tuple[_Factor, ...] = ()) -> Iterator[_Mean]:
        if node is None or not self._left:
            return
        self._left -= 1
        name = type(node).__name__
        if (mean := _mean_of(node)) is not None:
            yield factors, *mean
        elif name == "MeanBackward0":
            count = node._saved_self_sym_numel
            # In the mean of n losses, each loss counts n times less, and so do its parts.
            part = _Factor(count, divides=True, counts=False)
            below = self._below_each(node, (*factors, part, part) if count > 1 else factors)
            yield from below or [(factors, count, count)]
        elif name.startswith("Div"):
            below, *others = [below for below, _ in node.next_functions]
            if (divisor := _saved(node, "other")) is not None:
                counts = others in ([], [None]) or _is_sum(below)
                yield from self.means_below(below, (*factors, _Factor(divisor, True, counts)))
        elif name.startswith("Mul"):
            belows = [below for below, _ in node.next_functions]
            is_number = belows.count(None) >= len(belows) - 1
            for below, other in zip(belows, ("other", "self"), strict=False):
                if below is not None and (factor := _saved(node, other)) is not None:
                    further = _Factor(factor, False, is_number)
                    yield from self.means_below(below, (*factors, further))
        elif name.startswith(_THROUGH):
            for below, _ in reversed(node.next_functions):  # losses before the sum of earlier ones
                yield from self.means_below(below, factors)
        elif _is_sum(node):
            below = self._below_each(node, factors) if name == "SumBackward0" else []
            yield from below or self._sum(node, factors)

    def _below_each(self, node: Any, factors: tuple[_Factor, ...]) -> list[_Mean]:
        """The means in the single numbers that a node adds up; none if it adds up others."""
        below, count = node.next_functions[0][0], _elements(node)
        single = [below]
        if type(below).__name__ in ("StackBackward0", "CatBackward0"):
            single = [each for each, _ in below.next_functions]
        if len(single) != count:
            return []
        return [mean for each in single for mean in self.means_below(each, factors)]

    def _sum(self, node: Any, factors: tuple[_Factor, ...]) -> Iterator[_Mean]:
        """The mean that a sum becomes with the innermost factor that may be its count."""
        counts = [each for each in factors if each.counts]
        if not counts:
            return
        chosen = next((each for each in reversed(counts) if each.divides), counts[-1])
        others = tuple(each for each in factors if each is not chosen)
        count = chosen.value if chosen.divides else _Count(chosen)
        yield others, None if id(chosen) in self._divided else count, _elements(node)
        self._divided[id(chosen)] = chosen


def _mean_of(node: Any) -> tuple[Any, int] | None:
    """Count and elements of a loss that PyTorch computes as a mean; None for other nodes."""
    name = type(node).__name__
    by_weight = name in _BY_WEIGHT
    if not (by_weight or name in _BY_ELEMENT) or node._saved_reduction != _MEAN:
        return None
    # Targets have as many elements as losses.
    if (target := _saved(node, "target")) is None:
        return None if by_weight else (_elements(node), _elements(node))
    return (node._saved_total_weight if by_weight else target.numel()), target.numel()


def _saved(node: Any, name: str) -> Any:
    """A value that autograd keeps for a node; 1 if it keeps none.

    None if a hook returns the value: a checkpoint's hook would run a part of the forward again.
    """
    raw = getattr(node, "_raw_saved_" + name, None)
    if raw is not None and raw.unpack_hook is not None:
        return None
    return getattr(node, "_saved_" + name, 1)


def _is_sum(node: Any) -> bool:
    name = type(node).__name__
    return name == "SumBackward0" or getattr(node, "_saved_reduction", None) == _SUM


def _elements(node: Any) -> int:
    """How many numbers a node has got; 0 if that is not known."""
    below, index = node.next_functions[0]
    shapes = getattr(below, "_input_metadata", ())
    return math.prod(shapes[index].shape) if index < len(shapes) else 0


def _value(number: Any) -> float:
    """A number that autograd keeps; 1 if it keeps none."""
    if isinstance(number, _Factor):
        value = _value(number.value)
        return value if not number.divides else 1 / value if value else math.inf
    if isinstance(number, _Count):
        value = _value(number.factor)
        count = 1 / value if value > 0 else math.inf
        return count if math.isfinite(count) and abs(count - round(count)) < 1e-4 * count else 0.0
    if isinstance(number, torch.Tensor):
        real = number.numel() == 1 and not number.is_complex()
        return float(number.detach()) if real else 1.0
    return float(number) if isinstance(number, int | float) else 1.0
