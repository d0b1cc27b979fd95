"""What a strategy keeps of each weight between rounds, and vectors of several weights.

The strategy sees all weights of an optimizer of one kind as one vector. What it keeps is stored by
weight, because several optimizers may update the same one, in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import numpy as np

from hvkit.strategies.strategy import Rounds, State, Vector
from hvkit.sync.local_weights import Weights

# What begins the names, in a checkpoint, of what agreements will add to the weights.
_PENDING = "due-"


class RoundState:
    """A strategy's state of the weights of one model, by number.

    Args:
        strategy: what the ranks agree on.
        weights: those of the model.
        kept: where to keep it, by number.

    Attributes:
        pending: what overlapped agreements will add to the weights.
    """

    def __init__(
        self, strategy: Rounds, weights: Weights, kept: MutableMapping[int, State]
    ) -> None:
        self.pending: dict[int, Vector] = {}
        self._strategy = strategy
        self._weights = weights
        self._kept = kept

    def begin(self, i: int) -> None:
        """Begin with a weight's value, unless a checkpoint has set its state."""
        if i not in self._kept:
            self._kept[i] = self._strategy.begin(self._weights.read(i))

    def begun(self) -> list[int]:
        """Numbers of the weights with a state."""
        return list(self._kept)

    def anchor(self, i: int) -> Vector | None:
        """The values that the ranks have last agreed on, if the strategy has them."""
        return self._strategy.anchor(self._kept[i])

    def moved(self, i: int) -> bool:
        """Whether a weight is not what the ranks have last agreed on."""
        anchor = self.anchor(i)
        return anchor is not None and not self._weights.holds(i, anchor)

    def set_anchor(self, i: int, values: Vector | None = None) -> None:
        """Begin a round with other values, as if the ranks had agreed on them.

        Args:
            i: the weight's number.
            values: None for what the weight holds.
        """
        values = self._weights.read(i) if values is None else values
        self._kept[i] = self._strategy.reset(values, self._kept[i])

    def set_anchors(self) -> None:
        """Begin a round with what all weights hold."""
        for i in self._kept:
            self.set_anchor(i)

    def clear(self) -> None:
        """Forget everything."""
        self.pending.clear()
        self._kept.clear()

    def values(self, together: Sequence[int]) -> Vector:
        """Some weights, with what is pending for them, one after the other."""
        return self._weights.join([self._value(i) for i in together])

    def _value(self, i: int) -> Vector:
        held = self._weights.read(i)
        return held + self.pending[i] if i in self.pending else held

    def kept(self, together: Sequence[int]) -> State:
        """The state of some weights, one after the other."""
        states = [self._kept[i] for i in together]
        return {n: self._weights.join([state[n] for state in states]) for n in states[0]}

    def keep(self, together: Sequence[int], state: State) -> None:
        """Set what ``kept`` returns."""
        split = {name: self._weights.split(vector, together) for name, vector in state.items()}
        for at, i in enumerate(together):
            self._kept[i] = {name: pieces[at] for name, pieces in split.items()}

    def split(self, together: Sequence[int], vector: Vector) -> list[tuple[int, Vector]]:
        """The numbers of weights, each with its part of a vector."""
        return list(zip(together, self._weights.split(vector, together), strict=True))

    def write(self, together: Sequence[int], vector: Vector) -> None:
        """Set weights from a vector."""
        for i, values in self.split(together, vector):
            self._weights.write(i, values)

    def add_pending(self, numbers: Iterable[int]) -> None:
        """Add what is pending to some weights."""
        for i in sorted(self.pending.keys() & set(numbers)):
            self._weights.write(i, self._value(i))
            del self.pending[i]

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves, the same on every rank."""
        return {
            f"{name}.{i}": self._weights.to_numpy(vector)
            for i, state in self._kept.items()
            for name, vector in state.items()
        }

    def load(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``arrays`` returned."""
        states: dict[int, State] = {}
        for key, array in arrays.items():
            name, _, number = key.partition(".")
            i = int(number)
            states.setdefault(i, {})[name] = self._weights.from_numpy(array, i)
        self._kept.update(states)

    def own_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank."""
        return {f"{_PENDING}{i}": self._weights.to_numpy(v) for i, v in self.pending.items()}

    def load_own(self, arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Set what ``own_arrays`` returned, and return the arrays that are not of it."""
        for key in arrays:
            if key.startswith(_PENDING):
                i = int(key.removeprefix(_PENDING))
                self.pending[i] = self._weights.from_numpy(arrays[key], i)
        return {key: array for key, array in arrays.items() if not key.startswith(_PENDING)}
