"""Keras on JAX: variables that belong to all ranks, and one batch of all ranks in each step.

Keras has a place for both: the layout of each variable, and the distribution of its batches, which
its iterator of an epoch counts. Its compiled steps leave every variable where it is, so that a
divided one stays divided. So ``fit``, ``evaluate`` and ``predict`` go on as they are, and XLA adds
the collectives. In the last two, a rank without further rows takes part until no rank has some.

The distribution is set only while a distributed model runs one of these, so that other models of
the script stay local to this rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import ref

import jax
import keras
import numpy as np
from keras.src.backend import in_stateless_scope
from keras.src.backend.jax import distribution_lib, trainer

from hvkit.communication.collectives import gather, pickled, require_equal, unpickled
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.jax import batches
from hvkit.frameworks.jax.arrays import (
    ShardingOf,
    from_rank_0,
    global_array,
    position,
    replicated,
    set_mesh,
    sharded_by_rows,
)
from hvkit.frameworks.jax.port import JaxPort
from hvkit.frameworks.jax.trees import set_variable
from hvkit.frameworks.keras.fit import FitState, use_callbacks_of_this_rank
from hvkit.frameworks.keras.jax_refusals import refuse_others
from hvkit.frameworks.keras.optimizers import scale_rates, updating
from hvkit.learning_rate import Multiplier
from hvkit.sync.port import Options, Record, Sync
from hvkit.watch import calls

# The methods that take data, and those that take one batch.
_PASSES = ("fit", "evaluate", "predict")
_BATCHES = ("train_on_batch", "test_on_batch", "predict_on_batch")


class KerasOnJaxPort(JaxPort):
    """Implements ``hvkit.sync.port.Port``."""

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        super().__init__([list(models)], [list(optimizers)], options)
        # Variables that belong to all ranks already; they are kept, so that no id is used twice.
        self._placed_variables: dict[int, Any] = {}
        self._is_scaled = False

    def _refuse_model_and_optimizer(self) -> None:
        for optimizer in self.optimizer:
            if not isinstance(optimizer, keras.optimizers.Optimizer):
                raise TypeError(
                    "optimizer must be a keras.optimizers.Optimizer, got "
                    f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
                )
        if (distribution := keras.distribution.distribution()) is not None:
            raise ValueError(
                f"keras.distribution is set to a {type(distribution).__name__}, which hvkit would "
                "replace: leave set_distribution out, and choose a strategy of hvkit.distribute"
            )

    def _facts(self) -> Iterator[str]:
        # Without the names of layers, in which Keras counts all models that a rank has made.
        yield from (
            f"{role} {number}, variable {i}: {_described(variable)}"
            for role, things in (("model", self.model), ("optimizer", self.optimizer))
            for number, thing in enumerate(things)
            for i, variable in enumerate(thing.variables)
        )

    def _refuse_state_alone(self) -> None:
        """Keras itself leaves variables where they are."""

    def synchronise(self) -> None:
        set_mesh(self._mesh)
        # These functions change nothing for other models.
        trainer._distribute_data = one_batch
        trainer.JAXEpochIterator._get_distributed_iterator = _of_all_ranks
        trainer.JAXEpochIterator._enumerate_iterator = _enumerate_of_all_ranks
        distribution_lib.distribute_tensor = _without_comparison
        for model in self.model:
            self._place_variables(model, "distribute")

    def _place_variables(self, model: Any, call: str) -> None:
        """Make the variables of a model arrays of all ranks, with rank 0's values; a collective."""
        weights = {id(v) for v in model.weights}
        optimizers = list(self.optimizer)
        if (used := getattr(model, "optimizer", None)) is not None:  # a loss scale may be around it
            optimizers.append(used)
        states = {id(v) for each in optimizers for v in each.variables}
        found = [
            *model.variables,
            *(v for each in optimizers for v in each.variables),
            *getattr(model, "metrics_variables", ()),
        ]
        new = {
            id(v): v
            for v in found
            if id(v) not in self._placed_variables and getattr(v, "_value", None) is not None
        }
        require_equal(
            "model",
            [_described(variable) for variable in new.values()],
            "build the same model on every rank",
            call,
        )
        for number, variable in new.items():
            sharding: ShardingOf = replicated
            if number in weights:
                sharding = self._of_weights
            elif number in states:
                sharding = self._of_state
            set_variable(variable, from_rank_0(variable._value, sharding))
        self._placed_variables |= new

    def scale_learning_rate(self, multiplier: Multiplier) -> list[tuple[float, Multiplier | None]]:
        self._is_scaled = not multiplier.changes_nothing
        return scale_rates(updating(self.optimizer), multiplier)

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Sync | None]:
        refuse_others(self.model, self.optimizer, self._is_scaled)
        for model in self.model:
            # Compiled for arrays of this rank, perhaps.
            model.train_function = model.test_function = model.predict_function = None
            self._place_before_steps(model)
            state = FitState(
                self._options.group,
                functools.partial(batches.require_same_weights, "fit", [model]),
                watching=lambda: [Epochs()],
            )
            if self._is_divided:
                state.adapt = functools.partial(_refuse_reading, self._has_divided_weights)
            for name in (*_PASSES, *_BATCHES):
                setattr(model, name, _among_ranks(model, name))
            for name in _PASSES:
                use_callbacks_of_this_rank(model, name, state)
        for optimizer in self.optimizer:
            self._place_built(optimizer)
        return super().keep_in_step()

    def _divide_updates(self) -> None:
        """Left to XLA, which leaves variables where they are."""

    def _place_before_steps(self, model: Any) -> None:
        def place_and_make(name: str, make: Callable[..., Any], force: bool = False) -> Any:
            self._place_variables(model, calls.current_call() or name)
            before = model.predict_function
            made = make(force=force)
            if model.predict_function not in (None, before):
                model.predict_function = own_rows(model, model.predict_function)
            return made

        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            setattr(model, name, functools.partial(place_and_make, name, getattr(model, name)))

    def _place_built(self, optimizer: Any) -> None:
        """Place an optimizer's state when it is built, also in a loop of the script's own."""
        build = optimizer.build

        def build_and_place(variables: Any) -> None:
            build(variables)
            if in_stateless_scope():
                return  # ``fit`` places it before its first step
            for model in self.model:
                self._place_variables(model, "optimizer.build")

        optimizer.build = build_and_place


