"""Strategies whose ranks train local weights in rounds, and average weights at their ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hvkit.argument_checks import check_count, check_number, check_one_of
from hvkit.communication.exchanges import Mean, Neighbours, Ranks
from hvkit.compression import Compression
from hvkit.strategies.strategy import Flow, Rounds, State, Vector

Topology = Literal["ring", "exponential", "complete"]
TOPOLOGIES = get_args(Topology)


@dataclass(frozen=True)
class LocalSGD(Rounds):
    """Each rank takes ``every`` local steps; then all take the mean of their weights.

    With the anchor a, the weights that the ranks last agreed on, and rank w's weights x_w:

        a <- a - 1/N sum_w (a - x_w),    x_w <- a

    That is the mean of the x_w. Ranks send the differences instead of the weights, because those
    lose less when rounded or compressed, and because weights that no rank has changed stay the same
    to the bit.

    ``every=1`` with SGD, also with momentum and weight decay, is ``Synchronous``: the update is
    linear in the gradients and the state. Each rank sends 2 (N-1)/N times the weights' bytes in a
    round, that is 1/``every`` of ``Synchronous``. The anchor takes as much memory as the weights.

    Source: McDonald, Hall and Mann, "Distributed training strategies for the structured perceptron"
    (2010); Stich, "Local SGD converges fast and communicates little" (2019).

    Args:
        every: optimizer steps from one agreement to the next. It is a field of ``Rounds``;
            ``hvkit.sync.rounds`` counts the steps. Every rank must take equally many.
    """

    def begin(self, weights: Vector) -> State:
        return {"anchor": weights + 0}

    def agree(self, weights: Vector, state: State, group: Ranks) -> Flow[tuple[Vector, State]]:
        anchor = state["anchor"] - (yield Mean(state["anchor"] - weights))
        return anchor, {"anchor": anchor}


@dataclass(frozen=True)
class DiLoCo(Rounds):
    """Each rank takes ``every`` local steps; then an outer optimizer takes one step for all.

    With the anchor a, the weights that the ranks last agreed on, rank w's weights x_w, the outer
    learning rate eta and the outer momentum mu:

        d <- 1/N sum_w (a - x_w)
        v <- mu v + d
        a <- a - eta (d + mu v),    x_w <- a

    This is SGD with Nesterov momentum, with the change of a whole round in place of the gradient.
    ``outer_lr=1, outer_momentum=0`` is ``LocalSGD``. Each rank sends 2 (N-1)/N times the weights'
    bytes in a round. Anchor and velocity take twice the memory of the weights.

    With ``overlap=t`` the changes are sent while the ranks take the first t steps of the next
    round, so the network may take that long. Those steps are not lost: the correction that the
    agreement makes to the weights x_w' at the end of the round is added to the weights t steps
    later:

        x_w <- x_w + (a - x_w')

    Corrections come up to t steps late. While an agreement runs, it takes four times the memory of
    the weights in addition. ``hvkit.settled`` waits for it, and shows the mean of the ranks'
    weights.

    If every round makes the same change, momentum builds up until that change is applied
    eta / (1 - mu) times, which is once with the defaults. A larger product learns faster where the
    inner steps are small, and diverges where they are as large as training tolerates.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
    (2023), with AdamW as the inner optimizer, rounds of 500 steps, eta 0.7 and mu 0.9: there the
    product is 7. For ``overlap``: Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in
    Distributed Training Using Delayed Averaging" (2020); Douillard et al., "Streaming DiLoCo with
    overlapping communication" (2025).

    Args:
        every: optimizer steps from one agreement to the next.
        outer_lr: eta, from 0.
        outer_momentum: mu, from 0 to below 1.
        overlap: t, the steps of the next round during which the changes are sent, below ``every``.
    """

    outer_lr: float = 0.5
    outer_momentum: float = 0.5
    overlap: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("outer_lr", self.outer_lr, least=0)
        check_number("outer_momentum", self.outer_momentum, least=0, below=1)
        if check_count("overlap", self.overlap, 0) >= self.every:
            raise ValueError(
                f"overlap must be below every, which is {self.every}, got {self.overlap}: the "
                "next round ends after so many steps"
            )

    def begin(self, weights: Vector) -> State:
        return {"anchor": weights + 0, "velocity": weights * 0}

    def reset(self, weights: Vector, state: State) -> State:
        return {"anchor": weights + 0, "velocity": state["velocity"]}

    def agree(self, weights: Vector, state: State, group: Ranks) -> Flow[tuple[Vector, State]]:
        change = yield Mean(state["anchor"] - weights)
        velocity = self.outer_momentum * state["velocity"] + change
        anchor = state["anchor"] - self.outer_lr * (change + self.outer_momentum * velocity)
        return anchor, {"anchor": anchor, "velocity": velocity}

    def settle(self, weights: Vector, state: State, group: Ranks) -> Flow[Vector]:
        if not self.overlap:
            return (yield from super().settle(weights, state, group))
        return state["anchor"] - (yield Mean(state["anchor"] - weights))


@dataclass(frozen=True)
class ElasticAveraging(Rounds):
    """After each round ranks and a common centre move towards each other.

    With the centre c, rank w's weights x_w, N ranks and the pull beta:

        d_w <- x_w - c
        x_w <- x_w - beta/N d_w
        c <- c + beta/N sum_w d_w

    Ranks keep a part of their distance, so their weights differ for longer than with ``LocalSGD``,
    and the centre is a moving average over ranks and time. ``hvkit.settled``, checkpoints and
    ``fit``'s validation use the centre as it would be after a round that ends now,
    c + beta mean(x_w - c). After ``fit`` all ranks hold these weights, the new centre. Each rank
    sends 2 (N-1)/N times the weights' bytes in a round. The centre takes as much memory as the
    weights.

    Source: Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD" (2015), the
    synchronous form, with beta 0.9.

    Args:
        every: optimizer steps from one pull to the next.
        pull: beta, above 0 and up to 1.
    """

    pull: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("pull", self.pull, above=0, up_to=1)

    @property
    def same_weights(self) -> bool:
        return False

    def check(self, compression: Compression | None) -> None:
        if compression is not None and compression.keeps_state:
            raise ValueError(
                f"{compression} sends later what it has left out, but with {self} that is still in "
                'the distance from the centre, and would count twice: use "int8", "bf16" or "fp16"'
            )

    def begin(self, weights: Vector) -> State:
        return {"centre": weights + 0}

    def anchor(self, state: State) -> Vector:
        return state["centre"]  # which all ranks hold once training has ended

    def agree(self, weights: Vector, state: State, group: Ranks) -> Flow[tuple[Vector, State]]:
        distance = weights - state["centre"]
        centre = state["centre"] + self.pull * (yield Mean(distance))
        return weights - (self.pull / group.size) * distance, {"centre": centre}

    def settle(self, weights: Vector, state: State, group: Ranks) -> Flow[Vector]:
        return state["centre"] + self.pull * (yield Mean(weights - state["centre"]))


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
