"""Optimizers in a pipeline: each rank updates the weights of its stage, and holds their state.

The script, or ``fit``, passes gradients of all weights. For a weight of another stage this is one
number, the norm of its gradient there, so that norms over all gradients are right on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from keras import ops

from hvkit.frameworks.keras.divided_state import remember
from hvkit.frameworks.keras.optimizers import calls_of_apply
from hvkit.frameworks.keras.partial_state import PartialState
from hvkit.frameworks.keras.pipeline.model_parts import ModelParts
from hvkit.frameworks.keras.pipeline.stage_messages import StageLinks
from hvkit.frameworks.keras.pipeline.tensors import norm_of


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
        self._state = PartialState(
            optimizer,
            parts.holds,
            "a pipeline",
            "save with hvkit.Checkpoint, or on rank 0 inside `with hvkit.settled(model, "
            "optimizer):`, which every rank enters",
            whole_accumulators=False,
        )
        remember(optimizer, self)
        self._follow(optimizer)
        if optimizer.built:
            self._state.divide()

    def _follow(self, optimizer: Any) -> None:
        """Replace the methods of the optimizer that make and use its state."""
        apply, build, clip = optimizer.apply, optimizer.build, optimizer._clip_gradients

        def build_in_parts(variables: Sequence[Any]) -> None:
            build(variables)
            self._state.refuse_shared()

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

        optimizer.build = build_in_parts
        optimizer.apply = apply_to_own
        optimizer._clip_gradients = clip_over_stages
        optimizer._overwrite_model_variables_with_average_value = overwrite_own

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

    def slots(self) -> list[Any]:
        """The variables with the state of single weights."""
        return [slot for slot, _ in self._state.slots]

    def unfolded(self) -> AbstractContextManager[None]:
        """Have room for the whole state for a while; afterwards keep this rank's part."""
        return self._state.unfolded()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the whole state on rank 0 for a while; a collective."""
        slots = {i: slot for i, (slot, _) in enumerate(self._state.slots)}
        holders = {i: self._parts.stages.holder(v) for i, (_, v) in enumerate(self._state.slots)}
        arrays = self._parts.collected(slots, holders)
        if not self._parts.keeps_whole:
            yield
            return
        with self.unfolded():
            for i, array in arrays.items():
                slots[i].assign(array)
            yield
