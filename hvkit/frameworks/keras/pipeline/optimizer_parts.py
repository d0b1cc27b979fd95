"""Optimizers in a pipeline: each rank updates the weights of its stage, and holds their state.

The script, or ``fit``, passes gradients of all weights. For a weight of another stage this is one
number, the norm of its gradient there, so that norms over all gradients are right on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import numpy as np
from keras import ops

from hvkit import runtime
from hvkit.frameworks.keras.backends import numpy_dtype, set_anew
from hvkit.frameworks.keras.divided_state import remember
from hvkit.frameworks.keras.optimizers import calls_of_apply
from hvkit.frameworks.keras.pipeline.model_parts import ModelParts
from hvkit.frameworks.keras.pipeline.stage_messages import StageLinks
from hvkit.frameworks.keras.pipeline.tensors import norm_of
from hvkit.frameworks.keras.sharded import slots_of


class OptimizerParts:
    """Lets an optimizer update this rank's part of a model.

    Args:
        optimizer: one that updates variables, not one that scales the loss.
        parts: of the model.
        links: to the ranks of this pipeline.

    Raises:
        ValueError: the optimizer keeps a state that belongs to no single weight.
    """

    def __init__(self, optimizer: Any, parts: ModelParts, links: StageLinks) -> None:
        self._parts, self._links = parts, links
        # Weak: the optimizer's methods keep this object.
        self._optimizer = ref(optimizer)
        # The state of single weights, with the weight that each part belongs to.
        self._slots: list[tuple[Any, Any]] = []
        self._whole = False
        remember(optimizer, self)
        self._follow(optimizer)
        if optimizer.built:
            variables = optimizer._trainable_variables
            self._slots = slots_of(optimizer, variables)
            if optimizer.gradient_accumulation_steps:
                accumulators = optimizer._accumulated_gradients
                self._slots += zip(accumulators, variables, strict=True)
            self._require_slots(optimizer)
            self._fold()

    def _follow(self, optimizer: Any) -> None:
        """Replace the methods of the optimizer that make, use, save and load its state."""
        make, apply, build = (
            optimizer.add_variable_from_reference,
            optimizer.apply,
            optimizer.build,
        )
        save, load = optimizer.save_own_variables, optimizer.load_own_variables
        clip = optimizer._clip_gradients

        def make_slot(reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
            if self._parts.holds(reference_variable):
                slot = make(reference_variable, name=name, initializer=initializer)
            else:
                slot = optimizer.add_variable((0,), "zeros", reference_variable.dtype, name=name)
            self._slots.append((slot, reference_variable))
            return slot

        def build_in_parts(variables: Sequence[Any]) -> None:
            build(variables)
            self._require_slots(optimizer)

        def apply_to_own(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            self._apply(optimizer, apply, list(grads), trainable_variables)

        def clip_over_stages(grads: list[Any]) -> list[Any]:
            if not optimizer.global_clipnorm:
                return list(clip(grads))
            rest = ops.convert_to_tensor([self._norm_of_others(grads)], grads[0].dtype)
            return list(clip([*grads, rest]))[:-1]

        def overwrite_own(variables: Sequence[Any]) -> None:
            averages = optimizer._model_variables_moving_average
            for v, average in zip(variables, averages, strict=True):
                if average is not None and self._parts.holds(v):
                    v.assign(average)

        def save_whole(store: Any) -> None:
            self._refuse_partial_state()
            save(store)

        def load_own(store: Any) -> None:
            with self.unfolded():
                load(store)

        optimizer.add_variable_from_reference = make_slot
        optimizer.build = build_in_parts
        optimizer.apply = apply_to_own
        optimizer._clip_gradients = clip_over_stages
        optimizer._overwrite_model_variables_with_average_value = overwrite_own
        optimizer.save_own_variables = save_whole
        optimizer.load_own_variables = load_own

    def _apply(self, optimizer: Any, apply: Any, grads: list[Any], variables: Any) -> None:
        """Update this rank's variables; count the step also where it has none."""
        variables = list(optimizer._trainable_variables if variables is None else variables)
        if not optimizer.built:
            optimizer.build(variables)
        own = [(g, v) for g, v in zip(grads, variables, strict=True) if self._parts.holds(v)]
        if any(g is not None for g, _ in own):
            apply([g for g, _ in own], [v for _, v in own])
            return
        steps = optimizer.gradient_accumulation_steps or 1
        if optimizer.global_clipnorm and (calls_of_apply(optimizer) + 1) % steps == 0:
            self._norm_of_others([])
        optimizer._iterations.assign_add(1)

    def _norm_of_others(self, grads: list[Any]) -> float:
        """The norm of what other stages pass to this; a collective of the pipeline."""
        mine = np.array([sum(norm_of(g) ** 2 for g in grads)], np.float64)
        everyone = self._links.gather(mine)
        return float(np.sqrt(np.delete(everyone, self._links.rank).sum()))

    def _require_slots(self, optimizer: Any) -> None:
        """Raise if the optimizer keeps arrays that are not made for single weights.

        Raises:
            ValueError: names the first one.
        """
        known = {id(slot) for slot in self.slots()}
        for v in optimizer.variables:
            if id(v) not in known and len(v.shape):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {v.path} of shape {tuple(v.shape)}, which "
                    "Keras does not count to one weight: a pipeline needs an optimizer whose state "
                    "has the shape of the weights, such as keras.optimizers.AdamW"
                )

    def slots(self) -> list[Any]:
        """The variables with the state of single weights."""
        return [slot for slot, _ in self._slots]

    def _others(self) -> list[tuple[Any, Any]]:
        return [(slot, v) for slot, v in self._slots if not self._parts.holds(v)]

    def _fold(self) -> None:
        """Drop the state of weights that other stages hold."""
        for slot, _ in self._others():
            set_anew(slot, np.zeros(0, numpy_dtype(slot.dtype)))

    @contextmanager
    def unfolded(self) -> Iterator[None]:
        """Have room for the whole state for a while; afterwards keep this rank's part."""
        for slot, variable in self._others():
            set_anew(slot, np.zeros(variable.shape, numpy_dtype(slot.dtype)))
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            self._fold()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the whole state on rank 0 for a while; a collective."""
        slots = {i: slot for i, (slot, _) in enumerate(self._slots)}
        holders = {i: self._parts.stages.holder(v) for i, (_, v) in enumerate(self._slots)}
        arrays = self._parts.collected(slots, holders)
        if not self._parts.keeps_whole:
            yield
            return
        with self.unfolded():
            for i, array in arrays.items():
                slots[i].assign(array)
            yield

    def _refuse_partial_state(self) -> None:
        if not self._whole:
            raise ValueError(
                f"saving {type(self._optimizer()).__name__} on rank {runtime.rank()} would save "
                "only the part of this rank's stage: save with hvkit.Checkpoint, or on rank 0 "
                "inside `with hvkit.settled(model, optimizer):`, which every rank enters"
            )
