"""Whether ranks' losses are means over different numbers: of tokens, weights or rows.

The mean over ranks of such means is not the mean of one process. In the steps in which ranks
compare their weights, each looks at the root of its backward pass, where autograd keeps what a loss
has divided by. Other passes cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from hvkit.communication.group import Group
from hvkit.main_rank import warn_once

_MEAN, _SUM = 1, 2  # of ``reduction=``, as autograd keeps it

_BY_WEIGHT = ("NllLossBackward0", "NllLoss2DBackward0")
_BY_ELEMENT = (
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)
# What stands between losses and the root, and keeps their value or adds some up.
_THROUGH = ("Add", "Sub", "Neg", "ToCopy", "Clone", "Alias", "Squeeze", "View", "Reshape")
_MOST_NODES = 64

# Those that want to see the next pass.
_looking: WeakSet[LossCounts] = WeakSet()


class LossCounts:
    """What the losses of one model's pass are means over.

    Attributes:
        count: the sum of what each divides by; 0 if none is known.
        weight: how much of the loss one element makes, added up over the losses.
        own_weight: returns how often this rank's gradients count in the mean over ranks.
    """

    def __init__(self) -> None:
        self.count = self.weight = 0.0
        self.own_weight: Callable[[], float] = lambda: 1.0

    def look(self, *, wanted: bool) -> None:
        """Look at the passes from now on, or no longer."""
        (_looking.add if wanted else _looking.discard)(self)

    def note(self, roots: Any) -> None:
        """Look at the tensors of which the script wants gradients."""
        roots = [roots] if isinstance(roots, torch.Tensor) else roots
        self.count = self.weight = 0.0
        if not isinstance(roots, Sequence) or len(roots) != 1 or roots[0].numel() != 1:
            return
        try:
            means = list(_means_below(roots[0].grad_fn))
        except RuntimeError:  # a pass has freed it already
            return
        for factor, count in means:
            if count > 0 and math.isfinite(factor):
                self.count += count
                self.weight += factor / count

    def numbers(self) -> NDArray[np.float64]:
        """To be compared: the count and the weight."""
        return np.array([self.count, self.weight * self.own_weight()])


def looks() -> bool:
    """Whether any wants to see the pass that begins."""
    return bool(_looking)


def note(roots: Any) -> None:
    """Let those look that want to, before the pass frees what autograd keeps."""
    for each in list(_looking):
        each.note(roots)


def warn_of_other_counts(numbers: NDArray[np.float64], group: Group) -> None:
    """Warn, once, if an element counts more on one rank than on another.

    Args:
        numbers: of each rank, of shape ``(ranks, 2)``.
        group: the ranks.
    """
    counts, weights = numbers.T
    other = int(np.abs(counts - counts[0]).argmax())
    scale = np.abs(weights).max()
    alike = np.abs(weights - weights[0]).max() <= 1e-4 * scale
    if alike or counts[other] == counts[0] or not counts.all():
        return
    warn_once(
        "losses over other counts",
        f"the loss is a mean over {counts[0]:.6g} elements (or their weights) on rank "
        f"{group.members[0]}, and over {counts[other]:.6g} on rank {group.members[other]}: the "
        "mean of both is not that of one process. Compute the sum (reduction='sum') and what it is "
        "divided by, and write `loss = hvkit.mean(total, count)`",
        group,
    )


def _means_below(root: Any) -> Iterator[tuple[float, float]]:
    """Of each mean that a loss is made of: the factor it comes with, and its count."""
    nodes = [(root, 1.0)]
    for _ in range(_MOST_NODES):
        if not nodes:
            return
        node, factor = nodes.pop()
        name = type(node).__name__
        if name in _BY_WEIGHT and node._saved_reduction == _MEAN:
            yield factor, float(node._saved_total_weight)
        elif name in _BY_ELEMENT and node._saved_reduction == _MEAN:
            yield factor, _elements(node)
        elif name == "MeanBackward0":
            yield factor, float(node._saved_self_sym_numel)
        elif name.startswith("Div"):
            divisor = _number(node, "_saved_other")
            below = node.next_functions[0][0]
            if _is_sum(below):
                yield factor, divisor
            elif divisor:
                nodes.append((below, factor / divisor))
        elif name.startswith("Mul"):
            others = ("_saved_other", "_saved_self")
            for (below, _), other in zip(node.next_functions, others, strict=False):
                if below is not None:
                    nodes.append((below, factor * _number(node, other)))
        elif name.startswith(_THROUGH):
            nodes.extend((below, factor) for below, _ in node.next_functions if below is not None)


def _is_sum(node: Any) -> bool:
    name = type(node).__name__
    return name == "SumBackward0" or getattr(node, "_saved_reduction", None) == _SUM


def _elements(node: Any) -> float:
    """How many numbers a node has got; 0 if that is not known."""
    below, place = node.next_functions[0]
    shapes = getattr(below, "_input_metadata", ())
    return float(math.prod(shapes[place].shape)) if place < len(shapes) else 0.0


def _number(node: Any, name: str) -> float:
    """A number that autograd keeps; 1 if it keeps none."""
    value = getattr(node, name, None)
    if isinstance(value, torch.Tensor):
        real = value.numel() == 1 and not value.is_complex()
        return float(value.detach()) if real else 1.0
    return float(value) if isinstance(value, int | float) else 1.0
