"""Sharding ``keras.utils.PyDataset``, whose items are batches."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from hvkit.communication.collectives import from_rank, require_equal
from hvkit.data.arrays import digest_of_rows
from hvkit.data.rank_samples import Split, seed_from
from hvkit.random_states import FixedRandomness, Generators, as_text, from_text


class ShardedPyDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """One rank's batches of another PyDataset.

    Batch i is batch i*N + rank of the original. The samples of the last N batches (or fewer) are
    divided evenly, so that all ranks' batches have the same size there, too. But if these batches
    have different shapes, apart from a smaller last one, they stay whole, and some are repeated.
    It passes other attributes on to the original. ``on_epoch_begin`` and ``on_epoch_end`` draw
    random numbers by the seed and the number of epochs that have ended; without a seed, those that
    rank 0 would draw.
    """

    def __init__(self, inner: keras.utils.PyDataset, split: Split, seed: int | None) -> None:
        super().__init__(
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self._inner, self._split, self._seed = inner, split, seed
        self._epoch = 0
        self._resumed = False
        # For each call of on_epoch_end, the states of those generators that it drew from.
        self._drawn: list[dict[str, str]] = []
        self._has_last: tuple[int, bool] | None = None

    @property
    def num_batches(self) -> int | None:
        total: int | None = self._inner.num_batches
        if total is None or self._split.size == 1:
            return total
        groups: int = -(-total // self._split.size)
        if not self._split.exact or groups == 0:
            return groups
        # Without repetition, the last batch of some ranks may be empty: then it is left out.
        if self._has_last is None or self._has_last[0] != total:
            self._has_last = total, self._last(total) is not None
        return groups if self._has_last[1] else groups - 1

    def __len__(self) -> int:
        if (batches := self.num_batches) is None:
            raise TypeError("this PyDataset is infinite and has no length")
        return batches

    def __getitem__(self, index: int) -> Any:
        total = self._inner.num_batches
        if self._split.size == 1:
            return self._inner[index]
        last = None if total is None else (total - 1) // self._split.size
        if last is None or index < last:
            return self._inner[index * self._split.size + self._split.rank]
        if index > last:
            raise IndexError(f"batch {index} of {self.num_batches}")
        return self._last(total)

    def _last(self, total: int) -> Any:
        """This rank's part of the last group of batches; None if it has none."""
        rank, size = self._split.rank, self._split.size
        start = (total - 1) // size * size
        batches = [_in_numpy(self._inner[index]) for index in range(start, total)]
        if not _have_one_shape(batches):
            if self._split.exact and rank >= len(batches):
                return None
            return batches[rank % len(batches)]
        rows = sum(_shapes(batch)[0][0] for batch in batches)
        if not self._split.count(rows):
            return None
        positions = self._split.of(rows)
        return keras.tree.map_structure(
            lambda *arrays: None if arrays[0] is None else np.concatenate(arrays)[positions],
            *batches,
        )

    def on_epoch_begin(self) -> None:
        self._resumed = False
        if self._has_own("on_epoch_begin"):
            with self._randomness(0):
                self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._resumed:  # load_state_dict has already made the call before fit's first epoch
            self._resumed = False
        elif self._has_own("on_epoch_end"):
            self._end_epoch(self._randomness(1))
        else:
            self._end_epoch(nullcontext())

    def _end_epoch(self, randomness: AbstractContextManager[None]) -> None:
        generators = Generators()
        with randomness:
            before = as_text(generators.states())
            self._inner.on_epoch_end()
            after = as_text(generators.states())
        drawn = {name: each for name, each in before.items() if each != after[name]}
        self._drawn.append({} if self._seed is not None else drawn)
        self._epoch += 1

    def _has_own(self, hook: str) -> bool:
        return getattr(type(self._inner), hook) is not getattr(keras.utils.PyDataset, hook)

    def _randomness(self, hook: int) -> AbstractContextManager[None]:
        """A context that sets the random generators for ``on_epoch_begin`` (0) or ``on_epoch_end``.

        A collective in training, unless there is a seed.
        """
        if self._split.size == 1 and self._seed is None:
            return nullcontext()
        if self._split.exact:  # ranks may evaluate at different times, but need the same order
            return FixedRandomness(seed_from(self._seed or 0, 0, hook))
        if self._seed is not None:
            return FixedRandomness(seed_from(self._seed, self._epoch, hook))
        require_equal(
            "epoch of a sharded PyDataset",
            [f"epoch {self._epoch}"],
            "iterate over it equally often on every rank",
            "fit with a sharded PyDataset",
        )
        return FixedRandomness(from_text(from_rank(0, as_text(Generators().states()))))

    def state_dict(self) -> dict[str, Any]:
        """The number of calls of ``on_epoch_end``, and the generators' states before each."""
        return {"epoch": self._epoch} | ({"random": self._drawn} if any(self._drawn) else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Call the original's ``on_epoch_end`` as often as the saved run did."""
        if state["epoch"] < self._epoch:
            raise ValueError(
                f"on_epoch_end was called {self._epoch} times, but in the saved run only "
                f"{state['epoch']} times: restore before the first fit"
            )
        drawn = state.get("random", [{}] * state["epoch"])
        for epoch in range(self._epoch, state["epoch"]):
            seed = seed_from(self._seed or 0, 0 if self._split.exact else epoch, 1)
            self._end_epoch(FixedRandomness(from_text(drawn[epoch]) or seed))
        self._drawn = list(drawn)
        self._resumed = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is being unpickled, or copied
            raise AttributeError(name)
        return getattr(self._inner, name)


def shard_pydataset(
    inner: keras.utils.PyDataset, split: Split, seed: int | None
) -> tuple[ShardedPyDataset, list[str]]:
    """This rank's batches; and the facts that must be equal: length, labels of the first batch.

    Not its inputs: the dataset may augment them at random.
    """
    part = ShardedPyDataset(inner, split, seed)
    facts = [f"PyDataset of {inner.num_batches} batches"]
    if split.size > 1 and not split.exact and inner.num_batches != 0:
        with FixedRandomness(seed_from(seed or 0, 0, 2)):
            batch = inner[0]
        if isinstance(batch, tuple | list) and len(batch) > 1 and batch[1] is not None:
            digest = digest_of_rows(_in_numpy(batch[1]))
            facts.append(f"labels of the first batch with sha256 {digest}")
    return part, facts


def _in_numpy(batch: Any) -> Any:
    def array_of(value: Any) -> Any:
        if value is None:
            return None
        is_tensor = keras.ops.is_tensor(value)
        return keras.ops.convert_to_numpy(value) if is_tensor else np.asarray(value)

    return keras.tree.map_structure(array_of, batch)


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [array.shape for array in keras.tree.flatten(batch) if array is not None]


def _have_one_shape(batches: list[Any]) -> bool:
    """Whether samples have one shape, and batches one size, except for a smaller last one."""
    of_samples = [[shape[1:] for shape in _shapes(batch)] for batch in batches]
    sizes = [_shapes(batch)[0][0] for batch in batches]
    same = all(each == of_samples[0] for each in of_samples)
    return same and len({*sizes[:-1]}) <= 1 and sizes[-1] <= sizes[0]
