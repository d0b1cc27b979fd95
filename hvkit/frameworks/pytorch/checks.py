"""Compares the ranks while they train, and raises on all of them if they disagree.

Before the first update, after 1, 2, 4, 8, ... steps or every ``check_every``, the ranks exchange
fingerprints in one small message along with the gradients, where they wait for each other anyway:
do they hold the same weights, and do they compute different gradients? The report on each step
(``gradients/reduction.py``) has checksums of everything else. If these differ, the ranks exchange
more here, to name the difference in the error.

A script may change gradients between ``backward()`` and ``step()``, as clipping does, but must do
so equally on all ranks. Ranks compare the gradients that an optimizer uses in its first step, after
1, 2, 4, 8, ... steps, if a rank has changed its gradients in a way that is new to it, and after 1,
2, 4, 8, ... steps with changes. These are seen by the version counters of the gradients, which cost
next to nothing; changes through ``data`` or a NumPy array do not move them. A checksum of the
gradients travels with that of the rates; only if it differs do ranks send fingerprints.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hvkit import runtime
from hvkit.communication import collectives
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.pytorch.fingerprints import (
    Fingerprints,
    fingerprints_of,
    label_of,
    of_optimizer,
    of_parameters,
    rows_of_gradients,
    unit_of,
)
from hvkit.frameworks.pytorch.gradients.gradient_lists import lists
from hvkit.frameworks.pytorch.gradients.loss_counts import LossCounts
from hvkit.frameworks.pytorch.learning_rate import rates_of, refuse_other_rates
from hvkit.frameworks.pytorch.refusals import processes_of_torch_distributed, two_at_once
from hvkit.frameworks.pytorch.wire import Wire
from hvkit.sync import fingerprints
from hvkit.sync.fingerprints import WIDTH, Compared, Rows, warn_of_unlike
from hvkit.sync.port import Options
from hvkit.watch.rank_errors import mark_as_shown_by

_CHANGED = (
    "the script changed it after backward() had averaged it, differently on each rank: call "
    "hvkit.reduce_gradients(model) after the change and before step(), or make the same change on "
    "every rank (random numbers from a torch.Generator with the same seed everywhere)"
)


_CHANGED_EARLY = (
    "gradients were changed (clipped, say) after backward(), but before they were averaged: "
    "accumulate={accumulate} averages once in {accumulate} passes, and step() came after fewer. "
    "Call hvkit.reduce_gradients(model) after the last backward() before step(), or take each "
    "batch, just before its backward(), from a DataLoader of several batches that hvkit.shard "
    "returned"
)


class Changes(NamedTuple):
    """How the script has changed gradients after ``backward()``, on one rank or on any."""

    early: bool = False  # before they were averaged
    changed: bool = False  # after that, and an optimizer has used them
    new: bool = False  # in a way that has not been compared yet


NO_CHANGES = Changes()


@dataclass(frozen=True)
class Disagreement:
    """How ranks differ; ``nonfinite`` and ``changes`` are of any rank, ``shapes`` of the losses.

    ``checksums`` are of learning rates, gradients used so far, and whether the script has hooks.
    """

    frozen: bool = False
    checksums: bool = False
    steps: bool = False
    nonfinite: bool = False
    shapes: bool = False
    changes: Changes = NO_CHANGES


class Checks:
    """Compares the ranks while they train one model.

    If the fingerprints of buffers that ``learnt`` returns differ, rank 0 warns.
    """

    def __init__(
        self,
        names: Mapping[str, torch.Tensor],
        optimizers: Sequence[Optimizer],
        options: Options,
        name: str,
        learnt: Callable[[], Fingerprints],
    ) -> None:
        self.group, self.name, self.accumulate = options.group, name, options.accumulate
        self._wire = Wire("checks", self.group)
        self._every = options.check_every
        # Both lists grow. Parameters are in the same order on every rank.
        self.parameters: list[nn.Parameter] = []
        self.optimizers: list[Optimizer] = []
        self.index_of: dict[torch.Tensor, int] = {}  # in the list of parameters
        self._labels = {parameter: f"parameter {name}" for name, parameter in names.items()}
        # Compared before the first update.
        self._with_state = list(optimizers)
        self._learnt = learnt
        self.steps = 0
        # The number of steps after which ranks exchange fingerprints again.
        self._next = 0
        self.handle: int | None = None  # of the exchange that is running
        self._looked_at_gradients = False
        self._compared: list[Compared] = []
        self.losses = LossCounts()
        self.changes = ChangedGradients(self.parameters)

    @property
    def due(self) -> bool:
        """Whether ranks exchange fingerprints along with the next average."""
        return self.steps >= self._next

    def add(self, parameter: nn.Parameter) -> int:
        """Compare a further parameter from now on; return its index."""
        index = self.index_of[parameter] = len(self.parameters)
        self.parameters.append(parameter)
        return index

    def label(self, i: int) -> str:
        return label_of(self._labels, i, self.parameters[i])

    def require_same(self, call: str, note: str, tensors: Mapping[int, torch.Tensor]) -> bool:
        """Whether all ranks hold the same tensors, by index of a parameter; a collective.

        Raise on every rank if they differ by more than rounding. ``note`` follows the parameter's
        name.
        """
        compared = [
            Compared(f"{self.label(i)}{note}", unit_of(self.parameters[i])) for i in tensors
        ]
        rows = fingerprints_of(list(tensors.values()))
        return fingerprints.require_same(call, compared, rows, self.group)

    def require_same_gradients(self) -> None:
        """Raise on every rank unless all ranks' steps used the same gradients; a collective."""
        used = self.changes.used
        text = "the gradient of {label} is None on rank {lacks}, but not on rank {has}; "
        self._require_on_all(used.keys(), text + _CHANGED)
        compared = [
            Compared(f"the gradient of {self.label(i)}", unit_of(self.parameters[i]), _CHANGED)
            for i in sorted(used)
        ]
        rows = [used[i] for i in sorted(used)]
        fingerprints.require_same("backward()", compared, rows, self.group)

    def require_same_parameters(self, call: str = "backward()") -> None:
        """Raise on every rank unless all train the same parameters; a collective."""
        self._require_on_all(
            {i for i, p in enumerate(self.parameters) if p.requires_grad},
            "{label} requires a gradient on rank {has} but not on rank {lacks}: freeze the same "
            "parameters on every rank (to choose them at random, use a generator with the same "
            "seed on all ranks)",
            call,
        )

    def _require_on_all(self, indices: Set[int], text: str, call: str = "backward()") -> None:
        """Raise on every rank if only some have the index of a parameter; a collective."""
        by_rank = collectives.gather(call, set(indices), self.group)
        if (found := fingerprints.first_unlike(by_rank, self.group)) is not None:
            i, has, lacks = found
            raise self._disagreement(text.format(label=self.label(i), has=has, lacks=lacks))

    def _disagreement(self, text: str) -> RanksDisagreeError:
        """An error that all ranks raise and the group's first one shows."""
        return mark_as_shown_by(RanksDisagreeError(text), self.group.first)

    def require_same_rates(self, optimizers: Sequence[Optimizer], call: str = "backward()") -> None:
        """Raise on every rank unless all use the same learning rates; a collective."""
        by_rank = collectives.gather(call, rates_of(optimizers, fetch=True), self.group)
        refuse_other_rates(dict(zip(self.group.members, by_rank, strict=True)))

    def require_hooks_on_all_ranks(self, hooks: Sequence[str]) -> None:
        """Raise on every rank if only some have hooks that need the mean of each pass."""
        by_rank = collectives.gather("backward()", list(hooks), self.group)
        named = dict(zip(self.group.members, by_rank, strict=True))
        has = next((rank for rank, names in named.items() if names), None)
        lacks = next((rank for rank, names in named.items() if not names), None)
        if has is not None and lacks is not None:
            raise self._disagreement(
                f"rank {has} has registered the hook {named[has][0]}, and rank {lacks} has none: "
                "gradients are averaged in each backward pass for it, instead of once in "
                f"accumulate={self.accumulate}. Register hooks on every rank; if only one rank is "
                "to act, as for printing, decide inside the hook: `if hvkit.is_main(): ...`"
            )

    def compare_losses(self) -> None:
        """Compare the numbers of elements of losses whose shapes differ; a collective."""
        numbers = torch.from_numpy(self.losses.numbers()[None])
        by_rank = self._wire.gather(numbers, f"{self.name}.losses")
        self.losses.compare(by_rank.numpy(), self.group, for_shapes=True)

    def refuse(
        self,
        found: Disagreement,
        channels_last: Set[int],
        hooks: Sequence[str],
        drop: Callable[[], None],
    ) -> None:
        """Raise on every rank if the report on a step shows that ranks disagree; then a collective.

        ``drop`` waits for this rank's buckets, before the error, if all ranks have sent the same.
        """
        if found.frozen and not found.steps:
            self.require_same_parameters()
        if found.checksums and not found.steps:
            self._require_on_all(
                channels_last,
                "{label} is in torch.channels_last on rank {has} but not on rank {lacks}: call "
                "model.to(memory_format=...) in the same way on every rank",
            )
        try:
            if found.steps:
                raise RanksDisagreeError(
                    f"the ranks are at different optimizer steps (rank {runtime.rank()} has done "
                    f"{self.steps}): every rank must call backward() and step() equally often"
                )
            if found.checksums:
                self.require_same_rates(self.optimizers)
                self.require_hooks_on_all_ranks(hooks)
                self.require_same_gradients()
            if found.changes.early:
                text = _CHANGED_EARLY.format(accumulate=self.accumulate)
                raise mark_as_shown_by(ValueError(text), self.group.first)
        except (RanksDisagreeError, ValueError):
            if not found.frozen:
                drop()
            raise

    def send(self) -> None:
        """Start to exchange fingerprints; call before this rank's gradients become means."""
        if self.handle is not None:  # of a reduction that failed
            self._wire.wait(self.handle)
        self._compared, rows = of_parameters(self.parameters, self._labels)
        for optimizer in self._with_state:
            for heading, (compared, numbers) in of_optimizer(optimizer).items():
                self._compared.append(Compared(heading))
                # In one row: before the first update, ranks may hold different numbers.
                text = repr((compared, np.array(numbers).tolist()))
                rows.append(fingerprints.hashed(text))
        gradients = fingerprints_of([p.grad for p in self.parameters if p.grad is not None])
        head = [*fingerprints.of_gradients(gradients), processes_of_torch_distributed()]
        learnt = fingerprints.hashed(repr([row.tolist() for row in self._learnt()[1]]))
        learnt[1:] = self.losses.numbers().view(np.int64)
        sent = torch.from_numpy(np.stack([head, learnt, *rows]))
        self.handle = self._wire.start_gather(sent, f"{self.name}.check")

    def receive(self) -> None:
        """Compare the fingerprints that ``send`` exchanges; call before using the means."""
        assert self.handle is not None
        gathered, self.handle = self._wire.wait(self.handle), None
        by_rank = gathered.numpy().reshape(self._wire.size, -1, WIDTH)
        heads, learnt, rows = by_rank[:, 0], by_rank[:, 1], by_rank[:, 2:]
        if (processes := int(heads[:, 2].max())) > 1:
            raise self._disagreement(two_at_once(processes))
        exact = self.steps == 0
        if text := fingerprints.judge(rows, self._compared, exact=exact, group=self.group):
            raise self._disagreement(text)
        if not self._looked_at_gradients:
            self._looked_at_gradients = fingerprints.warn_of_equal_work(heads[:, :2], self.group)
        if (learnt[:, 0] != learnt[0, 0]).any():
            warn_of_unlike("backward()", *self._learnt(), self.group)
        losses = np.ascontiguousarray(learnt[:, 1:]).view(np.float64)
        self.losses.compare(losses, self.group)
        self._with_state = []
        if self._looked_at_gradients:
            self._next = self.steps + (self._every or max(1, self.steps))
            self.losses.look(wanted=False)

    def count_step(self) -> None:
        """Count an optimizer step, and look at losses if ranks compare after it."""
        self.steps += 1
        if self.due:
            self.losses.look(wanted=True)


