"""What a strategy keeps of each weight between rounds, in variables, which graphs can change."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence

import numpy as np
import tensorflow as tf

from hvkit.frameworks.keras.weights.variables import Variables, wide
from hvkit.strategies.strategy import Rounds, State


class StateVariables(MutableMapping[int, State]):
    """A strategy's state of some weights, by number, for ``hvkit.sync.round_state``.

    Args:
        strategy: what the ranks agree on.
        weights: of the model.
    """

    def __init__(self, strategy: Rounds, weights: Variables) -> None:
        self._strategy = strategy
        self._weights = weights
        self._held: dict[int, dict[str, tf.Variable]] = {}
        # Numbers of the weights with a state, in the order in which they began.
        self._begun: dict[int, None] = {}

    def _variables(self, i: int) -> dict[str, tf.Variable]:
        """The variables with the state of a weight, perhaps without values yet."""
        if i not in self._held:
            dtype = wide(self._weights.in_order[i].dtype)
            zeros = np.zeros(self._weights.length(i), dtype.as_numpy_dtype)
            with tf.init_scope():
                self._held[i] = {
                    name: tf.Variable(begun, trainable=False)
                    for name, begun in self._strategy.begin(zeros).items()
                }
        return self._held[i]

    def __getitem__(self, i: int) -> State:
        if i not in self._begun:
            raise KeyError(i)
        return {name: variable.numpy() for name, variable in self._held[i].items()}

    def __setitem__(self, i: int, state: State) -> None:
        for name, variable in self._variables(i).items():
            # A copy: the variable may change its memory in place.
            variable.assign(tf.constant(state[name]))
        self._begun[i] = None

    def __delitem__(self, i: int) -> None:
        del self._begun[i]  # graphs hold the variables

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._begun))

    def __len__(self) -> int:
        return len(self._begun)

    def joined(self, numbers: Sequence[int]) -> State:
        """The state of some weights, one after the other, inside a graph."""
        states = [self._variables(i) for i in numbers]
        return {name: tf.concat([each[name] for each in states], axis=0) for name in states[0]}

    def assign_joined(self, numbers: Sequence[int], state: State) -> None:
        """Set what ``joined`` returned."""
        for name, vector in state.items():
            pieces = tf.split(vector, [self._weights.length(i) for i in numbers])
            for i, piece in zip(numbers, pieces, strict=True):
                self._variables(i)[name].assign(piece)
