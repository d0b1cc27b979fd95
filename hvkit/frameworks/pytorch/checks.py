"""What ranks compare while they train, and the errors that all of them raise if they disagree.

Before the first update, after 1, 2, 4, 8, ... steps or every ``check_every``, the ranks exchange
fingerprints in one small message along with the gradients, where they wait for each other anyway:
do they hold the same weights, and do they compute different gradients?

Other comparisons travel in the report on each step (``gradients/step_report.py``). If it shows that
ranks disagree, they find out here about what, and raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hvkit import runtime
from hvkit.communication import collectives
from hvkit.communication.group import Group
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.divided_state.sharded import is_sharded
from hvkit.frameworks.pytorch.fingerprints import fingerprints_of, unit_of
from hvkit.frameworks.pytorch.gradients.loss_counts import LossCounts
from hvkit.frameworks.pytorch.gradients.step_report import rates_of, refuse_other_rates
from hvkit.frameworks.pytorch.refusals import processes_of_torch_distributed, two_at_once
from hvkit.sync import fingerprints
from hvkit.sync.fingerprints import WIDTH, Compared, Rows, warn_of_unlike
from hvkit.watch.rank_errors import mark_as_shown_by

_CHANGED = (
    "the script changed it after backward() had averaged it, differently on each rank: call "
    "hvkit.reduce_gradients(model) after the change and before step(), or make the same change on "
    "every rank (random numbers from a torch.Generator with the same seed everywhere)"
)


class Checks:
    """Compares the ranks while they train one model.

    Args:
        names: the parameters by name.
        optimizers: the ranks compare their state before the first update.
        every: optimizer steps from one comparison of weights to the next; None after 1, 2, 4, ...
        name: the same on every rank, and no other model's.
        learnt: returns fingerprints of what forward passes learn, of which ranks are warned.
        group: the ranks that train it.

    Attributes:
        name: as passed.
        next: the number of optimizer steps after which ranks exchange fingerprints again.
        handle: of the exchange that is running.
        losses: what losses are means over.
    """

    def __init__(
        self,
        names: Mapping[str, torch.Tensor],
        optimizers: Sequence[Optimizer],
        every: int | None,
        name: str,
        learnt: Callable[[], tuple[list[Compared], list[Rows]]],
        group: Group,
    ) -> None:
        self.group = group
        self._wire = Wire("checks", group)
        self.name = name
        self._every = every
        self._labels = {parameter: f"parameter {name}" for name, parameter in names.items()}
        self._optimizers = list(optimizers)
        self._learnt = learnt
        self.next = 0
        self.handle: int | None = None
        self._looked_at_gradients = False
        self._compared: list[Compared] = []
        self.losses = LossCounts()

    def label(self, number: int, parameter: torch.Tensor) -> str:
        """The name of a parameter in error messages."""
        return _label(self._labels, number, parameter)

    def require_same(
        self, point: str, note: str, held: Sequence[tuple[int, nn.Parameter, torch.Tensor]]
    ) -> bool:
        """Raise on every rank unless all ranks hold the same tensors, up to rounding; a collective.

        Args:
            point: the name of the call that the user made.
            note: for the error message, after the name of a parameter.
            held: the numbers of parameters, these, and what to compare in their place.

        Returns:
            Whether they hold the same bit for bit.
        """
        compared = [Compared(f"{self.label(i, p)}{note}", unit_of(p)) for i, p, _ in held]
        return fingerprints.require_same(
            point, compared, fingerprints_of([tensor for *_, tensor in held]), self.group
        )

    def require_same_gradients(
        self, used: Mapping[int, Rows], parameters: Sequence[nn.Parameter]
    ) -> None:
        """Raise on every rank unless all ranks' steps used the same gradients; a collective.

        Args:
            used: results of ``rows_of_gradients``, by the parameter's number.
            parameters: all averaged ones.

        Raises:
            RanksDisagreeError: names the first gradient that differs by more than rounding.
        """
        numbers = sorted(used)
        labels = [f"the gradient of {self.label(i, p)}" for i, p in enumerate(parameters)]
        everyone = collectives.gather("backward()", numbers, self.group)
        if unlike := fingerprints.first_unlike(everyone, self.group):
            i, has, lacks = unlike
            text = f"{labels[i]} is None on rank {lacks}, but not on rank {has}; {_CHANGED}"
            raise mark_as_shown_by(RanksDisagreeError(text), self.group.first)
        compared = [Compared(labels[i], unit_of(parameters[i]), _CHANGED) for i in numbers]
        fingerprints.require_same("backward()", compared, [used[i] for i in numbers], self.group)

    def refuse_other_steps(self, done: int) -> NoReturn:
        """Raise because the ranks have done different numbers of optimizer steps.

        Args:
            done: how many this rank has done.
        """
        raise RanksDisagreeError(
            f"the ranks are at different optimizer steps (rank {runtime.rank()} has done {done}): "
            "every rank must call backward() and step() equally often"
        )

    def require_same_parameters(
        self, parameters: Sequence[nn.Parameter], call: str = "backward()"
    ) -> None:
        """Raise on every rank unless all train the same parameters; a collective.

        Args:
            parameters: all of the model's.
            call: the user's call.
        """
        mine = {i for i, p in enumerate(parameters) if p.requires_grad}
        everyone = collectives.gather(call, mine, self.group)
        if found := fingerprints.first_unlike(everyone, self.group):
            i, trains, freezes = found
            error = RanksDisagreeError(
                f"{self.label(i, parameters[i])} requires a gradient on rank {trains} but not on "
                f"rank {freezes}: freeze the same parameters on every rank (to choose them at "
                "random, use a generator with the same seed on all ranks)"
            )
            raise mark_as_shown_by(error, self.group.first)

    def require_same_formats(
        self, channels_last: Set[int], parameters: Sequence[nn.Parameter]
    ) -> None:
        """Raise on every rank unless all hold weights in the same memory format; a collective.

        Args:
            channels_last: indices of the parameters in that format.
            parameters: all of the model's.
        """
        everyone = collectives.gather("backward()", set(channels_last), self.group)
        if found := fingerprints.first_unlike(everyone, self.group):
            i, last, other = found
            error = RanksDisagreeError(
                f"{self.label(i, parameters[i])} is in torch.channels_last on rank {last} but not "
                f"on rank {other}: call model.to(memory_format=...) alike on every rank"
            )
            raise mark_as_shown_by(error, self.group.first)

    def require_same_rates(self, optimizers: Sequence[Optimizer], call: str = "backward()") -> None:
        """Raise on every rank unless all use the same learning rates; a collective.

        Args:
            optimizers: those that update the parameters.
            call: the user's call.
        """
        everyone = collectives.gather(call, rates_of(optimizers, fetch=True), self.group)
        refuse_other_rates(dict(zip(self.group.members, everyone, strict=True)))

    def require_hooks_on_all_ranks(self, hooks: Sequence[str], accumulate: int) -> None:
        """Raise on every rank if hooks have only some average in each pass; a collective.

        Args:
            hooks: this rank's hooks that need the mean of each pass.
            accumulate: backward passes from one reduction to the next without them.
        """
        everyone = collectives.gather("backward()", list(hooks), self.group)
        ranks = self.group.members
        has = next((r for r, its in zip(ranks, everyone, strict=True) if its), None)
        lacks = next((r for r, its in zip(ranks, everyone, strict=True) if not its), None)
        if has is not None and lacks is not None:
            error = RanksDisagreeError(
                f"rank {has} has registered the hook {everyone[ranks.index(has)][0]}, and rank "
                f"{lacks} has none: gradients are averaged in each backward pass for it, instead "
                f"of once in accumulate={accumulate}. Register hooks on every rank, and what one "
                "rank is to do alone, such as printing, do inside the hook: "
                "`if hvkit.is_main(): ...`"
            )
            raise mark_as_shown_by(error, self.group.first)

    def compare_losses(self) -> None:
        """Look at what losses of other shapes are means over; a collective."""
        mine = torch.from_numpy(self.losses.numbers()[None])
        everyone = self._wire.gather(mine, f"{self.name}.losses")
        self.losses.compare(everyone.numpy(), self.group, for_shapes=True)

    def refuse_early_changes(self, accumulate: int) -> NoReturn:
        """Raise because a rank has changed gradients that no pass has averaged.

        Args:
            accumulate: backward passes from one reduction to the next.

        Raises:
            ValueError: names the fix.
        """
        error = ValueError(
            "gradients were changed (clipped, say) after backward(), but before they were "
            f"averaged: accumulate={accumulate} averages once in {accumulate} passes, and step() "
            "came after fewer. Call hvkit.reduce_gradients(model) after the last backward() before "
            "step(), or take each batch, just before its backward(), from a DataLoader of several "
            "batches that hvkit.shard returned"
        )
        raise mark_as_shown_by(error, self.group.first)

    def send(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Start to exchange fingerprints; call before this rank's gradients become means.

        Args:
            parameters: all averaged ones, with this rank's own gradients.
        """
        if self.handle is not None:  # of a reduction that failed
            self._wire.wait(self.handle)
        self._compared, rows = _of_parameters(parameters, self._labels)
        for entry in (each for o in self._optimizers for each in _of_optimizer(o)):
            self._compared.append(Compared(entry.heading))
            rows.append(entry.in_one_row())
        gradients = fingerprints_of([p.grad for p in parameters if p.grad is not None])
        head = [*fingerprints.of_gradients(gradients), processes_of_torch_distributed()]
        learnt = fingerprints.hashed(repr([row.tolist() for row in self._learnt()[1]]))
        learnt[1:] = self.losses.numbers().view(np.int64)
        mine = torch.from_numpy(np.stack([head, learnt, *rows]))
        self.handle = self._wire.start_gather(mine, f"{self.name}.check")

    def receive(self, steps: int) -> None:
        """Compare what ``send`` has started to exchange; call before using the means.

        Args:
            steps: optimizer steps done so far, the same number on every rank.

        Raises:
            RanksDisagreeError: the ranks hold different weights, or another library started
                ``torch.distributed`` on some.
        """
        assert self.handle is not None
        gathered, self.handle = self._wire.wait(self.handle), None
        everyone = gathered.numpy().reshape(self._wire.size, -1, WIDTH)
        heads, learnt, rows = everyone[:, 0], everyone[:, 1], everyone[:, 2:]
        if (processes := int(heads[:, 2].max())) > 1:
            raise mark_as_shown_by(RanksDisagreeError(two_at_once(processes)), self.group.first)
        if text := fingerprints.judge(rows, self._compared, exact=steps == 0, group=self.group):
            raise mark_as_shown_by(RanksDisagreeError(text), self.group.first)
        if not self._looked_at_gradients:
            self._looked_at_gradients = fingerprints.warn_of_equal_work(heads[:, :2], self.group)
        if (learnt[:, 0] != learnt[0, 0]).any():
            warn_of_unlike("backward()", *self._learnt(), self.group)
        losses = np.ascontiguousarray(learnt[:, 1:]).view(np.float64)
        self.losses.compare(losses, self.group)
        self._optimizers = []
        if self._looked_at_gradients:
            self.next = steps + (self._every or max(1, steps))
            self.losses.look(wanted=False)

    def begin_step(self, steps: int) -> None:
        """Look at losses if ranks compare in the step after so many."""
        self.losses.look(wanted=steps >= self.next)


