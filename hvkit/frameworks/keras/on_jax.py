"""Keras on JAX: variables that belong to all ranks, and one batch of all ranks in each step.

Keras has a place for both: the layout of each variable, and the distribution of its batches. Its
compiled steps leave every variable where it is, so that a divided one stays divided. So ``fit``,
``evaluate`` and ``predict`` go on as they are, and XLA adds the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend.jax import distribution_lib

from hvkit import runtime
from hvkit.communication.collectives import require_equal
from hvkit.frameworks.jax import batches
from hvkit.frameworks.jax.arrays import (
    RANKS,
    Place,
    by_rows,
    from_rank_0,
    set_variable,
    whole,
)
from hvkit.frameworks.jax.port import JaxPort
from hvkit.learning_rate import Multiplier
from hvkit.sync.port import Keeper, Options, Record

_CALL = "a batch of fit, evaluate or predict"


class KerasOnJaxPort(JaxPort):
    """Implements ``hvkit.sync.port.Port``.

    Args:
        models: of Keras.
        optimizers: those that will be passed to ``compile``, or used in a loop.
        options: as passed to ``distribute``.
    """

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        super().__init__(list(models), list(optimizers), options)
        # Variables that belong to all ranks already; they are kept, so that no id is used twice.
        self._placed_variables: dict[int, Any] = {}

    def _refuse_things(self) -> None:
        for optimizer in self.optimizer:
            if not isinstance(optimizer, keras.optimizers.Optimizer):
                raise TypeError(
                    "optimizer must be a keras.optimizers.Optimizer, got "
                    f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
                )
        distribution = keras.distribution.distribution()
        if distribution is not None and not isinstance(distribution, _OfRanks):
            raise ValueError(
                f"keras.distribution is set to a {type(distribution).__name__}, which hvkit would "
                "replace: leave set_distribution out, and choose a strategy of hvkit.distribute"
            )

    def _refuse_state_alone(self) -> None:
        pass  # Keras itself leaves variables where they are

    def synchronise(self) -> None:
        if keras.distribution.distribution() is None:
            keras.distribution.set_distribution(_OfRanks())
        distribution_lib.distribute_data_input = _rows_of_all_ranks
        for model in self.model:
            self._place_variables(model)

    def _place_variables(self, model: Any) -> None:
        """Make what a model has now belong to all ranks, with rank 0's values; a collective."""
        weights = {id(v) for v in model.weights}
        optimizers = list(self.optimizer)
        if (used := getattr(model, "optimizer", None)) is not None:  # a loss scale may be around it
            optimizers.append(used)
        states = {id(v) for each in optimizers for v in each.variables}
        found = [*model.variables, *(v for each in optimizers for v in each.variables)]
        found += getattr(model, "metrics_variables", [])
        new = {
            id(v): v
            for v in found
            if id(v) not in self._placed_variables and getattr(v, "_value", None) is not None
        }
        require_equal(
            "model",
            [f"{v.path}: shape {tuple(v.shape)}, {v.dtype}" for v in new.values()],
            "build the same model on every rank",
        )
        for number, variable in new.items():
            place: Place = whole
            if number in weights:
                place = self._of_weights
            elif number in states:
                place = self._of_state
            set_variable(variable, from_rank_0(variable._value, place))
        self._placed_variables |= new

    def scale_learning_rate(self, multiplier: Multiplier) -> list[tuple[float, Multiplier | None]]:
        if not multiplier.changes_nothing:
            raise ValueError(
                "lr_scaling is not for Keras on JAX: multiply the rate itself, "
                "keras.optimizers.SGD(rate * hvkit.size())"
            )
        return [(float(each.learning_rate), multiplier) for each in self.optimizer]

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        for model in self.model:
            self._begin_before_steps(model)
        return super().keep_in_step()

    def _divide_updates(self) -> None:
        pass

    def _begin_before_steps(self, model: Any) -> None:
        """Place variables that ``fit`` and the like make, before the first step."""

        def wrapped(name: str) -> Any:
            make = getattr(model, name)

            def placed_first(force: bool = False) -> Any:
                self._place_variables(model)
                made = make(force=force)
                if name == "make_predict_function":
                    model.predict_function = _of_own_rows(model, model.predict_function)
                return made

            return placed_first

        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            setattr(model, name, wrapped(name))


class _OfRanks(keras.distribution.DataParallel):  # type: ignore[misc]
    """Each rank's batch is a part of the batch of all ranks."""

    def __init__(self) -> None:
        devices = np.array(keras.distribution.list_devices())
        mesh = keras.distribution.DeviceMesh(devices.shape, [RANKS], devices)
        super().__init__(device_mesh=mesh, auto_shard_dataset=False)

    def get_variable_layout(self, variable: Any) -> Any:
        """None for a new variable: ranks may draw other values, until the port places rank 0's."""
        return getattr(variable, "_layout", None)


# Each rank's number of rows in the last batch.
_last_counts: list[int] = []


def _rows_of_all_ranks(per_process_batch: Any, layout: Any, batch_dim_name: str) -> jax.Array:
    """In place of Keras's own function, which does not look whether the ranks' rows fit together.

    A collective.
    """
    array = np.ascontiguousarray(per_process_batch)
    array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    (made,), _last_counts[:] = batches.as_one([array], "", _CALL)
    return made


def _of_own_rows(model: Any, predict: Any) -> Any:
    """``predict_function`` whose outputs are this rank's rows, as an array of NumPy."""

    def own(output: jax.Array) -> np.ndarray[Any, Any]:
        # XLA may have divided it in another way, as where weights are divided.
        rank, in_parts = runtime.rank(), batches.are_in_parts(_last_counts)
        place = by_rows() if in_parts else whole(output.shape)
        output = jax.jit(lambda rows: rows, out_shardings=place)(output)
        if in_parts:
            parts = sorted(output.addressable_shards, key=lambda part: part.index[0].start or 0)
            return np.concatenate([part.data for part in parts])
        start = sum(_last_counts[:rank])
        return np.asarray(output)[start : start + _last_counts[rank]]

    def predict_own_rows(state: Any, iterator: Any) -> tuple[Any, Any]:
        if model.steps_per_execution > 1:
            raise ValueError(
                f"predict on several ranks needs steps_per_execution=1 in compile, got "
                f"{model.steps_per_execution}: rows of several batches would be in another order"
            )
        outputs, state = predict(state, iterator)
        return jax.tree.map(own, outputs), state

    return predict_own_rows
