"""The layers of a Sequential or Functional model in their order, and where they can be cut."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import keras
from keras.src.models.functional import Functional
from keras.src.ops.function import make_node_key

from hvkit.frameworks.keras.backends import numpy_dtype
from hvkit.frameworks.stage_division import balanced_cuts

Balance = Literal["flops", "bytes"]
BALANCES = get_args(Balance)


@dataclass(frozen=True)
class CutPlace:
    """A place where a model can be cut.

    Attributes:
        layer: the name of the one after which it is.
        time: the number of calls before it.
        tensor: Keras's symbolic tensor that the next stage gets.
        nbytes: of it, for a sample; unknown lengths count as 1.
    """

    layer: str
    time: int
    tensor: Any
    nbytes: int


class LayerGraph:
    """The calls of layers in a model, in an order in which they can run.

    Args:
        model: a Functional model, or a Sequential one with weights.
    """

    def __init__(self, model: keras.Model) -> None:
        self.functional = functional_of(model)
        self.calls = list(_calls_of(self.functional))
        self.outputs = [id(t) for t in self.functional.outputs]
        self._made_by = {id(t): time for time, call in enumerate(self.calls) for t in call.outputs}
        # Computed from inputs alone, without weights or random numbers: in any stage that needs it.
        self.anywhere = {id(t) for t in self.functional.inputs}
        for call in self.calls:
            if not variables_of(call.operation) and self._known(call) <= self.anywhere:
                self.anywhere.update(map(id, call.outputs))

    def _known(self, call: Any) -> set[int]:
        return set(map(id, call.input_tensors))

    def maker(self, tensor: int) -> Any:
        """The call that makes a tensor, by its id; None for an input of the model."""
        time = self._made_by.get(tensor)
        return None if time is None else self.calls[time]

    def time_of(self, call: Any) -> int:
        """The place of a call in the order."""
        return self.calls.index(call)

    def crossing(self, time: int) -> list[Any]:
        """The tensors that a stage which begins at this time gets from the one before."""
        needed = {t for call in self.calls[time:] for t in self._known(call)} | set(self.outputs)
        return [
            t
            for call in self.calls[:time]
            for t in call.outputs
            if id(t) in needed and id(t) not in self.anywhere
        ]

    @functools.cached_property
    def places(self) -> list[CutPlace]:
        """All places where the model can be cut, in their order.

        A single tensor crosses a cut, and no layer with weights is called on both sides.
        """
        found: list[CutPlace] = []
        for time in range(1, len(self.calls)):
            tensors = self.crossing(time)
            if len(tensors) != 1 or id(tensors[0]) in self.outputs or self.shared_at(time):
                continue
            name = self.calls[self._made_by[id(tensors[0])]].operation.name
            if found and found[-1].layer == name:
                continue
            found.append(CutPlace(name, time, tensors[0], _nbytes_of_tensor(tensors[0])))
        return found

    def shared_at(self, time: int) -> list[str]:
        """The layers with weights or random numbers that are called before a time and after it."""
        before = {id(v) for call in self.calls[:time] for v in variables_of(call.operation)}
        return [
            call.operation.name
            for call in self.calls[time:]
            if any(id(v) in before for v in variables_of(call.operation))
        ]

    def flops(self, start: int, stop: int) -> int:
        """An estimate for a sample: two for each use of a weight in products."""
        return sum(map(_flops_of, self.calls[start:stop]))

    def nbytes(self, start: int, stop: int) -> int:
        """The bytes of the weights that the calls use."""
        weights = {
            id(w): w
            for call in self.calls[start:stop]
            for w in getattr(call.operation, "weights", ())
        }
        return sum(map(nbytes_of, weights.values()))


@dataclass(frozen=True)
class Stages:
    """The stages of a model; the rank of a stage along the pipeline is the stage's number.

    Attributes:
        cuts: between each stage and the next.
        of_variable: by the id of a variable, the stage that holds it.
        flops: by stage, the estimated share of forward, from 0 to 1.
        nbytes: by stage, of its weights.
    """

    cuts: tuple[CutPlace, ...]
    of_variable: Mapping[int, int]
    flops: tuple[float, ...]
    nbytes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.cuts) + 1

    def holder(self, variable: Any) -> int:
        """The stage that holds a Keras variable; the first one, if no call uses it."""
        return self.of_variable.get(id(variable), 0)

    def described(self) -> str:
        """A line for each stage, for the log."""
        lines = []
        for stage, (flops, size) in enumerate(zip(self.flops, self.nbytes, strict=True)):
            share = size / max(sum(self.nbytes), 1)
            cut = f"; cut after {self.cuts[stage].layer}" if stage < len(self.cuts) else ""
            lines.append(
                f"stage {stage} (rank {stage} of the pipeline): {flops:.0%} of the FLOPs, "
                f"{share:.0%} of the weights, {size / 1e6:.3g} MB{cut}"
            )
        return "\n    ".join(lines)


def plan_stages(graph: LayerGraph, count: int, choice: Sequence[str] | str = "flops") -> Stages:
    """Divide a model into stages.

    Args:
        graph: of the model.
        count: how many stages.
        choice: the names of the layers after which to cut, or what the largest stage should have
            least of: ``"flops"`` or ``"bytes"``.

    Raises:
        ValueError: there are too few places, or a name is none of them; names those there are.
    """
    if isinstance(choice, str):
        cuts = _balanced(graph, count, choice)
    else:
        cuts = _named(graph, count, choice)
    times = [cut.time for cut in cuts]
    ends = [0, *times, len(graph.calls)]
    spans = list(itertools.pairwise(ends))
    total = max(graph.flops(0, len(graph.calls)), 1)
    return Stages(
        cuts=tuple(cuts),
        of_variable={
            id(v): bisect.bisect_right(times, time)
            for time, call in enumerate(graph.calls)
            for v in variables_of(call.operation)
        },
        flops=tuple(graph.flops(*span) / total for span in spans),
        nbytes=tuple(graph.nbytes(*span) for span in spans),
    )


def _named(graph: LayerGraph, count: int, names: Sequence[str]) -> list[CutPlace]:
    by_name = {place.layer: place for place in graph.places}
    for name in names:
        if name not in by_name:
            raise ValueError(
                f"stages={list(names)}: the model cannot be cut after {name!r}, only after "
                f"{_listed(graph)}{_reasons(graph)}"
            )
    if len(set(names)) != count - 1:
        raise ValueError(
            f"stages={list(names)} names {len(set(names))} cuts, but a pipeline of {count} stages "
            f"has {count - 1}"
        )
    return sorted({by_name[name] for name in names}, key=lambda cut: cut.time)


def _balanced(graph: LayerGraph, count: int, balance: str) -> list[CutPlace]:
    if balance not in BALANCES:
        raise ValueError(
            f"stages must be {' or '.join(map(repr, BALANCES))}, or a list of the layers after "
            f"which to cut, got {balance!r}"
        )
    places = graph.places
    if len(places) < count - 1:
        raise ValueError(
            f"a pipeline of {count} stages needs {count - 1} places to cut the model, but there "
            f"are {len(places)}: after {_listed(graph)}. A model can be cut between layers where "
            f"a single tensor goes on{_reasons(graph)}"
        )
    times = [0, *(place.time for place in places), len(graph.calls)]
    measure = graph.flops if balance == "flops" else graph.nbytes
    costs = {
        (i, j): float(measure(times[i], times[j])) for j in range(1, len(times)) for i in range(j)
    }
    crossing = [0, *(place.nbytes for place in places), 0]
    return [places[j - 1] for j in balanced_cuts(count, costs, crossing)]


def _listed(graph: LayerGraph) -> str:
    return ", ".join(place.layer for place in graph.places) or "no layer at all"


def _reasons(graph: LayerGraph) -> str:
    """What stands in the way of further cuts, for errors."""
    shared = {name for time in range(1, len(graph.calls)) for name in graph.shared_at(time)}
    nested = [
        call.operation.name for call in graph.calls if isinstance(call.operation, keras.Model)
    ]
    text = ""
    if shared:
        text += f"; {', '.join(sorted(shared))} is called several times, and must be in one stage"
    if nested:
        text += f"; {', '.join(nested)} is a model inside this one, and stays in one stage"
    return text


def functional_of(model: Any) -> Any:
    """The Functional model that a Sequential one keeps, or the model itself."""
    found = model._functional if isinstance(model, keras.Sequential) else model
    assert isinstance(found, Functional)
    return found


def _calls_of(functional: Any) -> Iterator[Any]:
    """The nodes of Keras's graph, as the model runs them."""
    for depth in sorted(functional._nodes_by_depth, reverse=True):
        for node in functional._nodes_by_depth[depth]:
            index = node.operation._inbound_nodes.index(node)
            if not node.is_input and make_node_key(node.operation, index) in functional._nodes:
                yield node