def compared_in(
    thing: Any, is_averaged: Callable[[torch.Tensor], bool]
) -> tuple[list[Compared], list[Rows]]:
    """The parts of a model or optimizer that must be equal on all ranks, and fingerprints.

    Args:
        thing: any object; of objects that are neither, nothing is compared.
        is_averaged: whether a distributed model has the parameter; others are not compared.
    """
    if isinstance(thing, nn.Module):
        labels: dict[torch.Tensor, str] = {
            p: f"parameter {name}" for name, p in thing.named_parameters()
        }
        return _of_parameters([p for p in labels if is_averaged(p)], labels)
    if isinstance(thing, Optimizer) and any(
        is_averaged(p) for group in thing.param_groups for p in group["params"]
    ):
        entries = _of_optimizer(thing)
        held = [(c, r) for e in entries for c, r in zip(e.compared, e.rows, strict=True)]
        return [c for c, _ in held], [r for _, r in held]
    return [], []


def _of_parameters(
    parameters: Iterable[torch.Tensor], labels: Mapping[torch.Tensor, str]
) -> tuple[list[Compared], list[Rows]]:
    held = list(parameters)
    compared = [Compared(_label(labels, i, p), unit_of(p)) for i, p in enumerate(held)]
    return compared, fingerprints_of(held)


