"""The base classes of strategies, and what a strategy may use of the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hvkit.compression import Compression
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

    def exchange(self, vector: Vector, offsets: Sequence[int]) -> list[Vector]:
        """Send a vector to single ranks, and get theirs.

        Args:
            vector: of the same shape on every rank.
            offsets: it goes to the ranks so many places after this one, counted in a circle.

        Returns:
            For each offset, the vector of the rank as many places before this one.
        """


@dataclass(frozen=True)
class Strategy:
    """How ranks are kept in step. All ranks must pass an equal one to ``hvkit.distribute``."""

    def check(self, compression: Compression | None) -> None:
        """Reject a compression that the strategy cannot use.

        Raises:
            ValueError: with the reason.
        """


@dataclass(frozen=True)
class Averaging(Strategy):
    """Every update uses a mean over ranks of the ranks' gradients, so their weights stay alike."""

    def travels(self, compression: Compression | None) -> Compression | None:
        """How the gradients travel; None for a plain allreduce.

        Args:
            compression: the script's choice.
        """
        return compression


@dataclass(frozen=True)
class Rounds(Strategy, ABC):
    """Ranks train alone for a round, and then agree on their weights.

    A round is ``every`` steps of an optimizer. It ends with an agreement on all parameters of that
    optimizer. The optimizer's own state (momentum, Adam's moments) stays each rank's own.

    Attributes:
        every: optimizer steps in a round.
    """

    every: int

    alike: ClassVar[bool] = True
    """Whether all ranks begin a round with the same weights."""

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

    def settle(self, weights: Vector, state: State, comm: Comm) -> Vector:
        """The weights to evaluate and save now, the same on every rank; as ``agree``."""
        agreed, _ = self.agree(weights, state, comm)
        return agreed