def variables_of(operation: Any) -> list[Any]:
    """The variables of a layer, also the states of its random generators."""
    found: Iterable[Any] = getattr(operation, "variables", ())
    return list(found)


def _flops_of(call: Any) -> int:
    """An estimate for a sample, from the sizes of weights and the positions that they are used at.

    Positions are what a tensor has between its first dimension, the batch, and its last one; where
    a layer keeps channels first, those after the second one.
    """
    layer = call.operation
    if isinstance(layer, Functional) or getattr(layer, "_functional", None) is not None:
        return sum(map(_flops_of, _calls_of(functional_of(layer))))
    if isinstance(layer, keras.layers.Embedding):
        return 0
    recurrent = isinstance(layer, keras.layers.RNN | keras.layers.Bidirectional)
    tensor = (call.input_tensors if recurrent else call.outputs)[0]
    first = getattr(layer, "data_format", None) == "channels_first"
    positions = math.prod(n or 1 for n in (tensor.shape[2:] if first else tensor.shape[1:-1]))
    weights = getattr(layer, "weights", ())
    used: int = 2 * positions * sum(math.prod(w.shape) for w in weights if len(w.shape) > 1)
    return used


def nbytes_of(variable: Any) -> int:
    """The bytes of a variable with all of its values."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    size: int = math.prod(variable.shape) * numpy_dtype(dtype).itemsize
    return size


def _nbytes_of_tensor(tensor: Any) -> int:
    size: int = math.prod(n or 1 for n in tensor.shape) * numpy_dtype(tensor.dtype).itemsize
    return size
