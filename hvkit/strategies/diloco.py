"""Parameter averaging with an outer optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from hvkit.argument_checks import check_count, check_number
from hvkit.communication.exchanges import Mean, Ranks
from hvkit.strategies.strategy import Flow, Rounds, State, Vector


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
