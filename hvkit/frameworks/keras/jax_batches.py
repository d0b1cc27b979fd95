"""The batches of Keras on JAX: one of all ranks in each step of ``fit`` and the like.

Keras has its distribution place a batch, and its iterator of an epoch count them. In ``evaluate``
and ``predict``, a rank that has no more rows takes part without any, until no rank has some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import jax
import keras
import numpy as np
from keras.src.backend.jax import trainer

from hvkit.communication.collectives import gather, pickled, unpickled
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.jax import batches
from hvkit.frameworks.jax.shardings import position, replicated, sharded_by_rows

# The epoch of ``fit``; empty outside. And the number of rows of each part of the last batch.
_epoch: list[int] = []
_last_counts: list[int] = []

_distribute_data = trainer._distribute_data
_get_iterator = trainer.JAXEpochIterator._get_distributed_iterator
_enumerate_iterator = trainer.JAXEpochIterator._enumerate_iterator


class OfRanks(keras.distribution.DataParallel):  # type: ignore[misc]
    """Each rank's batch is a part of the batch of all ranks.

    If it ``trains``, all ranks must have equally many batches.
    """

    def __init__(self, model: Any, *, trains: bool) -> None:
        devices = np.array(keras.distribution.list_devices())
        mesh = keras.distribution.DeviceMesh(devices.shape, ["ranks"], devices)
        super().__init__(device_mesh=mesh, auto_shard_dataset=False)
        self.model = ref(model)  # which keeps this one
        self.trains = trains

    def get_variable_layout(self, variable: Any) -> Any:
        """None for a new variable: ranks may draw other values, until rank 0's are placed."""
        return getattr(variable, "_layout", None)


class Epochs(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the epoch, so that ranks with other numbers of batches are named."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        _epoch[:] = [epoch]


def end_fit() -> None:
    """Forget the epoch, also after an error, at which ranks may be in different ones."""
    _epoch.clear()


def end_pass(method: str) -> None:
    """Agree that no rank has another batch of ``evaluate`` or ``predict``; a collective."""
    batches.end(_point(), method)


def install() -> None:
    """Replace functions of Keras by this module's, which change nothing for other models."""
    trainer._distribute_data = one_batch
    trainer.JAXEpochIterator._get_distributed_iterator = _of_all_ranks
    trainer.JAXEpochIterator._enumerate_iterator = _enumerate_of_all_ranks


def one_batch(data: Any, layouts: Any = None) -> Any:
    """Replaces Keras's function, which does not check that the ranks' rows fit together.

    A collective, for models that the ranks train together.
    """
    if (ranks := _distribution()) is None:
        return _distribute_data(data, layouts)
    leaves, structure = jax.tree.flatten(data)
    arrays = [batches.rows_of(leaf) for leaf in leaves]
    made, _last_counts[:] = batches.as_one(arrays, str(structure), _point(), ranks.model())
    return jax.tree.unflatten(structure, made)


def own_rows(model: Any, predict: Any) -> Any:
    """``predict_function`` whose outputs are this rank's rows, as an array of NumPy."""

    def own_part(output: jax.Array) -> np.ndarray[Any, Any]:
        # XLA may have divided it in another way, as where weights are divided.
        part, in_parts = position().batch, batches.are_in_parts(_last_counts)
        sharding = sharded_by_rows() if in_parts else replicated(output.shape)
        output = jax.jit(lambda rows: rows, out_shardings=sharding)(output)
        if in_parts:
            shards = sorted(output.addressable_shards, key=lambda each: each.index[0].start or 0)
            return np.concatenate([each.data for each in shards])
        start = sum(_last_counts[:part])
        return np.asarray(output)[start : start + _last_counts[part]]

    def predict_own_rows(state: Any, iterator: Any) -> tuple[Any, Any]:
        if model.steps_per_execution > 1:
            raise ValueError(
                f"predict on several ranks needs steps_per_execution=1 in compile, got "
                f"{model.steps_per_execution}: rows of several batches would be in another order"
            )
        outputs, state = predict(state, iterator)
        return jax.tree.map(own_part, outputs), state

    return predict_own_rows


def _distribution() -> OfRanks | None:
    distribution = keras.distribution.distribution()
    return distribution if isinstance(distribution, OfRanks) else None


def _point() -> str:
    """Which batch comes now."""
    return f"a batch of epoch {_epoch[0] + 1}" if _epoch else "a batch"


def _enumerate_of_all_ranks(iterator: Any) -> Any:
    """Replaces Keras's method: as many steps as the rank with the most batches has."""
    ranks = _distribution()
    if ranks is not None and not ranks.trains:
        gathered = gather(_point(), [iterator.steps_per_epoch, iterator._num_batches])
        steps = [of_rank for of_rank, _ in gathered]
        if any(of_rank != steps[0] for of_rank in steps):
            raise RanksDisagreeError(
                f"evaluate and predict take the same steps on every rank, got {steps} in rank order"
            )
        numbers = [number for _, number in gathered]
        # With None, Keras ends when there are no more batches, which is the same on all ranks.
        iterator._num_batches = None if None in numbers else max(numbers)
    return _enumerate_iterator(iterator)


def _of_all_ranks(iterator: Any, distribution: Any) -> Iterator[Any]:
    """Replaces Keras's method, whose ranks would wait for one that has no more batches."""
    ranks = _distribution()
    if ranks is None or ranks.trains:
        yield from _get_iterator(iterator, distribution)
        return
    yield from _until_no_rank_has_more(iterator.data_adapter.get_jax_iterator())


def _until_no_rank_has_more(batches_of_rank: Iterable[Any]) -> Iterator[Any]:
    """Batches of all ranks, without rows of this rank once it has no more."""
    # Ranks take one without rows for the end of another's data.
    iterator = (batch for batch in batches_of_rank if len(jax.tree.leaves(batch)[0]))
    data = next(iterator, None)
    empty = _empty(data)
    while empty is not None:
        batch = one_batch(empty if data is None else data)
        if not any(_last_counts):
            return
        yield batch
        data = next(iterator, None)


def _empty(data: Any) -> Any:
    """A batch without rows, also on a rank that has no batch; None if no rank has. A collective."""
    gathered = gather(_point(), data is not None)
    empty = None if data is None else jax.tree.map(lambda leaf: batches.rows_of(leaf)[:0], data)
    if any(gathered) and not all(gathered):
        first = gathered.index(True)
        empty = unpickled(gather(_point(), pickled(empty))[first], first)
    return empty
