"""Averaging gradients in every step: the default."""

from __future__ import annotations

from dataclasses import dataclass

from hvkit.strategies.strategy import Averaging


@dataclass(frozen=True)
class Synchronous(Averaging):
    """Every update uses the mean over ranks of the ranks' gradients.

    With N ranks, weights x, rank w's gradient g_w(x) and the optimizer's update U:

        x <- U(x, 1/N sum_w g_w(x))

    N ranks with batch size B train the model that one process trains with batch size N*B. A ring
    allreduce sends 2 (N-1)/N times the gradients' bytes from each rank in each step, while backward
    computes the rest.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017), and
    for the ring, Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in
    TensorFlow" (2018).
    """


SYNCHRONOUS = Synchronous()  # the default
