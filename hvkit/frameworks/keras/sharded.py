"""Optimizers whose state is divided among the ranks: each updates the variables that it owns.

Keras makes the state of all variables when it builds an optimizer, and numbers it. So a variable
of another rank gets a placeholder without elements instead of its state, and the update leaves it
out. Afterwards the owners send their variables to all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import tensorflow as tf

from hvkit import runtime
from hvkit.communication import large_objects
from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.frameworks.keras.initial_state import tf_variable
from hvkit.frameworks.keras.optimizers import inner_optimizer, parts_of
from hvkit.frameworks.keras.trials import why_not_by_variable
from hvkit.strategies import ShardedOptimizer
from hvkit.sync.chunking import pieces

# By optimizer: the innermost ones, which do the update.
_shards: WeakKeyDictionary[Any, OptimizerShards] = WeakKeyDictionary()

# The gradients that Keras adds up before an update; every rank needs all of them.
_ACCUMULATOR = "gradient_accumulator"


class OptimizerShards:
    """Divides the state of one optimizer among the ranks.

    Args:
        strategy: chooses the owners.
        optimizer: one that updates variables, not one that scales the loss.
        held: bytes that each rank owns already, in rank order; counts up.
        name: the same on every rank, and no other optimizer's.
    """

    def __init__(
        self, strategy: ShardedOptimizer, optimizer: Any, held: list[int], name: str
    ) -> None:
        self._strategy = strategy
        self._held = held
        self._wait = GraphWait(f"{name}.shares")
        self._wire = Wire("weights")
        # Weak: the optimizer's methods keep this object.
        self._optimizer = ref(optimizer)
        self._owner: dict[int, int] = {}
        # The state of single variables, with the variable that each part belongs to.
        self._slots: list[tuple[Any, Any]] = []
        with tf.init_scope():
            self._used = tf.Variable(0.0, trainable=False)
        # Whether this rank holds the state of all variables for a while.
        self._whole = False
        _shards[optimizer] = self
        self._follow(optimizer)
        if optimizer.built:
            self._divide(optimizer)

    def _follow(self, optimizer: Any) -> None:
        """Replace the methods of the optimizer that make, use, save and load its state."""
        make, update = optimizer.add_variable_from_reference, optimizer._backend_update_step
        build = optimizer.build
        save, load = optimizer.save_own_variables, optimizer.load_own_variables

        def build_divided(variables: Sequence[Any]) -> None:
            self.owner_of(variables)
            build(variables)
            self._refuse_shared_state(optimizer)

        def make_slot(reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
            if name == _ACCUMULATOR:
                return make(reference_variable, name=name, initializer=initializer)
            if self.owner_of([reference_variable])[0] == runtime.rank():
                slot = make(reference_variable, name=name, initializer=initializer)
            else:
                slot = optimizer.add_variable((0,), "zeros", reference_variable.dtype, name=name)
            self._slots.append((slot, reference_variable))
            return slot

        def update_own(grads: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
            owners = self.owner_of(variables)
            mine = [i for i, owner in enumerate(owners) if owner == runtime.rank()]
            self._keep_in_graph([g for i, g in enumerate(grads) if i not in mine])
            update([grads[i] for i in mine], [variables[i] for i in mine], rate)
            self._send([tf_variable(v) for v in variables], owners)

        def save_whole(store: Any) -> None:
            self._refuse_partial_state()
            save(store)

        def load_own(store: Any) -> None:
            with self.unfolded():
                load(store)

        optimizer.build = build_divided
        optimizer.add_variable_from_reference = make_slot
        optimizer._backend_update_step = update_own
        optimizer.save_own_variables = save_whole
        optimizer.load_own_variables = load_own

    def _keep_in_graph(self, gradients: Sequence[Any]) -> None:
        """Use gradients, so that a graph computes their means: other ranks wait for this one."""
        used = [tf.convert_to_tensor(0.0)]
        for each in gradients:
            values = each.values if isinstance(each, tf.IndexedSlices) else each
            used.append(tf.cast(tf.reduce_sum(tf.reshape(values, [-1])[:1]), tf.float32))
        self._used.assign(tf.add_n(used))

    def _divide(self, optimizer: Any) -> None:
        """Keep this rank's part of a state that was made before."""
        variables = optimizer._trainable_variables
        self.owner_of(variables)
        for slot, variable in _slots_of(optimizer, variables):
            self._slots.append((slot, variable))
        self._refuse_shared_state(optimizer)
        self._fold()

    def _refuse_shared_state(self, optimizer: Any) -> None:
        """Raise if the optimizer keeps arrays that are not made for single weights.

        Raises:
            ValueError: names the first one.
        """
        known = {id(slot) for slot in self.slots()}
        known |= {id(v) for v in getattr(optimizer, "_accumulated_gradients", ())}
        for v in optimizer.variables:
            if id(v) not in known and len(v.shape):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {v.path} of shape {tuple(v.shape)}, which "
                    f"Keras does not count to one weight: {self._strategy} needs an optimizer "
                    "whose state has the shape of the weights, such as keras.optimizers.AdamW"
                )

    def owner_of(self, variables: Sequence[Any]) -> list[int]:
        """The ranks that own variables; new ones get an owner. Every rank passes the same."""
        keys = [id(tf_variable(v)) for v in variables]
        new = [v for v, key in zip(variables, keys, strict=True) if key not in self._owner]
        owners = self._strategy.owners([_bytes(v) for v in new], self._held)
        self._owner.update(zip((id(tf_variable(v)) for v in new), owners, strict=True))
        return [self._owner[key] for key in keys]

    def _send(self, variables: Sequence[tf.Variable], owners: Sequence[int]) -> None:
        """Send the variables that this rank owns, and take over the others; a collective."""
        plan = pieces([_bytes(v) for v in variables], owners, runtime.size())
        for number, piece in enumerate(plan):
            self._send_piece(number, piece, variables)

    def _send_piece(
        self, number: int, piece: list[list[int]], variables: Sequence[tf.Variable]
    ) -> None:
        mine = [_as_bytes(variables[i].value()) for i in piece[runtime.rank()]]
        # A graph computes with constants only once, even if there is nothing in them.
        nothing = _as_bytes(variables[0].value())[:0]
        sizes = [_bytes(variables[i]) for i in itertools.chain(*piece)]

        def gather(sent: tf.Tensor) -> tf.Tensor:
            received = self._wire.gather(sent, f"{self._wait.key}.{number}")
            # Keeps the operation in the graph of a rank that needs no other's variables.
            self._used.assign(tf.cast(tf.reduce_sum(received[:1]), tf.float32))
            return tf.ensure_shape(received, sum(sizes))

        parts = tf.split(self._wait.around(tf.concat([*mine, nothing], axis=0), gather), sizes)
        for rank, numbers in enumerate(piece):
            theirs, parts = parts[: len(numbers)], parts[len(numbers) :]
            for i, part in zip(numbers, theirs, strict=True):
                if rank != runtime.rank():
                    variables[i].assign(_from_bytes(part, variables[i]))

    def slots(self) -> list[Any]:
        """The variables with the state of single weights."""
        return [slot for slot, _ in self._slots]

    def _fold(self) -> None:
        """Drop the state of variables that other ranks own."""
        for slot, variable in self._slots:
            if self.owner_of([variable])[0] != runtime.rank():
                _set(slot, np.zeros(0, tf.as_dtype(slot.dtype).as_numpy_dtype))

    @contextmanager
    def unfolded(self) -> Iterator[None]:
        """Have room for the whole state for a while; afterwards keep this rank's part."""
        for slot, variable in self._slots:
            if self.owner_of([variable])[0] != runtime.rank():
                _set(slot, np.zeros(variable.shape, tf.as_dtype(slot.dtype).as_numpy_dtype))
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            self._fold()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the whole state on rank 0 for a while; a collective."""
        owners = self.owner_of([variable for _, variable in self._slots])
        own = {
            i: np.array(slot.numpy())
            for i, ((slot, _), owner) in enumerate(zip(self._slots, owners, strict=True))
            if owner == runtime.rank() != 0
        }
        with ExitStack() as stack:
            if runtime.rank() == 0:
                stack.enter_context(self.unfolded())
            for theirs in large_objects.collect("hvkit.settled", own):  # on rank 0
                for i, array in theirs.items():
                    self._slots[i][0].assign(array)
            yield

    def _refuse_partial_state(self) -> None:
        """Raise if this rank holds only its own part of the state.

        Raises:
            ValueError: names the ways to save all of it.
        """
        if not self._whole:
            raise ValueError(
                f"saving {type(self._optimizer()).__name__} on rank {runtime.rank()} would save "
                "only the part of this rank: save with hvkit.Checkpoint (in fit, with its "
                "callback() in place of ModelCheckpoint), or on rank 0 inside `with "
                "hvkit.settled(optimizer):`, which every rank enters"
            )


def shards_of(optimizer: Any) -> list[OptimizerShards]:
    """What divides the state of an optimizer, or of those inside it; empty if it is whole."""
    return [_shards[part] for part in parts_of(inner_optimizer(optimizer)) if part in _shards]


def ids_of_slots(optimizers: Sequence[Any]) -> set[int]:
    """The ids of the optimizers' variables that differ between ranks."""
    return {id(v) for each in optimizers for shards in shards_of(each) for v in shards.slots()}