def _label(labels: Mapping[torch.Tensor, str], number: int, parameter: torch.Tensor) -> str:
    return labels.get(parameter) or f"parameter {number} of shape {tuple(parameter.shape)}"


class _Entry(NamedTuple):
    """Numbers that an optimizer keeps under one heading."""

    heading: str
    compared: list[Compared]
    rows: list[Rows]

    def in_one_row(self) -> Rows:
        """One row for the entry: before the first update, ranks may hold different numbers."""
        return fingerprints.hashed(repr((self.compared, np.array(self.rows).tolist())))


def _of_optimizer(optimizer: Optimizer) -> list[_Entry]:
    """The options and the state of an optimizer, in order."""
    kind = type(optimizer).__name__
    groups = [
        _entry(
            f"parameter group {g} of {kind}",
            {key: value for key, value in group.items() if key in optimizer.defaults},
        )
        for g, group in enumerate(optimizer.param_groups)
    ]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [
        _entry(f"the state of {kind} for its parameter {i}", optimizer.state.get(p, {}))
        for i, p in enumerate([] if is_sharded(optimizer) else parameters)
    ]
    return groups + states


def _entry(heading: str, values: Mapping[str, Any]) -> _Entry:
    """An entry for tensors and numbers, and lists of them; other values are not compared."""
    tensors: list[tuple[str, torch.Tensor]] = []
    numbers: list[tuple[str, float]] = []
    for key in sorted(values, key=str):
        value = values[key]
        for each in value if isinstance(value, list | tuple) else [value]:
            if type(each) in (torch.Tensor, torch.nn.Parameter):
                tensors.append((key, each))
            elif isinstance(each, int | float):
                numbers.append((key, float(each)))
    compared = [Compared(f"{key} in {heading}", unit_of(tensor)) for key, tensor in tensors]
    compared += [Compared(f"{key} in {heading}") for key, _ in numbers]
    rows = fingerprints_of([tensor for _, tensor in tensors])
    rows += [fingerprints.fingerprint(np.array(number)) for _, number in numbers]
    return _Entry(heading, compared, rows)
