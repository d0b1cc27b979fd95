"""Decentralised averaging with neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hvkit.argument_checks import check_one_of
from hvkit.communication.exchanges import Mean, Neighbours, Ranks
from hvkit.compression import Compression
from hvkit.strategies.strategy import Flow, Rounds, State, Vector

Topology = Literal["ring", "exponential", "complete"]
TOPOLOGIES = get_args(Topology)


@dataclass(frozen=True)
class Gossip(Rounds):
    """After each round a rank takes the mean of its weights and those of its neighbours.

    With rank w's weights x_w, and d neighbours N(w):

        x_w <- x_w + 1/(d + 1) sum_{j in N(w)} (x_j - x_w)

    For all ranks together that is x <- W x, where the rows and columns of W add up to one. So the
    mean over ranks is that of the local steps, and the ranks' weights approach it by a factor in
    each round. They are never quite the same: ``hvkit.settled``, checkpoints and ``fit``'s
    validation use their mean. Each rank sends its weights d times in a round: with ``"ring"`` that
    is 2P bytes for weights of P bytes, as much as a ring allreduce sends, but in one hop instead of
    2 (N-1). All ranks exchange at the same time, so the slowest sets the pace.

    ``topology="complete"`` is ``LocalSGD``. Compression is not supported: a rank would have to keep
    a residual for each neighbour.

    Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?" (2017),
    D-PSGD; the exponential graph is that of Assran et al., "Stochastic Gradient Push for
    Distributed Deep Learning" (2019).

    Args:
        every: optimizer steps from one exchange to the next.
        topology: a rank's neighbours: ``"ring"`` for the ranks before and after it,
            ``"exponential"`` for those 1, 2, 4, 8 and so on after it, ``"complete"`` for all.
    """

    every: int = 1
    topology: Topology = "ring"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("topology", self.topology, TOPOLOGIES)

    def check(self, compression: Compression | None) -> None:
        if compression is not None:
            raise ValueError(
                f"{self} sends weights to neighbours, and {compression} averages over all ranks: "
                "leave compression out, or use hvkit.LocalSGD"
            )

    def begin(self, weights: Vector) -> State:
        return {}

    @property
    def same_weights(self) -> bool:
        return False

    def agree(self, weights: Vector, state: State, group: Ranks) -> Flow[tuple[Vector, State]]:
        offsets = _offsets(self.topology, group.size)
        received = yield Neighbours(weights, tuple(offsets))
        mixed = weights
        for each in received:
            mixed = mixed + (each - weights) * (1 / (len(offsets) + 1))
        return mixed, state

    def settle(self, weights: Vector, state: State, group: Ranks) -> Flow[Vector]:
        return (yield Mean(weights))


def _offsets(topology: str, size: int) -> list[int]:
    """How many places after a rank its neighbours are, counted in a circle."""
    if topology == "ring":
        return sorted({1, size - 1})
    if topology == "exponential":
        return [1 << power for power in range((size - 1).bit_length())]
    return list(range(1, size))
