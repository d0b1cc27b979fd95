"""What hvkit does around each update of an optimizer, in one order.

Several features act around an update. Each adds a ``Feature`` for its place to the optimizer's
``UpdateHooks``, and a framework's port calls these hooks once around the optimizer's update. The
places say what runs when, not the order in which ``distribute`` adds them. Places nest, the
first is the outermost::

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

One update runs ``before`` and then ``gradients`` from the first place to the last, multiplies the
learning rate, makes the update, restores the rate, and runs ``after`` from the last place to the
first: a feature undoes what it did while what it found is as it left it. If the update raises, the
rate is restored and ``failed`` runs in place of ``after``.

The script's own hooks see the rate that the user set. Those that it has registered after the call
of ``distribute`` to run before an update run after ``gradients``, and see what the update uses: not
the gradients of weights that other ranks update, and none of a step that is skipped. Those that it
had registered earlier see the gradients as the backward pass has left them. After an update it is
the other way round.

An update may compute its gradients itself, in a closure, which sees the user's rate. Then
``gradients`` runs after each call of the closure instead, and after it ``loss``, from the last
place to the first, on what the closure has returned.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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
    """What one feature does around an update.

    All functions get the optimizer that updates: of several inside each other the outermost.

    Attributes:
        place: where it acts.
        before: gets also the closure that computes the gradients, or None.
        gradients: called with the gradients that the update is to use.
        renewed: whether there are gradients that ``gradients`` has not seen.
        loss: what the update gets as its loss, from what the closure returned.
        after: called after the update.
        failed: called after an update that raised.
    """

    place: Order
    before: Callable[[Any, Closure | None], None] | None = None
    gradients: Callable[[Any], None] | None = None
    renewed: Callable[[], bool] | None = None
    loss: Callable[[Any], Any] | None = None
    after: Callable[[Any], None] | None = None
    failed: Callable[[Any], None] | None = None


class Rate(Protocol):
    """Multiplies the learning rates of an optimizer while its update reads them."""

    def multiply(self, optimizer: Any) -> None:
        """Let the optimizer hold multiplied rates."""

    def restore(self) -> None:
        """Let it hold the user's again, if it does not."""


class UpdateHooks:
    """The features around the updates of one optimizer, and of those inside it.

    An update may run others inside it: of a parent class, or of an optimizer that this one holds.
    They belong to the outermost one, which alone has hooks. But if new gradients have come since
    that one began, it has computed them itself, or it has failed without a call of ``fail``: then
    the hooks run around the inner one instead.

    Attributes:
        rate: multiplies the learning rate; None where updates use the user's.
        depth: how many updates are running inside each other.
    """

    def __init__(self) -> None:
        self.rate: Rate | None = None
        self.depth = 0
        self._features: list[Feature] = []
        self._put_in_order()

    def add(self, feature: Feature) -> None:
        """Let a feature act around updates.

        Raises:
            ValueError: another has its place.
        """
        if any(each.place is feature.place for each in self._features):
            raise ValueError(f"two features at {feature.place.name} around an optimizer's updates")
        self._features.append(feature)
        self._put_in_order()

    def _put_in_order(self) -> None:
        inwards = sorted(self._features, key=lambda feature: feature.place)
        outwards = inwards[::-1]
        self._before = [each.before for each in inwards if each.before]
        self._gradients = [each.gradients for each in inwards if each.gradients]
        self._renewed = [each.renewed for each in inwards if each.renewed]
        self._loss = [each.loss for each in outwards if each.loss]
        self._after = [each.after for each in outwards if each.after]
        self._failed = [each.failed for each in outwards if each.failed]

    def begin(self, optimizer: Any, closure: Closure | None = None) -> Closure | None:
        """Before an update; one inside another is only counted, but for new gradients.

        Args:
            optimizer: that updates.
            closure: computes the gradients; None if they are there.

        Returns:
            What to call in place of the closure.
        """
        if self.depth and closure is None and any(renewed() for renewed in self._renewed):
            self.fail(optimizer, 0)
        if self.depth:
            self.depth += 1
            return closure
        self.depth = 1
        try:
            for before in self._before:
                before(optimizer, closure)
            if closure is None:
                for gradients in self._gradients:
                    gradients(optimizer)
        except BaseException:
            self.fail(optimizer, 0)
            raise
        return closure and self._around(closure, optimizer)

    def _around(self, closure: Closure, optimizer: Any) -> Closure:
        if not self._gradients and not self._loss:
            return closure

        def with_hooks() -> Any:
            loss = closure()
            for gradients in self._gradients:
                gradients(optimizer)
            for changed in self._loss:
                loss = changed(loss)
            return loss

        return with_hooks

    def end(self, optimizer: Any) -> None:
        """After an update; what has begun inside another ends inside it."""
        if not self.depth:  # the hooks ran around an update inside this one
            return
        self.depth -= 1
        if not self.depth:
            for after in self._after:
                after(optimizer)

    def fail(self, optimizer: Any, depth: int) -> None:
        """After an update that raised.

        Args:
            optimizer: that updated.
            depth: how many updates were running when it began.
        """
        if self.depth and not depth:
            for failed in self._failed:
                failed(optimizer)
        self.depth = depth
