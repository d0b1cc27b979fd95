"""Keras on JAX: variables that belong to all ranks, and one batch of all ranks in each step.

Keras has a place for both: the layout of each variable, and the distribution of its batches. Its
compiled steps leave every variable where it is, so that a divided one stays divided. So ``fit``,
``evaluate`` and ``predict`` go on as they are, and XLA adds the collectives. ``jax_batches`` has
the batches.

The distribution is set only while a distributed model runs one of these, so that other models of
the script stay local to this rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend import in_stateless_scope
from keras.src.backend.jax import distribution_lib

from hvkit.communication.collectives import require_equal
from hvkit.frameworks.jax.arrays import from_rank_0, global_array, set_variable
from hvkit.frameworks.jax.batches import require_same_weights
from hvkit.frameworks.jax.port import JaxPort
from hvkit.frameworks.jax.shardings import ShardingOf, replicated, set_mesh
from hvkit.frameworks.keras import jax_batches
from hvkit.frameworks.keras.callbacks import Epoch
from hvkit.frameworks.keras.fit import with_callbacks_of_this_rank
from hvkit.frameworks.keras.jax_refusals import refuse_others
from hvkit.frameworks.keras.optimizers import scale_rates, updating
from hvkit.learning_rate import Multiplier
from hvkit.sync.port import Keeper, Options, Record
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
        pass  # Keras itself leaves variables where they are

    def synchronise(self) -> None:
        set_mesh(self._mesh)
        jax_batches.install()
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
        found = [*model.variables, *(v for each in optimizers for v in each.variables)]
        found += getattr(model, "metrics_variables", [])
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

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        refuse_others(self.model, self.optimizer, self._is_scaled)
        for model in self.model:
            # Compiled for arrays of this rank, perhaps.
            model.train_function = model.test_function = model.predict_function = None
            self._place_before_steps(model)
            epoch = Epoch(
                self._options.group,
                functools.partial(require_same_weights, "fit", [model]),
                watching=lambda: [jax_batches.Epochs()],
            )
            if self._is_divided:
                epoch.adapt = functools.partial(_refuse_reading, self._has_divided_weights)
            for name in (*_PASSES, *_BATCHES):
                setattr(model, name, _among_ranks(model, name))
            for name in _PASSES:
                method = getattr(model, name)
                trains = name == "fit"
                adapted = with_callbacks_of_this_rank(model, method, epoch, trains=trains)
                setattr(model, name, adapted)
        for optimizer in self.optimizer:
            self._place_built(optimizer)
        return super().keep_in_step()

    def _divide_updates(self) -> None:
        pass

    def _place_before_steps(self, model: Any) -> None:
        """Place variables that ``fit`` and the like make, before the first step."""

        def wrapped(name: str) -> Any:
            make = getattr(model, name)

            def placed_first(force: bool = False) -> Any:
                self._place_variables(model, calls.current_call() or name)
                before = model.predict_function
                made = make(force=force)
                if model.predict_function is not None and model.predict_function is not before:
                    model.predict_function = jax_batches.own_rows(model, model.predict_function)
                return made

            return placed_first

        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            setattr(model, name, wrapped(name))

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
    ranks = jax_batches.OfRanks(model, trains=not by_passes)

    @functools.wraps(method)
    def on_all_ranks(*args: Any, **kwargs: Any) -> Any:
        # ``with_callbacks_of_this_rank`` names a pass.
        in_call = calls.call_within(name) if name in _BATCHES else contextlib.nullcontext()
        with in_call, ranks.scope():
            if name == "predict_on_batch":
                args, kwargs = jax_batches.one_batch((args, kwargs))
            try:
                result = method(*args, **kwargs)
                if by_passes:
                    jax_batches.end_pass(name)
                return result
            finally:
                if name == "fit":
                    jax_batches.end_fit()

    return on_all_ranks


def _refuse_reading(divided_weights: bool, callback: Any) -> None:
    """Refuse a callback that would read arrays of which this rank has a part.

    Without divided weights, these are the states of optimizers.
    """
    # Files of weights hold the optimizer's state, too.
    saves = isinstance(callback, keras.callbacks.ModelCheckpoint)
    keeps = (
        isinstance(callback, keras.callbacks.EarlyStopping)
        and divided_weights
        and callback.restore_best_weights
    )
    if saves or keeps:
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