def _described(variable: Any) -> str:
    return f"{variable.dtype}{list(variable.shape)}"


def _among_ranks(model: Any, name: str) -> Callable[..., Any]:
    """A method of a model that takes batches, for which each rank's are parts of one of all."""
    method = getattr(model, name)
    by_passes = name in ("evaluate", "predict")
    ranks = OfRanks(model, trains=not by_passes)

    @functools.wraps(method)
    def on_all_ranks(*args: Any, **kwargs: Any) -> Any:
        # ``use_callbacks_of_this_rank`` names a pass.
        in_call = calls.call_within(name) if name in _BATCHES else contextlib.nullcontext()
        with in_call, ranks.scope():
            if name == "predict_on_batch":
                args, kwargs = one_batch((args, kwargs))
            try:
                result = method(*args, **kwargs)
                if by_passes:
                    batches.end(_point(), name)
                return result
            finally:
                if name == "fit":
                    _epoch.clear()  # after an error ranks may be in different ones

    return on_all_ranks


def _refuse_reading(divided_weights: bool, callback: Any) -> None:
    """Refuse a callback that would read weights or states of optimizers that ranks have divided."""
    early_stopping, saver = keras.callbacks.EarlyStopping, keras.callbacks.ModelCheckpoint
    keeps = isinstance(callback, early_stopping) and callback.restore_best_weights
    # Files of weights hold the optimizer's state, too.
    if isinstance(callback, saver) or (keeps and divided_weights):
        raise ValueError(
            f"{type(callback).__name__} would read the whole model in fit, of which each rank "
            "holds a part: use the callback() of hvkit.Checkpoint(directory, model=model, "
            "optimizer=optimizer), or save after fit, inside of hvkit.settled(model, optimizer)"
        )


_distribute_tensor = distribution_lib.distribute_tensor


def _without_comparison(tensor: Any, layout: Any) -> Any:
    """Replaces Keras's function, in which all ranks would wait to compare the assigned values."""
    of_ranks = isinstance(layout, jax.sharding.Sharding) and not layout.is_fully_addressable
    if not of_ranks or isinstance(tensor, jax.core.Tracer):
        return _distribute_tensor(tensor, layout)
    if isinstance(tensor, jax.Array) and tensor.sharding == layout:
        return tensor
    if isinstance(tensor, jax.Array) and not tensor.is_fully_addressable:
        moved: jax.Array = jax.jit(lambda array: array, out_shardings=layout)(tensor)
        return moved
    host = np.asarray(tensor)
    return global_array(tensor, host, lambda shape: layout)


# The epoch of ``fit``; empty outside. And the number of rows of each part of the last batch.
_epoch: list[int] = []
_last_counts: list[int] = []

_distribute_data = trainer._distribute_data
_get_iterator = trainer.JAXEpochIterator._get_distributed_iterator
_enumerate_iterator = trainer.JAXEpochIterator._enumerate_iterator


class OfRanks(keras.distribution.DataParallel):  # type: ignore[misc]
    """Each rank's batch is a part of that of all; if it ``trains``, ranks need as many batches."""

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


def one_batch(data: Any, layouts: Any = None) -> Any:
    """Replaces Keras's function; checks that the rows of all ranks fit together, a collective."""
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
    with_rows = (batch for batch in batches_of_rank if len(jax.tree.leaves(batch)[0]))
    data = next(with_rows, None)
    empty = _empty(data)
    while empty is not None:
        batch = one_batch(empty if data is None else data)
        if not any(_last_counts):
            return
        yield batch
        data = next(with_rows, None)


def _empty(data: Any) -> Any:
    """A batch without rows, also on a rank that has no batch; None if no rank has. A collective."""
    gathered = gather(_point(), data is not None)
    empty = (
        None if data is None else jax.tree.map(lambda leaf: batches.rows_of(leaf)[:0].copy(), data)
    )
    if len({*gathered}) > 1:
        first = gathered.index(True)
        empty = unpickled(gather(_point(), pickled(empty))[first], first)
    return empty
