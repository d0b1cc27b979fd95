"""The base classes of strategies, and what a strategy may use of the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from hvkit.numbers import check_count

Vector = Any
"""All weights of one dtype in one vector, of PyTorch, TensorFlow or NumPy: it has ``+ - *``."""

State = dict[str, Vector]
"""What a strategy keeps from one round to the next, by name, each of the weights' shape."""


class Comm(Protocol):
    """The ranks, as a strategy sees them. Every rank must make the same calls."""

    rank: int
    size: int

    def mean(self, vector: Vector) -> Vector:
        """The mean over ranks; it travels compressed if the script has chosen a compression."""


@dataclass(frozen=True)
class Strategy:
    """How ranks are kept in step. All ranks must pass an equal one to ``hvkit.distribute``."""


@dataclass(frozen=True)
class Rounds(Strategy, ABC):
    """Ranks train alone for a round, and then agree on their weights.

    A round is ``every`` steps of an optimizer. It ends with an agreement on all parameters of that
    optimizer. The optimizer's own state (momentum, Adam's moments) stays each rank's own.

    Attributes:
        every: optimizer steps in a round.
    """

    every: int

    def __post_init__(self) -> None:
        check_count("every", self.every)

    @abstractmethod
    def begin(self, weights: Vector) -> State:
        """The state before the first round.

        Args:
            weights: the same on every rank.
        """

    def rebase(self, weights: Vector, state: State) -> State:
        """The state for weights that the script has set, or that another number of ranks resumes.

        Args:
            weights: the same on every rank.
            state: what ``begin`` or the last round has returned.
        """
        return self.begin(weights)

    @abstractmethod
    def agree(self, weights: Vector, state: State, comm: Comm) -> tuple[Vector, State]:
        """End a round; must not change its arguments.

        It may be called for some of the weights at a time.

        Args:
            weights: this rank's own.
            state: what ``begin`` or the round before has returned.
            comm: for the collectives.

        Returns:
            The weights with which the next round begins, and the state.
        """
