"""Notices gradients that the script changes between ``backward()`` and ``step()``.

Clipping, unscaling and the like change them in the same way everywhere, so the weights stay the
same on all ranks. With different noise on each rank they do not. Ranks compare the gradients that
an optimizer uses in its first step, and after 1, 2, 4, 8, ... steps. In between they look at the
version counters of the gradients, which costs next to nothing. They compare again if a rank has
changed its gradients in a way that is new to it, and after 1, 2, 4, 8, ... steps with changes.
Changes through ``data`` or a NumPy array do not move the counters. To compare, ranks combine a
checksum of the gradients with the checksum of the rates. Only if it differs do they send
fingerprints (``checks.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter, sub
from typing import NamedTuple

import torch

from hvkit.frameworks.pytorch.fingerprints import rows_of_gradients
from hvkit.sync.fingerprints import Rows

# How the gradients of a model have changed: see ``ChangedGradients._kinds``.
_Kinds = frozenset[Hashable]
# Sets of kinds that a comparison follows at once. There are few; this bounds what odd scripts cost.
_MOST_KINDS = 16

_gradient = attrgetter("grad")
_version: Callable[[object], int] = attrgetter("_version")


class Changes(NamedTuple):
    """How the script has changed gradients after ``backward()``, on one rank or on any."""

    early: bool = False  # before they were averaged
    changed: bool = False  # after that, and an optimizer has used them
    new: bool = False  # in a way that has not been compared yet


NO_CHANGES = Changes()


class ChangedGradients:
    """The changes to the gradients of one model, whose parameters may grow."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        # Whether the script has changed gradients before they were averaged.
        self.early = False
        # Fingerprints of gradients that steps have used, by parameter, to be compared.
        self.used: dict[int, Rows] = {}
        self._parameters = parameters
        # Of all gradients, as the last pass or reduction has left them. Not the gradients: whoever
        # holds one keeps its bucket from being used again.
        self._identities: list[int] = []
        self._versions: list[int] = []
        self._known: set[_Kinds] = set()
        self._changed = self._new = False
        self._steps_with_changes = 0
        self._compares = True
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

    def use(self, optimizer_index: int, indices: Iterable[int]) -> None:
        """Note the gradients that a step uses."""
        if kinds := self._kinds():
            self._changed = True
            if kinds not in self._known and len(self._known) < _MOST_KINDS:
                self._known.add(kinds)
                self._new = True
        if not self._compares and optimizer_index in self._stepped:
            return
        self._stepped.add(optimizer_index)
        used = {i: g for i in indices if (g := self._parameters[i].grad) is not None}
        self.used.update(zip(used, rows_of_gradients(list(used.values())), strict=True))

    def report(self) -> Changes:
        """This rank's changes since the last reduction."""
        return Changes(early=self.early, changed=self._changed, new=self._new)

    def checksum(self) -> int:
        """A number that differs, in all likelihood, if ranks have used different gradients."""
        if not self.used:
            return 0
        rows = [(i, row.tolist()) for i, row in sorted(self.used.items())]
        return zlib.crc32(repr(rows).encode())

    def reported(self, on_any_rank: Changes, steps: int) -> None:
        """Decide, as all ranks do, whether the next step's gradients are compared."""
        self._steps_with_changes += on_any_rank.changed
        counts = [steps, self._steps_with_changes if on_any_rank.changed else 0]
        again = on_any_rank.new or any(n.bit_count() == 1 for n in counts)
        self._compares = again or (self._compares and not self.used)
        self.used.clear()
        self.early = self._changed = self._new = False

    def _kinds(self) -> _Kinds:
        """How gradients have changed: numbers of operations in place, "removed" or "replaced"."""
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


def _versions(gradients: Sequence[torch.Tensor | None]) -> list[int]:
    try:
        return list(map(_version, gradients))
    # None has none, and nor have tensors that inference mode has made.
    except (AttributeError, RuntimeError):
        return [-1 if g is None or g.is_inference() else g._version for g in gradients]
