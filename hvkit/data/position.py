"""How far a loader has come, counted in samples of all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Position:
    """Epochs that are done, and samples of the current one that all ranks were given."""

    def __init__(self) -> None:
        self.epoch = 0
        self.samples = 0
        self._iteration: object | None = None
        self._left = False

    def begin(self) -> object:
        """A new iteration: the rest of the current epoch after a load, else a new epoch.

        Returns what :meth:`advance` and :meth:`end` need to be told: they do nothing for an
        iteration that is not the latest.
        """
        if self._iteration is not None:
            self.epoch, self.samples = self.epoch + 1, 0
        self._iteration, self._left = object(), False
        return self._iteration

    def advance(self, iteration: object, samples: int) -> None:
        """The ranks were given so many more samples."""
        if iteration is self._iteration:
            self.samples += samples

    def end(self, iteration: object) -> None:
        """The epoch is over."""
        if iteration is self._iteration:
            self.epoch, self.samples, self._iteration = self.epoch + 1, 0, None

    def leave(self, iteration: object) -> None:
        """The loop over the epoch was left before its end."""
        self._left = self._left or iteration is self._iteration

    def end_if_left(self) -> None:
        """Take an epoch that was left for done."""
        if self._left:
            self.end(self._iteration)
            self._left = False

    def save(self) -> dict[str, int]:
        """The position, to be passed to :meth:`load`."""
        return {"epoch": self.epoch, "samples": self.samples}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a position that was saved.

        Raises:
            ValueError: it is none that :meth:`save` returned.
        """
        for name in ("epoch", "samples"):
            value = state.get(name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(
                    "the state of a loader must be what its state_dict() returned, "
                    f"{{'epoch': int, 'samples': int}}; got {dict(state)!r}"
                )
        self.epoch, self.samples = state["epoch"], state["samples"]
        self._iteration, self._left = None, False
