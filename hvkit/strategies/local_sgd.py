"""Parameter averaging."""

from __future__ import annotations

from dataclasses import dataclass

from hvkit.communication.exchanges import Mean, Ranks
from hvkit.strategies.strategy import Flow, Rounds, State, Vector


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