@contextmanager
def gathered(optimizer: Any) -> Iterator[None]:
    """Hold an optimizer's whole state on rank 0 for a while; a collective if it is divided."""
    with ExitStack() as stack:
        for shards in shards_of(optimizer):
            stack.enter_context(shards.gathered())
        yield


@contextmanager
def unfolded(optimizer: Any) -> Iterator[None]:
    """Have room for an optimizer's whole state for a while, to load it."""
    with ExitStack() as stack:
        for shards in shards_of(optimizer):
            stack.enter_context(shards.unfolded())
        yield


def refuse_joint_updates(strategy: ShardedOptimizer, optimizer: Any) -> None:
    """Raise if an optimizer does not update each weight on its own.

    Raises:
        ValueError: names the optimizer, and what it does.
    """
    if type(optimizer).__name__ == "ScheduleFreeAdamW":
        raise ValueError(
            f"ScheduleFreeAdamW changes all weights when it is built, but with {strategy} no rank "
            "holds the state of all: use keras.optimizers.AdamW, or hvkit.Synchronous()"
        )
    if reason := why_not_by_variable(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} does not update each weight on its own, as {strategy} "
            f"needs ({reason}): use an optimizer such as keras.optimizers.AdamW, or "
            "hvkit.Synchronous()"
        )
    if optimizer.use_ema:
        raise ValueError(
            f"{type(optimizer).__name__} has use_ema=True, but with {strategy} no rank holds the "
            "averages of all weights: leave use_ema out, or use hvkit.Synchronous()"
        )


