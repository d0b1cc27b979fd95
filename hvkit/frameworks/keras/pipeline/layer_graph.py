"""The layers of a Sequential or Functional model: where it can be cut, and how a stage runs."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.src import tree
from keras.src.models.functional import Functional
from keras.src.ops.function import make_node_key

from hvkit.frameworks.keras.backends import numpy_dtype
from hvkit.frameworks.keras.pipeline.tensors import Tensors
from hvkit.pipeline.gpipe import CutPoint, Stages, balanced_cuts, named_cuts, require_places


@dataclass(frozen=True)
class LayerCut(CutPoint):
    """A layer after which a model can be cut, and the symbolic tensor that the next stage gets."""

    tensor: Any


class LayerGraph:
    """The calls of a model's layers, in an order in which they can run.

    ``made_by`` has, by the id of a tensor, the number of the call that computes it.
    """

    def __init__(self, model: keras.Model) -> None:
        self.functional = _functional_of(model)
        self.calls = list(_calls_of(self.functional))
        self.outputs = [id(t) for t in self.functional.outputs]
        self.made_by = {id(t): time for time, call in enumerate(self.calls) for t in call.outputs}
        # By the id of a tensor: the last call that needs it.
        self._last_use = {t: time for time, call in enumerate(self.calls) for t in _inputs_of(call)}
        self._last_use |= dict.fromkeys(self.outputs, len(self.calls))
        # The layers with weights or random numbers that are called several times, and the times
        # between two of their calls.
        self.called_again: set[str] = set()
        self._between: set[int] = set()
        first_use: dict[int, int] = {}
        for time, call in enumerate(self.calls):
            uses = [first_use.setdefault(id(v), time) for v in variables_of(call.operation)]
            if (first := min(uses, default=time)) < time:
                self.called_again.add(call.operation.name)
                self._between.update(range(first + 1, time + 1))
        # Tensors that follow from the model's inputs without weights or random numbers: each stage
        # that needs one computes it.
        self._recomputed = {id(t) for t in self.functional.inputs}
        for call in self.calls:
            if not variables_of(call.operation) and _inputs_of(call) <= self._recomputed:
                self._recomputed.update(map(id, call.outputs))

    def crossing(self, time: int) -> list[Any]:
        """The tensors that the stage before sends to a stage which begins at this time."""
        return [
            t
            for call in self.calls[:time]
            for t in call.outputs
            if self._last_use.get(id(t), -1) >= time and id(t) not in self._recomputed
        ]

    @functools.cached_property
    def possible_cuts(self) -> list[LayerCut]:
        """Where one tensor crosses, and no layer with weights is called on both sides, in order."""
        found: list[LayerCut] = []
        for time in range(1, len(self.calls)):
            tensors = self.crossing(time)
            if len(tensors) != 1 or id(tensors[0]) in self.outputs or time in self._between:
                continue
            name = self.calls[self.made_by[id(tensors[0])]].operation.name
            if not found or found[-1].name != name:
                found.append(LayerCut(name, time, _nbytes_of(tensors[0]), tensors[0]))
        return found

    def flops(self, start: int, stop: int) -> int:
        """The estimated FLOPs of calls for a sample: two for each use of a weight in a product."""
        return sum(map(_flops_of, self.calls[start:stop]))

    def nbytes(self, start: int, stop: int) -> int:
        weights = {
            id(w): w
            for call in self.calls[start:stop]
            for w in getattr(call.operation, "weights", ())
        }
        return sum(map(_nbytes_of, weights.values()))


def plan_stages(graph: LayerGraph, count: int, choice: Sequence[str] | str = "flops") -> Stages:
    """Divide a model into stages; each stage is on the rank of its own number.

    ``choice`` are the names of the layers after which to cut, or what to balance: ``"flops"`` or
    ``"bytes"``. ``of_weight`` of the result has the ids of Keras's variables.
    """
    if isinstance(choice, str):
        cuts = _balanced(graph, count, choice)
    else:
        cuts = named_cuts(choice, graph.possible_cuts, count, _reasons(graph))
    times = [cut.time for cut in cuts]
    spans = list(itertools.pairwise([0, *times, len(graph.calls)]))
    total = max(graph.flops(0, len(graph.calls)), 1)
    return Stages(
        cuts=tuple(cuts),
        rank_of=tuple(range(count)),
        of_weight={
            id(v): (bisect.bisect_right(times, time),)
            for time, call in enumerate(graph.calls)
            for v in variables_of(call.operation)
        },
        flops=tuple(graph.flops(*span) / total for span in spans),
        nbytes=tuple(graph.nbytes(*span) for span in spans),
    )


def _balanced(graph: LayerGraph, count: int, balance: str) -> list[LayerCut]:
    places = graph.possible_cuts
    condition = f"between layers where a single tensor goes on{_reasons(graph)}"
    require_places(balance, count, places, "layer", condition)
    times = [0, *(place.time for place in places), len(graph.calls)]
    measure = graph.flops if balance == "flops" else graph.nbytes
    return balanced_cuts(count, places, lambda i, j: measure(times[i], times[j]))[0]


def _reasons(graph: LayerGraph) -> str:
    """Why the model cannot be cut elsewhere, for errors."""
    nested = [
        call.operation.name for call in graph.calls if isinstance(call.operation, keras.Model)
    ]
    text, shared = "", ", ".join(sorted(graph.called_again))
    if shared:
        text += f"; {shared} is called several times, and must be in one stage"
    if nested:
        text += f"; {', '.join(nested)} is a model inside this one, and stays in one stage"
    return text


def stage_of(variable: Any, stages: Stages) -> int:
    """The stage, and so the rank, that holds a Keras variable; the first if no call uses it."""
    return stages.of_weight.get(id(variable), (0,))[0]


class Stage:
    def __init__(self, graph: LayerGraph, stages: Stages, number: int, tensors: Tensors) -> None:
        self._graph, self._tensors = graph, tensors
        self._entry = stages.cuts[number - 1].tensor if number else None
        is_last = number == len(stages) - 1
        self._targets = graph.functional.outputs if is_last else [stages.cuts[number].tensor]
        self._calls = self._needed()
        used = set(map(id, self._targets)).union(*map(_inputs_of, self._calls))
        self._uses_input = [id(t) in used for t in graph.functional.inputs]
        layers = [call.operation for call in self._calls]
        self.layers = [each for each in layers if isinstance(each, keras.layers.Layer)]
        self._variables = list(
            {id(v): v for call in self._calls for v in variables_of(call.operation)}.values()
        )
        self._functions: dict[Any, Any] = {}

    def _needed(self) -> list[Any]:
        """The calls that the results need, from the output of the stage before on."""
        calls, times = self._graph.calls, set[int]()
        todo = list(self._targets)
        while todo:
            tensor = todo.pop()
            time = self._graph.made_by.get(id(tensor))  # None for an input of the model
            if tensor is not self._entry and time is not None and time not in times:
                times.add(time)
                todo.extend(calls[time].input_tensors)
        return [calls[time] for time in sorted(times)]

    def __call__(
        self, received: Any, mask: Any, inputs: Sequence[Any], training: bool | None
    ) -> tuple[list[Any], list[Any]]:
        """The results for a micro-batch, and their masks; the first stage has received None."""
        needed = [t if used else None for t, used in zip(inputs, self._uses_input, strict=True)]
        # A layer that the script freezes later computes in another way.
        frozen = tuple(p.trainable for each in self.layers for p in each._flatten_layers())
        key = training, frozen
        if key not in self._functions:
            run = functools.partial(self._run, training)
            self._functions[key] = self._tensors.compiled(run, self._variables)
        outputs, masks = self._functions[key](received, mask, needed)
        return list(outputs), list(masks)

    def _run(
        self, training: bool | None, received: Any, mask: Any, inputs: Sequence[Any]
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
        return outputs, [getattr(t, "_keras_mask", None) for t in outputs]

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
    """The names of the arguments that Keras hands from the model's call to a layer."""
    names = getattr(operation, "_call_context_args", None)
    if names is None:  # before Keras 3.10
        return {"training"} if getattr(operation, "_call_has_training_arg", False) else ()
    return names


