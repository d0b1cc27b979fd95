"""Finds the activations between pairs of divided layers that can be divided along the sequence.

A row layer sums over the ranks, and a column layer sums their gradients. Between them all ranks
would compute the same norms, dropout and residuals. Where each position of the sequence is computed
by itself, each rank does so for its part of the sequence: the row layer ends in a reduce-scatter,
the column layer begins with an all-gather. Together they send as many bytes as an all-reduce
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section
4.2.2).

An operation without a rule gets the whole sequence, and that costs an exchange. So does taking
parts of a whole tensor. ``SequenceTrace`` follows one forward on the meta device with the pairs
known, and counts these exchanges.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from hvkit.frameworks.pytorch.model_parallel.meta_device import calls_watched
from hvkit.frameworks.pytorch.model_parallel.tensor import propagation_rules as rules
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import LayerDivision
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import storage_of, tensors_in

T = TypeVar("T")

_MARK = "_hvkit_sequence"
# The largest ratio of other exchanges to those at the layers where a region begins and ends.
_OTHERS = 1 / 4
SMALLEST = 8_000_000
"""Bytes of the smallest activation to divide: parts need more messages for the same bytes."""
# Operations that compute each position by itself, if their rule says so.
_BY_POSITION = {
    *rules.ELEMENTWISE,
    *("layer_norm", "rms_norm", "softmax", "mean", "sum", "var", "amax"),
}


@dataclass(frozen=True)
class SequenceRegion:
    """Activations that the ranks divide along the sequence.

    It begins with the reduce-scatters of row layers and embeddings, and ends with the all-gathers
    of column and attention layers. ``others`` are reasons for other exchanges, and their numbers.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    modules: frozenset[str]
    others: tuple[tuple[str, float], ...]


@dataclass
class _SeenRegion:
    """What the trace has seen of activations that begin at the same layers.

    ``at_layers`` counts exchanges where they begin and end, ``others`` those of as many bytes
    elsewhere, by their reason. ``largest`` is in bytes.
    """

    ends: dict[str, None] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    at_layers: int = 0
    others: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    largest: int = 0
    problem: str = ""

    def add(self, other: _SeenRegion) -> None:
        self.ends |= other.ends
        self.modules |= other.modules
        self.at_layers += other.at_layers
        self.largest = max(self.largest, other.largest)
        for reason, amount in other.others.items():
            self.others[reason] += amount
        self.refuse(other.problem)

    def refuse(self, problem: str) -> None:
        self.problem = self.problem or problem

    @property
    def why_whole(self) -> str:
        if not self.problem and sum(self.others.values()) > _OTHERS * self.at_layers:
            most = max(self.others, key=lambda reason: self.others[reason])
            return f"parts would send more, since {most}"
        if not self.problem and self.largest < SMALLEST:
            found, least = (f"{nbytes / 1e6:.3g} MB" for nbytes in (self.largest, SMALLEST))
            return f"they have at most {found}, and parts pay from {least}"
        return self.problem


@dataclass(frozen=True)
class _SequenceMark:
    """Marks an activation: the layers it is computed from, and the dimension of the sequence."""

    begins: frozenset[str]
    dim: int