# How the gradients of a model have changed: see ``ChangedGradients._kinds``.
_Kinds = frozenset[Hashable]
# Sets of kinds that a comparison follows at once. There are few; this bounds what odd scripts cost.
_MOST_KINDS = 16


class ChangedGradients:
    """The changes to the gradients of one model, whose parameters may grow."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        # Whether the script has changed gradients before they were averaged.
        self.early = False
        # Fingerprints of gradients that steps have used, by parameter, to be compared.
        self.used: dict[int, Rows] = {}
        self._parameters = parameters
        # Of all gradients, as the last pass or reduction has left them. Not the gradients: whoever
        # holds one keeps its bucket from being used again.
        self._left: bytes = b""
        self._known: set[_Kinds] = set()
        self._changed = self._new = False
        self._steps_with_changes = 0
        self._compares = True
        # The optimizers whose first step is done.
        self._stepped: set[int] = set()

    def remember(self) -> None:
        """Take the gradients as they are now for unchanged."""
        self._left = lists().versions(self._parameters)

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
        found = lists().versions(self._parameters)
        if found == self._left:
            return frozenset()
        then, now = (np.frombuffer(each, np.int64).reshape(-1, 2) for each in (self._left, found))
        now = now[: len(then)]  # parameters that have come since are at the end, not averaged yet
        same = then[:, 0] == now[:, 0]
        kinds: set[Hashable] = {*(now - then)[same, 1].tolist()} - {0}
        for i in np.flatnonzero(~same):
            kinds.add("removed" if self._parameters[i].grad is None else "replaced")
        return frozenset(kinds)