def set_mask(tensor: Any, mask: Any) -> None:
    """Set the mask of a tensor, which Keras's layers read; Keras 3.5 has no function for it."""
    tensor._keras_mask = mask


def _functional_of(model: Any) -> Any:
    functional = model._functional if isinstance(model, keras.Sequential) else model
    assert isinstance(functional, Functional)
    return functional


def _calls_of(functional: Any) -> Iterator[Any]:
    """The nodes of Keras's graph, as the model runs them."""
    for depth in sorted(functional._nodes_by_depth, reverse=True):
        for node in functional._nodes_by_depth[depth]:
            index = node.operation._inbound_nodes.index(node)
            if not node.is_input and make_node_key(node.operation, index) in functional._nodes:
                yield node


def _inputs_of(call: Any) -> set[int]:
    return set(map(id, call.input_tensors))


def variables_of(operation: Any) -> list[Any]:
    """The variables of a layer, also the states of its random generators."""
    return list(getattr(operation, "variables", ()))


def _flops_of(call: Any) -> int:
    """The estimated FLOPs of a call for a sample: sizes of weights times positions.

    Positions are the dimensions between the first one, the batch, and the last one. If a layer
    keeps channels first, they are the dimensions after the second one.
    """
    layer = call.operation
    if isinstance(layer, Functional) or getattr(layer, "_functional", None) is not None:
        return sum(map(_flops_of, _calls_of(_functional_of(layer))))
    if isinstance(layer, keras.layers.Embedding):
        return 0
    recurrent = isinstance(layer, keras.layers.RNN | keras.layers.Bidirectional)
    tensor = (call.input_tensors if recurrent else call.outputs)[0]
    first = getattr(layer, "data_format", None) == "channels_first"
    positions = math.prod(n or 1 for n in (tensor.shape[2:] if first else tensor.shape[1:-1]))
    weights = getattr(layer, "weights", ())
    used: int = 2 * positions * sum(math.prod(w.shape) for w in weights if len(w.shape) > 1)
    return used


def _nbytes_of(thing: Any) -> int:
    dtype = keras.backend.standardize_dtype(thing.dtype)
    size: int = math.prod(n or 1 for n in thing.shape) * numpy_dtype(dtype).itemsize
    return size