class SequenceTrace(rules.EachOperation):
    """Follows the outputs of row layers of an undivided model."""

    def __init__(self, model: nn.Module, divisions: Mapping[str, LayerDivision], ways: int) -> None:
        super().__init__()
        self._divisions, self._ways = divisions, ways
        self._modules = dict(model.named_modules())
        self._seen: dict[frozenset[str], _SeenRegion] = {}
        self._called: list[str] = []
        # The number of divided layers whose calls have not ended.
        self._depth = 0
        # The input of the last column layer: one all-gather serves all layers that take it.
        self._taken: torch.Tensor | None = None
        # Activations that could be divided, by the number of their memory.
        self._memory: dict[int, torch.Tensor] = {}

    def operation(self, call: rules.Operation) -> Any:
        output = call.run()
        marks = [_mark_of(t) for t in call.inputs]
        if rules.writes(call) and call.inputs and not marks[0]:
            # In the divided model this view would be one of a gathered copy.
            of_part = self._memory.get(storage_of(call.inputs[0]))
            if of_part is not None and (mark := _mark_of(of_part)):
                self._region(mark.begins).refuse(f"{call.name}() writes into a view of them")
        if self._depth or call.name in rules.HARMLESS or call.name in rules.SIZES or not any(marks):
            return output
        begins = frozenset().union(*(mark.begins for mark in marks if mark))
        seen = self._region(begins)
        seen.modules.add(self._called[-1] if self._called else "")
        seen.refuse(_in_function(call.name))
        outputs = tensors_in(output)
        dims = [mark.dim if mark else None for mark in marks]
        seen_by_rules = replace(call, dims=dims, outputs=outputs, ways=self._ways)
        step = rules.follow(seen_by_rules) if outputs and call.name in _BY_POSITION else None
        if isinstance(step, rules.Followed):
            self._count_whole(seen_by_rules, begins)
            for each in outputs:
                self._mark(each, _SequenceMark(begins, step.dim))
        elif marks[0] and rules.writes(call):
            seen.refuse(f"{call.name}() writes into them")
        elif outputs or call.name == "__setitem__":
            size = max(t.numel() for t, dim in seen_by_rules.pairs if dim is not None)
            joins_results = call.name in ("mean", "sum")
            amount = 2 * outputs[0].numel() / max(size, 1) if joins_results else 1
            seen.others[f"{call.name}() needs the whole sequence"] += amount
        return output

    def _count_whole(self, call: rules.Operation, begins: frozenset[str]) -> None:
        """Count exchanges of whole inputs as long as the sequence: each rank takes its part."""
        first, dim = call.first
        from_right = first.dim() - dim
        for t, d in call.pairs:
            at = t.dim() - from_right
            if d is None and t.is_meta and at >= 0 and t.shape[at] > 1:
                reason = f"{call.name}() takes parts of what is whole"
                self._region(begins).others[reason] += t.numel() / max(first.numel(), 1)

    def entered(self) -> AbstractContextManager[None]:
        return calls_watched(self._modules, self._enter, self._leave)

    def _enter(self, name: str, args: Any, kwargs: Any) -> None:
        self._called.append(name)
        for mark in filter(None, map(_mark_of, tensors_in((args, kwargs)))):
            if _is_compiled(self._modules[name]):
                self._region(mark.begins).refuse(f"{name}, which takes them, is compiled")
        if name not in self._divisions:
            return
        division = self._divisions[name]
        for t in dict.fromkeys(tensors_in((args, kwargs))) if not self._depth else ():
            part = _mark_of(t)
            if part and division.style == "row":
                self._region(part.begins).others[f"{name} takes parts of its features"] += 2
            elif part:
                seen = self._region(part.begins)
                seen.ends[name] = None
                seen.at_layers += t is not self._taken
                self._taken = t
        self._depth += 1

    def _leave(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        self._called.pop()
        if name not in self._divisions:
            return
        self._depth -= 1
        begin = self._begins(name)
        first = next(iter(tensors_in(output)), None)
        if not self._depth and begin and first is not None and first.dim() > 1:
            seen = self._region(frozenset([begin]))
            seen.at_layers, seen.largest = seen.at_layers + 1, max(seen.largest, first.nbytes)
            self._mark(first, _SequenceMark(frozenset([begin]), first.dim() - 2))

    def _begins(self, name: str) -> str | None:
        """The row layer that ends the call of a module, if any."""
        module, division = self._modules[name], self._divisions[name]
        if isinstance(module, nn.MultiheadAttention):
            return f"{name}.out_proj".removeprefix(".")
        projection = division.by_itself and not isinstance(module, nn.Embedding)
        return name if division.style == "row" and not projection else None

    def returned(self, output: Any) -> None:
        for t in tensors_in(output):
            if mark := _mark_of(t):
                self._region(mark.begins).others["the model returns them"] += 1

    def found(self) -> tuple[list[SequenceRegion], list[str]]:
        """The regions to divide, and why the others stay whole."""
        regions, problems = [], []
        for begins in united(self._seen):
            total = _SeenRegion()
            for some, seen in self._seen.items():
                if some <= begins:
                    total.add(seen)
            names = tuple(name for name in self._modules if name in begins)
            if total.ends and total.why_whole:
                problems.append(f"after {names[0]} stay whole: {total.why_whole}")
            elif total.ends:
                ends = tuple(name for name in self._modules if name in total.ends)
                modules, exchanges = frozenset(total.modules), tuple(total.others.items())
                regions.append(SequenceRegion(names, ends, modules, exchanges))
        return regions, problems

    def _mark(self, t: torch.Tensor, mark: _SequenceMark) -> None:
        setattr(t, _MARK, mark)
        self._memory[storage_of(t)] = t

    def _region(self, begins: frozenset[str]) -> _SeenRegion:
        return self._seen.setdefault(begins, _SeenRegion())


def united(sets: Iterable[Set[T]]) -> list[set[T]]:
    """The unions of sets that have elements in common, also through others."""
    groups: list[set[T]] = []
    for each in map(set, sets):
        found = [group for group in groups if group & each]
        if found:
            found[0].update(each, *found[1:])
            groups = [group for group in groups if group not in found[1:]]
        else:
            groups.append(each)
    return groups


def _mark_of(t: torch.Tensor) -> _SequenceMark | None:
    return getattr(t, _MARK, None)


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


_CALL = nn.Module._call_impl.__code__
_FUNCTIONS = {torch.utils.checkpoint.__file__, torch.autograd.function.__file__}


def _in_function(name: str) -> str:
    """Why an operation may happen outside of every module's forward, or an empty text.

    Functions under ``torch.utils.checkpoint`` and of a ``torch.autograd.Function`` also run in
    backward. There only the forward of a module divides activations.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _CALL:
        if frame.f_code.co_filename in _FUNCTIONS:
            return f"{name}() is called in a function that computes in backward, too"
        frame = frame.f_back
    return ""
