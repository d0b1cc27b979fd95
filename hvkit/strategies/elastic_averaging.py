"""Elastic averaging: ranks that stay near a centre, and explore around it."""

from __future__ import annotations

from dataclasses import dataclass

from hvkit.argument_checks import check_number
from hvkit.communication.exchanges import Mean, Ranks
from hvkit.compression import Compression
from hvkit.strategies.strategy import Flow, Rounds, State, Vector


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