def _slots_of(optimizer: Any, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The optimizer's variables with the state of single weights, and these weights.

    Keras does not note which belong together. An equal optimizer, built for the same weights,
    makes them in the same order.
    """
    twin = type(optimizer).from_config(optimizer.get_config())
    make = twin.add_variable_from_reference
    of: dict[int, Any] = {}

    def note(reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        made = make(reference_variable, name=name, initializer=initializer)
        if name != _ACCUMULATOR:
            of[id(made)] = reference_variable
        return made

    twin.add_variable_from_reference = note
    twin.build(variables)
    return [
        (own, of[id(theirs)])
        for own, theirs in zip(optimizer.variables, twin.variables, strict=True)
        if id(theirs) in of
    ]


def _set(slot: Any, array: np.ndarray[Any, Any]) -> None:
    """Give an optimizer's variable another shape and value; Keras has no way to do that."""
    with tf.init_scope():
        slot._value = tf.Variable(array, trainable=False)
    slot._shape = array.shape


def _bytes(variable: Any) -> int:
    size: int = math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
    return size


def _as_bytes(value: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(value, tf.uint8), [-1])


def _from_bytes(data: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
    size = variable.dtype.size
    shape = [*variable.shape, size] if size > 1 else variable.shape
    return tf.bitcast(tf.reshape(data, shape), variable.dtype)
