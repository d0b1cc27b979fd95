"""Notices gradients that the script changes after ``backward()``, and whether ranks do it alike.

A reduction leaves the same gradients on every rank. Clipping, unscaling and the like change them in
the same way everywhere, so the weights stay the same. Noise that each rank draws for itself does
not. Ranks compare the gradients that an optimizer uses in its first step, and after 1, 2, 4, 8, ...
steps. In between they look at the version counters of the gradients, which costs next to nothing,
and compare again if a rank has changed its gradients in a way that is new to it, and after 1, 2, 4,
8, ... steps with changes. Changes through ``data`` or a NumPy array do not move the counters.

A comparison is a checksum in the report of the next reduction (``step_report``). Only if it differs
do the ranks send fingerprints.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter, sub

import torch
from torch.optim import Optimizer

from hvkit.communication.group import Group
from hvkit.frameworks.pytorch.checks import rows_of_gradients
from hvkit.frameworks.pytorch.gradients.step_report import Changes
from hvkit.sync.fingerprints import Rows
from hvkit.watch.rank_errors import mark_as_shown_by

_Kinds = frozenset[Hashable]

_gradient = attrgetter("grad")
_version: Callable[[object], int] = attrgetter("_version")
# Sets of kinds that a comparison follows at once. There are few; this bounds what odd scripts cost.
_MOST_KINDS = 16


class ChangedGradients:
    """The changes to the gradients of one model.

    Args:
        parameters: all of the model; it may grow.
        numbers: of the parameters; it grows with them.

    Attributes:
        early: whether the script has changed gradients before they were averaged.
        used: fingerprints of gradients that steps have used, by parameter, to be compared.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], numbers: Mapping[torch.Tensor, int]
    ) -> None:
        self.early = False
        self.used: dict[int, Rows] = {}
        self._parameters = parameters
        self._numbers = numbers
        # Of all gradients, as the last pass or reduction has left them. Not the gradients: whoever
        # holds one keeps its bucket from being used again.
        self._identities: list[int] = []
        self._versions: list[int] = []
        self._known: set[_Kinds] = set()
        self._changed = self._new = False
        self._steps_with_changes = 0
        self._due = True
        # The optimizers whose first step is done.
        self._stepped: set[int] = set()

    def remember(self) -> None:
        """Take the gradients as they are now for unchanged."""
        gradients = list(map(_gradient, self._parameters))
        self._identities = list(map(id, gradients))
        self._versions = _versions(gradients)

    def changed(self) -> bool:
        """Whether the script has changed a gradient since; removing one is no change."""
        return bool(self._kinds() - {"removed"})

    def use(self, optimizers: Sequence[Optimizer]) -> None:
        """Note what a step uses.

        Args:
            optimizers: the one that steps, and those inside it.
        """
        if kinds := self._kinds():
            self._changed = True
            if kinds not in self._known and len(self._known) < _MOST_KINDS:
                self._known.add(kinds)
                self._new = True
        if not self._due and id(optimizers[0]) in self._stepped:
            return
        self._stepped.add(id(optimizers[0]))
        groups = (group for each in optimizers for group in each.param_groups)
        params = (p for group in groups for p in group["params"])
        numbers = (self._numbers[p] for p in params if p in self._numbers)
        held = {i: g for i in numbers if (g := self._parameters[i].grad) is not None}
        self.used.update(zip(held, rows_of_gradients(list(held.values())), strict=True))

    def report(self) -> Changes:
        """What this rank reports of its steps since the last reduction."""
        return Changes(early=self.early, changed=self._changed, new=self._new)

    def checksum(self) -> int:
        """A number that differs, in all likelihood, if ranks have used different gradients."""
        if not self.used:
            return 0
        rows = [(i, row.tolist()) for i, row in sorted(self.used.items())]
        return zlib.crc32(repr(rows).encode())

    def reported(self, on_any_rank: Changes, steps: int) -> None:
        """Decide, as all ranks do, whether the next step's gradients are compared.

        Args:
            on_any_rank: what any rank has reported.
            steps: how many each rank has done.
        """
        self._steps_with_changes += on_any_rank.changed
        counts = [steps, self._steps_with_changes if on_any_rank.changed else 0]
        again = on_any_rank.new or any(n.bit_count() == 1 for n in counts)
        self._due = again or (self._due and not self.used)
        self.used.clear()
        self.early = self._changed = self._new = False

    def _kinds(self) -> _Kinds:
        """How gradients have changed: a number of operations in place, or what was done instead."""
        gradients = list(map(_gradient, self._parameters))
        identities, versions = list(map(id, gradients)), _versions(gradients)
        if identities == self._identities:
            if versions == self._versions:
                return frozenset()
            return frozenset(map(sub, versions, self._versions)) - {0}
        then = zip(self._identities, self._versions, strict=True)
        now = zip(gradients, identities, versions, strict=True)
        kinds: set[Hashable] = set()
        # Parameters that have come since are at the end, and have not been averaged yet.
        for (was, old), (gradient, identity, new) in zip(then, now, strict=False):
            if was != identity:
                kinds.add("removed" if gradient is None else "replaced")
            elif old != new:
                kinds.add(new - old)
        return frozenset(kinds)


def refuse_early_changes(accumulate: int, group: Group) -> None:
    """Raise because a rank has changed gradients that no pass has averaged.

    Raises:
        ValueError: names the fix.
    """
    error = ValueError(
        "gradients were changed (clipped, say) after backward(), but before they were averaged: "
        f"accumulate={accumulate} averages once in {accumulate} passes, and step() came after "
        "fewer. Call hvkit.reduce_gradients(model) after the last backward() before step(), or "
        "take each batch, just before its backward(), from a DataLoader of several batches that "
        "hvkit.shard returned"
    )
    raise mark_as_shown_by(error, group.first)


def _versions(gradients: Sequence[torch.Tensor | None]) -> list[int]:
    try:
        return list(map(_version, gradients))
    # None has none, and nor have tensors that inference mode has made.
    except (AttributeError, RuntimeError):
        return [-1 if g is None or g.is_inference() else g._version for g in gradients]
