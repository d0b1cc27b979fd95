"""Sharding ``keras.utils.PyDataset``, whose items are batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hvkit.data.arrays import digest_of_rows
from hvkit.data.order import FixedRandomness, Share, seed_from


class ShardedPyDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """One rank's batches of another PyDataset.

    Batch i is batch i*N + rank of the original. The samples of the last N batches (or fewer) are
    divided evenly, so all ranks have batches of one size there too. Like Keras, it assumes that
    all batches except the last have one size.

    Args:
        inner: the dataset; its ``workers``, ``use_multiprocessing`` and ``max_queue_size`` apply.
        share: rank and size.
        seed: the seed of the random numbers in ``on_epoch_begin`` and ``on_epoch_end``, together
            with the number of epochs that have ended.
    """

    def __init__(self, inner: keras.utils.PyDataset, share: Share, seed: int) -> None:
        super().__init__(
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self._inner, self._share, self._seed = inner, share, seed
        self._epoch = 0
        self._resumed = False
        self._in_last: tuple[int, int] | None = None

    @property
    def num_batches(self) -> int | None:
        """The number of this rank's batches; None if the original is infinite."""
        total = self._inner.num_batches
        if total is None:
            return None
        groups: int = -(-total // self._share.size)
        if not self._share.exact or groups == 0:
            return groups
        # Without repetition the last batch of some ranks may be empty; they leave it out.
        if self._in_last is None or self._in_last[0] != total:
            self._in_last = total, _rows(self._last_group(total))
        return groups if self._share.count(self._in_last[1]) else groups - 1

    def __len__(self) -> int:
        if (batches := self.num_batches) is None:
            raise TypeError("this PyDataset is infinite and has no length")
        return batches

    def __getitem__(self, index: int) -> Any:
        total = self._inner.num_batches
        if total is None or index < (total - 1) // self._share.size:
            return self._inner[index * self._share.size + self._share.rank]
        if index > (total - 1) // self._share.size:
            raise IndexError(f"batch {index} of {self.num_batches}")
        batches = self._last_group(total)
        mine = self._share.of(_rows(batches))
        return _map(lambda *arrays: np.concatenate(arrays)[mine], *batches)

    def _last_group(self, total: int) -> list[Any]:
        start = (total - 1) // self._share.size * self._share.size
        return [_map(_as_numpy, self._inner[index]) for index in range(start, total)]

    def on_epoch_begin(self) -> None:
        self._resumed = False
        with FixedRandomness(seed_from(self._seed, self._random_epoch(), 0)):
            self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._resumed:  # fit calls it before its first epoch too, as the saved run's fit did
            self._resumed = False
            return
        with FixedRandomness(seed_from(self._seed, self._random_epoch(), 1)):
            self._inner.on_epoch_end()
        self._epoch += 1

    def state_dict(self) -> dict[str, int]:
        """The number of calls of ``on_epoch_end``."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Call the original's ``on_epoch_end`` until its calls are those of the saved run.

        Raises:
            ValueError: it was already called more often.
        """
        if state["epoch"] < self._epoch:
            raise ValueError(
                f"on_epoch_end was called {self._epoch} times, but in the saved run only "
                f"{state['epoch']} times: restore before the first fit"
            )
        self._resumed = False
        while self._epoch < state["epoch"]:
            self.on_epoch_end()
        self._resumed = True

    def _random_epoch(self) -> int:
        # Ranks may evaluate at different times but need a common order.
        return 0 if self._share.exact else self._epoch


def facts_of(inner: keras.utils.PyDataset, share: Share, seed: int) -> list[str]:
    """The facts that must be equal on all ranks: the length, and the labels of the first batch.

    Not its inputs: the dataset may augment them at random.
    """
    facts = [f"PyDataset of {inner.num_batches} batches"]
    if share.size > 1 and not share.exact and inner.num_batches != 0:
        with FixedRandomness(seed_from(seed, 0, 2)):
            batch = inner[0]
        if isinstance(batch, tuple | list) and len(batch) > 1 and batch[1] is not None:
            labels = _map(_as_numpy, batch[1])
            facts.append(f"labels of the first batch with sha256 {digest_of_rows(labels)}")
    return facts


def _map(function: Any, *batches: Any) -> Any:
    """``function`` of the arrays at each place of the batches' common structure."""
    first = batches[0]
    if isinstance(first, dict):
        return {key: _map(function, *(batch[key] for batch in batches)) for key in first}
    if isinstance(first, tuple | list):
        parts = [_map(function, *each) for each in zip(*batches, strict=True)]
        return tuple(parts) if isinstance(first, tuple) else parts
    return None if first is None else function(*batches)


def _as_numpy(array: Any) -> Any:
    return keras.ops.convert_to_numpy(array) if keras.ops.is_tensor(array) else np.asarray(array)


def _rows(batches: list[Any]) -> int:
    lengths: list[list[int]] = []
    for batch in batches:
        found: list[int] = []
        _map(lambda array, found=found: found.append(len(array)), batch)
        lengths.append(found)
    return sum(each[0] for each in lengths)
