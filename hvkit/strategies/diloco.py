"""Parameter averaging with an outer optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from hvkit.numbers import check_number
from hvkit.strategies.strategy import Comm, Rounds, State, Vector


@dataclass(frozen=True)
class DiLoCo(Rounds):
    """Each rank takes ``every`` steps of its own; then an outer optimizer steps for all.

    With the anchor a, the weights that the ranks last agreed on, rank w's weights x_w, the outer
    learning rate eta and the outer momentum mu:

        d <- 1/N sum_w (a - x_w)
        v <- mu v + d
        a <- a - eta (d + mu v),    x_w <- a

    This is SGD with Nesterov momentum, with the change of a whole round in place of the gradient.
    ``outer_lr=1, outer_momentum=0`` is ``LocalSGD``. Each rank sends 2 (N-1)/N times the weights'
    bytes in a round. Anchor and velocity take twice the memory of the weights.

    Once momentum has built up, a change that is the same in every round counts eta / (1 - mu)
    times. The defaults make that once. More is faster where the steps inside are small, and
    diverges where they are as large as training bears.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
    (2023), with AdamW inside, rounds of 500 steps, eta 0.7 and mu 0.9: seven times.

    Args:
        every: optimizer steps from one agreement to the next.
        outer_lr: eta, from 0.
        outer_momentum: mu, from 0 to below 1.
    """

    outer_lr: float = 0.2
    outer_momentum: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("outer_lr", self.outer_lr, least=0)
        check_number("outer_momentum", self.outer_momentum, least=0, below=1)

    def begin(self, weights: Vector) -> State:
        return {"anchor": weights + 0, "velocity": weights * 0}

    def rebase(self, weights: Vector, state: State) -> State:
        return {"anchor": weights + 0, "velocity": state["velocity"]}

    def agree(self, weights: Vector, state: State, comm: Comm) -> tuple[Vector, State]:
        change = comm.mean(state["anchor"] - weights)
        velocity = self.outer_momentum * state["velocity"] + change
        anchor = state["anchor"] - self.outer_lr * (change + self.outer_momentum * velocity)
        return anchor, {"anchor": anchor, "velocity": velocity}
