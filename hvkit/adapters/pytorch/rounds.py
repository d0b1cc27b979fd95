"""Ends rounds of a strategy that agrees on weights: after so many steps of an optimizer.

The strategy sees all parameters of the optimizer of one dtype as one vector. Its state is kept by
parameter, because several optimizers may update the same one, in turn.

A step that ``GradScaler`` skips counts, too: an overflow on one rank must not move the ends of its
rounds against those of the others.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hvkit import collectives
from hvkit.adapters.agreed_view import AgreedInRounds
from hvkit.adapters.gradient_chunks import chunks
from hvkit.adapters.pytorch import step_report
from hvkit.adapters.pytorch.batch_norm import RunningStatistics
from hvkit.adapters.pytorch.buckets import Bucket, CompressedBucket, CompressionState
from hvkit.adapters.pytorch.checks import Checks
from hvkit.adapters.pytorch.optimizers import OutermostStep, around_scaled_steps
from hvkit.adapters.pytorch.weights import (
    average_statistics,
    copies_of,
    flat_copy,
    of_one_kind,
    parameters_of,
    put_back,
    remember,
    write,
)
from hvkit.adapters.pytorch.wire import Wire
from hvkit.compression import Compression
from hvkit.errors import RanksDisagreeError
from hvkit.exchanges import Messages, by_rank, circle
from hvkit.strategies.strategy import Rounds
from hvkit.watch.calls import call

_STEP = "optimizer.step()"
# Begins the names of what the compression keeps, in a checkpoint.
_SENT = "sent-"


class RoundKeeper(AgreedInRounds):
    """Ends the rounds of the optimizers of one model.

    Args:
        strategy: what the ranks agree on.
        parameters: in the same order on every rank.
        name: the same on every rank, and no other keeper's.
        checks: what the ranks compare before their first step.
        compression: how float32 vectors travel; None for as they are.
        statistics: of normalisation layers, averaged at each agreement.
    """

    def __init__(
        self,
        strategy: Rounds,
        parameters: Iterable[nn.Parameter],
        name: str,
        checks: Checks,
        compression: Compression | None = None,
        statistics: RunningStatistics | None = None,
    ) -> None:
        super().__init__(strategy)
        self.compression = compression
        self.alone = True
        self._name = name
        self._checks = checks
        self._sent = CompressionState(compression) if compression else None
        self._statistics = statistics
        self._number: dict[torch.Tensor, int] = {}
        self._parameters: list[nn.Parameter] = []
        # By the parameter's number.
        self._state: dict[int, dict[str, torch.Tensor]] = {}
        # Numbers of those that may differ between ranks.
        self._trained: set[int] = set()
        # PyTorch's count of the writes to each, at the last agreement.
        self._versions: dict[int, int] = {}
        # Weak: the optimizers' hooks keep this object.
        self._optimizers: list[weakref.ref[Optimizer]] = []
        # Steps that each optimizer has taken in this round, and rounds that it has ended.
        self._steps: list[int] = []
        self._rounds: list[int] = []
        self._begun = False
        self.add(parameters)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._number

    def steps_in_round(self) -> list[int]:
        """Steps since the last agreement, for each optimizer."""
        return list(self._steps)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Agree on more parameters; the same ones on every rank, with the same values."""
        for p in parameters:
            i = self._number[p] = len(self._parameters)
            self._parameters.append(p)
            if self._begun:
                self._begin(i)

    def watch(self, optimizers: Sequence[Optimizer], adopt: Callable[[], bool]) -> None:
        """End a round after every so many steps of an optimizer.

        Args:
            optimizers: one that updates some of the parameters, and those inside it.
            adopt: adds parameters that are new in the optimizers.
        """
        number = len(self._optimizers)
        self._optimizers.append(weakref.ref(optimizers[0]))
        self._steps.append(0)
        self._rounds.append(0)
        remember(self)

        def before() -> None:
            self.refuse_step()
            adopt()
            self._begin_all()
            if not self._steps[number]:
                self._rebase(number)

        step = OutermostStep(before, lambda: self._end_step(number))
        for each in optimizers:
            step.attach(each)
            around_scaled_steps(each, functools.partial(self._count_scaled_step, number, before))

    def _count_scaled_step(
        self, number: int, before: Callable[[], None], scaler: Any, step: Callable[[], Any]
    ) -> Any:
        """Let ``GradScaler`` step or skip, and count both."""
        count = self._rounds[number], self._steps[number]
        result = step()
        if (self._rounds[number], self._steps[number]) == count:
            before()
            self._end_step(number)
        return result

    def _rebase(self, number: int) -> None:
        """Take over weights that the script has set since the last agreement, on all ranks."""
        optimizer = self._optimizers[number]()
        assert optimizer is not None
        for p in parameters_of(optimizer):
            i = self._number[p]
            if i in self._versions and self._versions[i] != p._version:
                del self._versions[i]
                self._state[i] = self.strategy.rebase(flat_copy(p), self._state[i])

    def _begin_all(self) -> None:
        """Before the first step: make sure that the ranks are alike, and begin; a collective."""
        if self._begun:
            return
        with call(f"{type(self._living()[0]).__name__}.step()", 1, self._name):
            self._checks.send(0, self._parameters)
            self._checks.receive(0)
        self._begun = True
        for i in range(len(self._parameters)):
            self._begin(i)

    def _begin(self, i: int) -> None:
        # Parameters whose state a checkpoint has set begin with that.
        if i not in self._state:
            self._state[i] = self.strategy.begin(flat_copy(self._parameters[i]))

    def begin_anew(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all; forget all rounds."""
        self._state.clear()
        self._trained.clear()
        self._versions.clear()
        if self._sent:
            self._sent.kept.clear()
        self._steps = [0] * len(self._steps)
        self._begun = False

    def _end_step(self, number: int) -> None:
        optimizer = self._optimizers[number]()
        assert optimizer is not None
        # Momentum moves a parameter that was frozen, as long as it has a gradient.
        self._trained.update(
            self._number[p]
            for p in parameters_of(optimizer)
            if p.requires_grad or p.grad is not None
        )
        self._steps[number] += 1
        if self._steps[number] < self.strategy.every:
            return
        self._rounds[number] += 1
        with call(f"{type(optimizer).__name__}.step()", self._rounds[number], self._name):
            held = {self._number[p] for p in parameters_of(optimizer)}
            changed = sorted(held & self._trained)
            self._require_same_round(number, changed)
            self._agree(changed, keep=True)
        if self.strategy.alike:
            self._trained.difference_update(changed)
        self._steps[number] = 0

    def _require_same_round(self, number: int, changed: list[int]) -> None:
        """Raise on every rank unless all end the same round in the same way; a collective."""
        optimizers = self._living()
        rates = step_report.checksum_of_rates(optimizers)
        mine = (number, self._rounds[number], changed, rates)
        everyone = collectives.gather(_STEP, mine)
        for rank, theirs in enumerate(everyone):
            if theirs[:2] != everyone[0][:2]:
                raise RanksDisagreeError(
                    f"rank {rank} ends round {theirs[1]} of optimizer {theirs[0]} while rank 0 "
                    f"ends round {everyone[0][1]} of optimizer {everyone[0][0]}: every rank must "
                    "call step() of the same optimizers equally often"
                )
        if any(theirs != everyone[0] for theirs in everyone):
            step_report.refuse_other_parameters(self._parameters, self._checks.label, _STEP)
            step_report.refuse_other_rates(optimizers, _STEP)
        for rank, (_, _, there, _) in enumerate(everyone):
            if there != everyone[0][2]:
                i = min(set(there) ^ set(everyone[0][2]))
                trained, not_trained = (rank, 0) if i in there else (0, rank)
                raise RanksDisagreeError(
                    f"{self._checks.label(i, self._parameters[i])} was trained in this round on "
                    f"rank {trained} but not on rank {not_trained}: train the same parameters on "
                    "every rank"
                )

    def _living(self) -> list[Optimizer]:
        """The optimizers that the script still has."""
        return [each for reference in self._optimizers if (each := reference()) is not None]

    @torch.no_grad()
    def _agree(self, numbers: Sequence[int], *, keep: bool) -> None:
        """Set parameters to the weights that the strategy returns; a collective.

        Some at a time, which bounds the memory for copies.

        Args:
            numbers: of the parameters.
            keep: whether the round ends, so that the strategy's state changes.
        """
        for kind in of_one_kind(self._parameters, numbers):
            for run in chunks([self._parameters[i].nbytes for i in kind]):
                self._agree_on([kind[at] for at in run], keep=keep)
        if self._statistics:
            average_statistics(self._statistics, self._parameters[0].device, self._name, keep=keep)
        if self._sent:
            self._sent.commit(numbers if keep else ())
        if keep:
            self._versions.update({i: self._parameters[i]._version for i in numbers})

    def _agree_on(self, together: list[int], *, keep: bool) -> None:
        held = [self._parameters[i] for i in together]
        comm = _Comm(self._name, list(zip(together, held, strict=True)), self._sent)
        flat = [flat_copy(p) for p in held]
        lengths = [len(each) for each in flat]
        names = self._state[together[0]].keys()
        state = {n: torch.cat([self._state[i][n] for i in together]) for n in names}
        if keep:
            weights, state = self.strategy.agree(torch.cat(flat), state, comm)
        else:
            weights = self.strategy.settle(torch.cat(flat), state, comm)
        for p, piece in zip(held, torch.split(weights, lengths), strict=True):
            write(p if keep else p.data, piece)
        for n in names if keep else ():
            for i, piece in zip(together, torch.split(state[n], lengths), strict=True):
                self._state[i][n] = piece

    def _show_agreed(self) -> None:
        # Also what an optimizer has changed that the script no longer has.
        self._agree(sorted(self._trained), keep=False)

    def _values(self) -> list[tuple[Any, Any]]:
        return copies_of(self._parameters, self._statistics)

    def _set_values(self, values: list[tuple[Any, Any]]) -> None:
        put_back(values)

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves, the same on every rank: by state and parameter, and counts."""
        arrays = {
            f"{name}.{i}": tensor.cpu().numpy()
            for i, tensors in self._state.items()
            for name, tensor in tensors.items()
        }
        if self._sent:
            sent = self._sent.arrays(self._sent.compression.common)
            arrays |= {f"{_SENT}{key}": array for key, array in sent.items()}
        counts = np.array([self._steps, self._rounds], np.int64)
        return {**arrays, "counts": counts, "trained": np.array(sorted(self._trained), np.int64)}

    def load_state(self, arrays: dict[str, np.ndarray[Any, Any]], *, in_round: bool) -> None:
        """Set what ``state`` returned.

        Args:
            arrays: from ``state``.
            in_round: whether each rank holds its own weights again. If not, a new round begins,
                with the weights that all hold now.
        """
        self.begin_anew()
        counts = arrays["counts"].tolist()
        if len(counts[0]) != len(self._optimizers):
            raise ValueError(f"it has {len(counts[0])} optimizers, here are {len(self._steps)}")
        sent = {k.removeprefix(_SENT): a for k, a in arrays.items() if k.startswith(_SENT)}
        if self._sent:
            self._sent.load(sent, self._parameters)
        for key, array in arrays.items():
            if key.startswith(_SENT):
                continue
            name, _, number = key.partition(".")
            if number:
                device = self._parameters[int(number)].device
                self._state.setdefault(int(number), {})[name] = torch.tensor(array, device=device)
        if in_round:
            self._steps, self._rounds = counts
            self._trained = set(arrays["trained"].tolist())
        else:
            self._rounds = counts[1]
            for i, state in self._state.items():
                self._state[i] = self.strategy.rebase(flat_copy(self._parameters[i]), state)
        # Each rank has its own optimizer state again, and in a round also its own weights.
        self._begun = in_round
        if in_round:
            for i in range(len(self._parameters)):
                self._begin(i)

    def own_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank: residuals."""
        return self._sent.arrays(self._sent.compression.own) if self._sent else {}

    def load_own_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``own_state`` returned on this rank."""
        if self._sent:
            self._sent.load(arrays, self._parameters)


class _Comm:
    """The ranks, as a strategy sees them.

    Args:
        name: the keeper's.
        members: numbers and parameters of the vectors, all of one dtype.
        state: of the compression of float32 vectors, if there is one.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[tuple[int, torch.Tensor]],
        state: CompressionState | None,
    ) -> None:
        self._wire = Wire("weights")
        self._name = f"{name}.weights.{members[0][0]}"
        self._members = members
        self._state = state
        self.rank, self.size = self._wire.rank, self._wire.size

    def mean(self, vector: torch.Tensor) -> torch.Tensor:
        if self._state and self._state.suits(vector.dtype):
            bucket: Bucket = CompressedBucket(self._name, self._members, self._state)
        else:
            bucket = Bucket(self._name, self._members)
        bucket.flat.copy_(vector)
        bucket.launch(self._wire)
        bucket.exchange(self._wire)
        bucket.wait(self._wire)
        return bucket.flat

    def exchange(self, vector: torch.Tensor, offsets: Sequence[int]) -> list[torch.Tensor]:
        to, sources = circle(offsets, self)
        length = len(vector)
        messages = Messages(
            vector.repeat(len(to)),
            by_rank(length, to, self.size),
            by_rank(length, sources, self.size),
        )
        received = self._wire.wait(self._wire.start(messages, self._name))
        of = dict(zip(sorted(sources), torch.split(received, length), strict=True))
        return [of[source] for source in sources]
