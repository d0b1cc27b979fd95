"""Hooks of PyTorch's port around each update of an optimizer, in one order.

It calls these hooks around ``step()`` (``frameworks/pytorch/step_hooks.py``). Keras on PyTorch has
them too, since PyTorch's port makes its updates. Keras on TensorFlow has none: there an update is a
part of a graph, and the port wraps methods of the optimizer, in the order that
``frameworks/keras/on_tensorflow.py`` has.

Several features act around an update, each as a ``Feature`` with its place. The places say what
runs when, not the order in which ``distribute`` adds them. Places nest, the first is the
outermost::

    place       before               gradients            after                      failed
    TIMELINE                                              marks the step
    RANKS       refuses, adds new    averages them        counts the step;
                weights; begins a                         ends a round, or
                round                                     writes to the server
    NONFINITE                        takes them away,     puts them back             puts them back
                                     to skip the step
    DIVISION    refuses a closure;   hides those of       puts them back, sends      puts them back
                compares the order   other ranks'         what this rank has
                of layers            weights              updated
    RATE                                                  counts the step

One update runs every ``before`` and then every ``gradients``, from the first place to the last.
After the update, every ``after`` runs, from the last place to the first. So when a feature's
``after`` runs, those further in have undone their changes, and it finds the gradients as its own
``gradients`` has left them. If the update raises, ``failed`` runs in place of ``after``. If the
``after`` of one feature raises, ``failed`` runs for those further out.

Closest to the update are ``update_begins`` and ``update_ends``, between which RATE multiplies the
learning rate. The script's own hooks see the rate that the user set. Those that it has registered
after the call of ``distribute`` to run before an update run after ``gradients``, and see what the
update uses: not the gradients of weights that other ranks update, and none of a step that is
skipped. Those that it had registered earlier see the gradients as the backward pass has left them.
After an update it is the other way round.

An update may compute its gradients itself, in a closure, which sees the user's rate. Then
``gradients`` runs after each call of the closure instead, and after it ``loss``, from the last
place to the first, on what the closure has returned.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Closure = Callable[[], Any]


class Order(enum.IntEnum):
    """The places at which features act; the first is the outermost."""

    TIMELINE = enum.auto()
    RANKS = enum.auto()
    NONFINITE = enum.auto()
    DIVISION = enum.auto()
    RATE = enum.auto()


@dataclass(frozen=True)
class Feature:
    """The functions that one feature has around an update.

    Functions that get an optimizer get the one that updates: of several inside each other the
    outermost.

    Attributes:
        place: where it acts.
        before: gets also the closure that computes the gradients, or None.
        gradients: called with the gradients that the update is to use.
        renewed: whether there are gradients that ``gradients`` has not seen.
        loss: computes the loss that the update gets from the one that the closure returned.
        update_begins: called just before the update, inside of all hooks of the script, with the
            innermost optimizer.
        update_ends: called when the update has ended or raised, and while it calls a closure.
        after: called after the update.
        failed: called after an update that raised.
    """

    place: Order
    before: Callable[[Any, Closure | None], None] | None = None
    gradients: Callable[[Any], None] | None = None
    renewed: Callable[[], bool] | None = None
    loss: Callable[[Any], Any] | None = None
    update_begins: Callable[[Any], None] | None = None
    update_ends: Callable[[], None] | None = None
    after: Callable[[Any], None] | None = None
    failed: Callable[[Any], None] | None = None
