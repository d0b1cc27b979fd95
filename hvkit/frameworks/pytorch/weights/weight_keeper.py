"""The weights of a model whose ranks train alone: as vectors, and around each optimizer's steps."""

from __future__ import annotations

import functools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.batch_norm import RunningStatistics
from hvkit.frameworks.pytorch.checks import Checks
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.gradients.buckets import like, wire_dtype
from hvkit.frameworks.pytorch.optimizers import OutermostStep, around_scaled_steps
from hvkit.sync.shown_weights import AgreedView


class WeightKeeper(AgreedView):
    """What exchanges the weights of one model after its optimizers' steps.

    A step that ``GradScaler`` skips counts, too.

    Args:
        parameters: in the same order on every rank.
        name: the same on every rank, and no other keeper's.
        checks: what the ranks compare before their first step.
        statistics: of normalisation layers, averaged with the weights.
    """

    alone = True

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        name: str,
        checks: Checks,
        statistics: RunningStatistics | None,
    ) -> None:
        super().__init__()
        self._name = name
        self._checks = checks
        self._statistics = statistics
        self._number: dict[torch.Tensor, int] = {}
        self._parameters: list[nn.Parameter] = []
        # Weak: the optimizers' hooks keep this object.
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._steps_ended = 0
        self.add(parameters)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._number

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Know more parameters; the same ones on every rank, with the same values."""
        for p in parameters:
            self._number[p] = len(self._parameters)
            self._parameters.append(p)

    def watch(self, optimizers: Sequence[Optimizer], adopt: Callable[[], bool]) -> None:
        """Surround the steps of an optimizer.

        Args:
            optimizers: one that updates some of the parameters, and those inside it.
            adopt: adds parameters that are new in the optimizers.
        """
        number = len(self._optimizers)
        self._optimizers.append(weakref.ref(optimizers[0]))
        _keepers.add(self)

        def before() -> None:
            self.refuse_step()
            adopt()
            self._before_step(number)

        def after() -> None:
            self._steps_ended += 1
            self._end_step(number)

        step = OutermostStep(before, after)
        for each in optimizers:
            step.attach(each)
            around_scaled_steps(each, functools.partial(self._count_scaled_step, before, after))

    def _count_scaled_step(
        self,
        before: Callable[[], None],
        after: Callable[[], None],
        scaler: Any,
        step: Callable[[], Any],
    ) -> Any:
        """Let ``GradScaler`` step or skip, and count both."""
        ended = self._steps_ended
        result = step()
        if self._steps_ended == ended:
            before()
            after()
        return result

    @abstractmethod
    def _before_step(self, number: int) -> None:
        """What comes before each step of an optimizer."""

    @abstractmethod
    def _end_step(self, number: int) -> None:
        """What comes after each step of an optimizer."""

    def _optimizer(self, number: int) -> Optimizer:
        """The optimizer of this number, which steps just now."""
        optimizer = self._optimizers[number]()
        assert optimizer is not None
        return optimizer

    def _living(self) -> list[Optimizer]:
        """The optimizers that the script still has."""
        return [each for reference in self._optimizers if (each := reference()) is not None]

    def _values(self) -> list[tuple[Any, Any]]:
        values: list[tuple[Any, Any]] = [(p, p.detach().clone()) for p in self._parameters]
        if self._statistics:
            values.append((self._statistics, self._read_statistics()))
        return values

    @torch.no_grad()
    def _set_values(self, values: list[tuple[Any, Any]]) -> None:
        for thing, value in values:
            if isinstance(thing, RunningStatistics):
                thing.write(value, also_in_evaluation=True)
            else:  # a graph that still needs its backward pass may hold the parameter
                thing.data.copy_(value)

    def _read_statistics(self) -> torch.Tensor:
        assert self._statistics
        vector = torch.zeros(self._statistics.length, device=self._parameters[0].device)
        self._statistics.read_into(vector)
        return vector

    def _average_statistics(self, *, keep: bool) -> None:
        """Average the statistics of normalisation layers over ranks; a collective.

        Args:
            keep: whether training goes on with them. If not, this is a view for evaluation, which
                has to change layers that are in evaluation mode.
        """
        if self._statistics:
            mean, wire = self._read_statistics(), Wire("batch norm")
            wire.wait(wire.start_mean(mean, f"{self._name}.statistics"))
            self._statistics.write(mean, also_in_evaluation=not keep)


_keepers: weakref.WeakSet[WeightKeeper] = weakref.WeakSet()


def is_kept(parameter: torch.Tensor) -> bool:
    """Whether a model whose ranks train alone has this parameter."""
    return any(parameter in keeper for keeper in _keepers)


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """What the optimizer updates."""
    return (p for group in optimizer.param_groups for p in group["params"])


def flat_copy(parameter: torch.Tensor) -> torch.Tensor:
    """A copy as a vector, in the dtype in which it travels."""
    plain = parameter.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.reshape(-1).to(wire_dtype(parameter.dtype), copy=True)


def write(parameter: torch.Tensor, vector: torch.Tensor) -> None:
    """Set a parameter from a vector that ``flat_copy`` has made."""
    parameter.detach().copy_(like(parameter, vector))


def holds(parameter: torch.Tensor, vector: torch.Tensor) -> bool:
    """Whether a parameter is what ``write`` makes of a vector."""
    return torch.equal(parameter.detach(), like(parameter, vector).to(parameter.dtype))


def of_one_kind(parameters: Sequence[torch.Tensor], numbers: Iterable[int]) -> list[list[int]]:
    """The numbers of float parameters, in lists of those that fit into one vector."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i in numbers:
        p = parameters[i]
        if p.is_floating_point() or p.is_complex():
            kinds.setdefault((wire_dtype(p.dtype), p.device), []).append(i)
    return list(kinds.values())
