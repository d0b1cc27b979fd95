"""The state of a compression from one mean to the next: residuals, and PowerSGD's factors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvkit.communication.exchanges import Exchange, Ranks, Tensor
from hvkit.compression import Compression
from hvkit.compression.compression import Ops, Shape
from hvkit.strategies.strategy import Averaging
from hvkit.sync.port import Sync

Arrays = Mapping[str, np.ndarray[Any, Any]]


class CompressionState:
    """The state that a compression has for each parameter, by a key: its number, or its id."""

    def __init__(self, compression: Compression, ops: Ops, group: Ranks) -> None:
        self.compression = compression
        # The state, by key and name; a pending one is kept once an update has used the means.
        self.kept: dict[Hashable, dict[str, Tensor]] = {}
        self.pending: dict[Hashable, dict[str, Tensor]] = {}
        self._ops = ops
        self._group = group
        # The state from a checkpoint, for parameters that have no state yet.
        self._loaded: dict[Hashable, dict[str, np.ndarray[Any, Any]]] = {}

    def suits(self, dtype: Any) -> bool:
        """Whether vectors of a dtype are compressed; ValueError if they must be, and cannot."""
        name = getattr(dtype, "name", str(dtype)).removeprefix("torch.")
        suits = name == "float32" or not self.compression.float32_only
        if not suits and self.compression.exclusive:
            raise ValueError(
                f"{self.compression} is for parameters of at most 32 bits, got {name}: train the "
                "model in float32, or use hvkit.Synchronous()"
            )
        return suits

    def reduce(
        self, keys: Sequence[Hashable], shapes: Sequence[Shape], vector: Tensor
    ) -> Generator[Exchange, Tensor, Tensor]:
        """The exchanges that average a vector; return the mean. Its new state is pending.

        The vector, of shape (n,), has the parameters' gradients or changes one after the other. If
        it is an array of NumPy, the mean is one, too.
        """
        in_numpy = isinstance(vector, np.ndarray)
        if in_numpy:
            vector = self._ops.constant(vector, vector)
        for key, shape in zip(keys, shapes, strict=True):
            if key not in self.kept:
                self.kept[key] = self._begin(key, shape, vector)
        states = [self._now(key) for key in keys]
        state = {name: [each[name] for each in states] for name in states[0]}
        flow = self.compression.reduce(vector, shapes, state, self._ops, self._group)
        mean, state = yield from flow
        for at, key in enumerate(keys):
            self.pending[key] = {name: values[at] for name, values in state.items()}
        return self._ops.to_numpy(mean) if in_numpy else mean

    def _begin(self, key: Hashable, shape: Shape, like: Tensor) -> dict[str, Tensor]:
        begun = {**self.compression.begin(shape), **self._loaded.pop(key, {})}
        return {name: self._ops.constant(array, like) for name, array in begun.items()}

    def _now(self, key: Hashable) -> dict[str, Tensor]:
        return self.kept[key]

    def commit(self, keys: Iterable[Hashable]) -> None:
        """Keep the new state of the parameters of which an update has used the means."""
        for key in keys:
            if key in self.pending:
                self.kept[key] = self.pending.pop(key)

    def start_over(self) -> None:
        self.kept.clear()
        self.pending.clear()
        self._loaded.clear()

    def arrays(
        self, names: Iterable[str], keys: Sequence[Hashable]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """The state under these names, for a checkpoint: by name and index in ``keys``."""
        found = {}
        for i, key in enumerate(keys):
            for name in names:
                if key in self.kept:
                    found[f"{name}.{i}"] = self._ops.to_numpy(self.kept[key][name])
                elif name in self._loaded.get(key, ()):
                    found[f"{name}.{i}"] = self._loaded[key][name]
        return found

    def load(self, arrays: Arrays, keys: Sequence[Hashable]) -> None:
        """Set what ``arrays`` returned, after ``start_over``."""
        for text, array in arrays.items():
            name, _, i = text.partition(".")
            self._loaded.setdefault(keys[int(i)], {})[name] = array.copy()


class CompressionSync(Sync):
    """Keeps the state of a compression of gradients."""

    def __init__(
        self,
        strategy: Averaging,
        compression: Compression | None,
        states: Mapping[str, CompressionState],
        keys: Callable[[], Sequence[Hashable]],
    ) -> None:
        self.strategy = strategy
        self.compression = compression
        self._states = states
        self._keys = keys

    def start_over(self) -> None:
        for each in self._states.values():
            each.start_over()

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        return self._arrays(lambda compression: compression.common)

    def load_state(self, arrays: Arrays, *, in_round: bool) -> None:
        self.start_over()
        self.load_rank_state(arrays)

    def rank_state(self) -> dict[str, np.ndarray[Any, Any]]:
        return self._arrays(lambda compression: compression.per_rank)

    def load_rank_state(self, arrays: Arrays) -> None:
        for prefix, each in self._states.items():
            of_it = {k.removeprefix(prefix): a for k, a in arrays.items() if k.startswith(prefix)}
            each.load(of_it, self._keys())

    def _arrays(
        self, names: Callable[[Compression], Sequence[str]]
    ) -> dict[str, np.ndarray[Any, Any]]:
        return {
            f"{prefix}{key}": array
            for prefix, each in self._states.items()
            for key, array in each.arrays(names(each.compression), self._keys()).items()
        }
