"""The base classes of strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from hvkit.argument_checks import check_count
from hvkit.communication.exchanges import Mean, Neighbours, Ranks
from hvkit.compression import Compression

Vector = Any  # all weights of one dtype in one vector, of PyTorch or NumPy: it has ``+ - *``

# A strategy's state from one round to the next, by name, each of the weights' shape.
State = dict[str, Vector]


Result = TypeVar("Result")

# Yields what to exchange with the other ranks, one after the other, and is sent the results.
Flow = Generator[Mean | Neighbours, Any, Result]


@dataclass(frozen=True)
class Strategy:
    """How ranks combine their gradients or weights.

    All ranks must pass an equal one to ``hvkit.distribute``.
    """

    has_momentum: ClassVar[bool] = False  # whether it has a momentum, in place of the optimizer's

    def check(self, compression: Compression | None) -> None:
        """Raise ValueError, with the reason, for a compression that the strategy cannot use."""


def strategies_in(module: ModuleType) -> dict[str, type[Strategy]]:
    """The strategies that a module exports, by name."""
    exported = {name: each for name, each in vars(module).items() if isinstance(each, type)}
    return {name: each for name, each in sorted(exported.items()) if issubclass(each, Strategy)}


@dataclass(frozen=True)
class Averaging(Strategy):
    """Every update uses a mean over ranks of the gradients, so all ranks keep the same weights."""

    def gradient_compression(self, compression: Compression | None) -> Compression | None:
        """How to average gradients, with the script's choice; None for a plain allreduce."""
        return compression


@dataclass(frozen=True)
class Rounds(Strategy, ABC):
    """Ranks train local weights for a round, and then agree on common ones.

    A round is ``every`` steps of an optimizer. It ends with an agreement on all parameters of that
    optimizer. The optimizer's state (momentum, Adam's moments) stays local.
    """

    every: int

    def __post_init__(self) -> None:
        check_count("every", self.every)

    @property
    def overlap(self) -> int:
        """Steps of the next round that are taken while an agreement runs; below ``every``."""
        return 0

    @property
    def same_weights(self) -> bool:
        """Whether all ranks begin a round with the same weights."""
        return not self.overlap

    @abstractmethod
    def begin(self, weights: Vector) -> State:
        """The state before the first round; the weights are the same on every rank."""

    def anchor(self, state: State) -> Vector:
        """The weights that the ranks last agreed on; None if the state does not keep them.

        By default the entry "anchor". If there is one, weights that the script sets between two
        rounds become the new anchor, by ``reset``; if not, setting them counts as training.
        """
        return state.get("anchor")

    def reset(self, weights: Vector, state: State) -> State:
        """The state for weights that a script has set, or that another number of ranks resumes."""
        return self.begin(weights)

    @abstractmethod
    def agree(self, weights: Vector, state: State, group: Ranks) -> Flow[tuple[Vector, State]]:
        """End a round; return the weights with which the next one begins, and the state.

        A generator: it yields what it needs from the other ranks, and is sent the results. The next
        round may begin meanwhile. It may be called for some of the weights at a time, and must not
        change its arguments: this rank's weights, and what ``begin`` or the last round returned.
        """

    def settle(self, weights: Vector, state: State, group: Ranks) -> Flow[Vector]:
        """The weights to evaluate and save now, the same on all ranks; a generator, too."""
        agreed, _ = yield from self.agree(weights, state, group)
        return agreed
