"""Runs the layers of one stage of a pipeline; on TensorFlow as a ``tf.function``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
from keras.src import tree

from hvkit.frameworks.keras.pipeline.layer_graph import LayerGraph, Stages, variables_of
from hvkit.frameworks.keras.pipeline.tensors import compiled, mask_of, set_mask, unwatched


class Stage:
    """The calls of layers between two cuts.

    Args:
        graph: of the model.
        stages: of the model.
        number: of this stage.
    """

    def __init__(self, graph: LayerGraph, stages: Stages, number: int) -> None:
        self._graph = graph
        self._entry = stages.cuts[number - 1].tensor if number else None
        is_last = number == len(stages) - 1
        self._targets = graph.functional.outputs if is_last else [stages.cuts[number].tensor]
        self._calls = self._needed()
        used = {id(t) for call in self._calls for t in call.input_tensors}
        used |= set(map(id, self._targets))
        self._uses_input = [id(t) in used for t in graph.functional.inputs]
        layers = [call.operation for call in self._calls]
        self.layers = [each for each in layers if isinstance(each, keras.layers.Layer)]
        self._variables = list(
            {id(v): v for call in self._calls for v in variables_of(call.operation)}.values()
        )
        self._functions: dict[Any, Any] = {}

    def _needed(self) -> list[Any]:
        """The calls that the results need, up to what the stage before gives."""
        found: dict[int, Any] = {}
        known = set() if self._entry is None else {id(self._entry)}
        todo = [id(t) for t in self._targets]
        while todo:
            tensor = todo.pop()
            call = None if tensor in known else self._graph.maker(tensor)
            if call is not None and id(call) not in found:
                found[id(call)] = call
                todo.extend(map(id, call.input_tensors))
        return sorted(found.values(), key=self._graph.time_of)

    def __call__(
        self,
        received: Any,
        mask: Any,
        inputs: Sequence[Any],
        training: bool | None,
    ) -> tuple[list[Any], list[Any]]:
        """The results for a micro-batch, and their masks.

        Args:
            received: from the stage before; None for the first one.
            mask: of what was received.
            inputs: of the model, for these samples.
            training: as for a layer.

        Raises:
            ValueError: a layer adds a loss of its own.
        """
        needed = [t if used else None for t, used in zip(inputs, self._uses_input, strict=True)]
        # A layer that is frozen later computes in another way.
        frozen = tuple(p.trainable for each in self.layers for p in each._flatten_layers())
        key = training, frozen
        if key not in self._functions:
            self._functions[key] = compiled(functools.partial(self._run, training))
        with unwatched(self._variables):
            outputs, masks = self._functions[key](received, mask, needed)
        return list(outputs), list(masks)

    def _run(
        self,
        training: bool | None,
        received: Any,
        mask: Any,
        inputs: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        values = {
            id(t): value
            for t, value in zip(self._graph.functional.inputs, inputs, strict=True)
            if value is not None
        }
        if self._entry is not None:
            if mask is not None:
                set_mask(received, mask)
            values[id(self._entry)] = received
        for layer in self.layers:
            layer._clear_losses()
        for call in self._calls:
            args, kwargs = call.arguments.fill_in(values)
            if training is not None and "training" in _context_args(call.operation):
                kwargs["training"] = training
            results = call.operation(*args, **kwargs)
            for t, value in zip(call.outputs, tree.flatten(results), strict=True):
                values[id(t)] = value
        self._refuse_losses()
        outputs = [values[id(t)] for t in self._targets]
        return outputs, [mask_of(t) for t in outputs]

    def _refuse_losses(self) -> None:
        for layer in self.layers:
            for part in layer._flatten_layers():
                if part._get_own_losses():
                    layer._clear_losses()
                    raise ValueError(
                        f"layer {part.name!r} adds a loss of its own with add_loss(), of which a "
                        "pipeline cannot know whether it is a sum or a mean over the samples of a "
                        "micro-batch: return what it needs as an output of the model, and compute "
                        "it in the loss"
                    )


def _context_args(operation: Any) -> Any:
    """The names of the arguments that a layer takes from the call of the model."""
    found = getattr(operation, "_call_context_args", None)
    if found is None:  # before Keras 3.10
        return {"training"} if getattr(operation, "_call_has_training_arg", False) else ()
    return found
