"""Finds where a model can be cut, from the calls of modules and the uses of tensors in a dry run.

A cut is after the call of a module. All that is used later, and depends on weights, must be
an output of a module: a later stage receives it where that module returns it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hvkit.frameworks.pytorch.model_parallel.meta_device import (
    MAKES_NEW,
    calls_watched,
    is_recomputed_within,
)
from hvkit.frameworks.pytorch.model_parallel.side_outputs import SideOutputs
from hvkit.frameworks.pytorch.model_parallel.tensor.propagation_rules import (
    EachOperation,
    Operation,
    is_in_place,
)
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import (
    bytes_of,
    storage_of,
    structure_of,
    tensors_in,
    version_of,
)
from hvkit.pipeline.gpipe import CutPoint

# The property that ``buffer.data = ...`` sets.
_DATA: Any = torch.Tensor.data
# An attribute of a tensor: when it came to depend on a parameter.
_BORN = "_hvkit_born"
# An attribute of a tensor that a forward adds up, as from losses: the terms. Later stages add them
# up again.
_FROM = "_hvkit_from"
_ADDS_UP = {"add", "mul", "div", "__add__", "__radd__", "__mul__", "__rmul__", "__truediv__"}
_ADDS_UP |= {"sum", "mean", "stack", "cat"}
# An attribute of a tensor that depends on the batch.
_OF_BATCH = "_hvkit_of_batch"


@dataclass(frozen=True)
class ModuleOutput:
    """One of the tensors that a module, which is called once, returns."""

    module: str
    number: int


@dataclass(frozen=True)
class ModuleCut(CutPoint):
    """A module after whose call the model can be cut; times count operations."""

    flops: int  # of forward up to the cut
    structure: Any  # the module's output, with a ``Slot`` in place of each tensor
    # Outputs of earlier modules that later stages use, too, as by skip connections.
    skips: tuple[ModuleOutput, ...] = ()
    # For each tensor of the output, its number in ``skips``; None if it is not there.
    aliases: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        others = ", ".join(each.module for each in self.skips)
        return self.name + (f", with the results of {others}" if others else "")


@dataclass(frozen=True)
class ShapeOnly:
    """A module that later stages need not run: the shapes of its output are enough."""

    module: str
    begun: int
    ended: int
    shapes: tuple[torch.Size, ...]

    def includes(self, time: int) -> bool:
        return self.begun < time <= self.ended


@dataclass
class _Call:
    """A call of a module that has ended."""

    module: str
    earlier: int  # how many calls had ended when it began
    time: int
    flops: int  # of forward up to its end
    tensors: list[torch.Tensor]
    structure: Any
    requires_grad: list[bool]
    arguments: list[Any]
    has_side_effects: bool  # whether it has changed more than its output
    side_outputs: list[torch.Tensor]  # that the forward has kept so far, and stages pass on
    side_tensors: list[torch.Tensor]  # those of them that are in no list

    @property
    def is_inside_a_function(self) -> bool:
        """Whether only a later operation, an autograd Function, made its output need a gradient."""
        return [t.requires_grad for t in self.tensors] != self.requires_grad


class ForwardTrace(EachOperation):
    """Notes when tensors that depend on parameters are made and used: after how many operations."""

    def __init__(
        self,
        model: nn.Module,
        buffers: Mapping[str, torch.Tensor],
        flops: FlopCounterMode,
        side_outputs: SideOutputs,
    ) -> None:
        super().__init__()
        self._modules = dict(model.named_modules())
        self._buffers, self._flops, self._side_outputs = buffers, flops, side_outputs
        self._buffer_at = {storage_of(b): name for name, b in buffers.items()}
        self.time = 0
        self.uses: dict[torch.Tensor, list[int]] = {}
        self.writes: dict[str, int] = {}  # by buffer, when it was changed last
        # When the forward has read values that depend on weights, in which modules' own code, and
        # PyTorch's error at the first of these.
        self.value_reads: list[int] = []
        self.value_readers: dict[str, None] = {}
        self.read_error: Exception | None = None
        self.begun: dict[str, int] = {}  # by module, when its first call began
        # By when a tensor was made, and its id: when it was used last, and the tensor itself, so
        # that no other one gets its id.
        self._last_uses: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        # When memory was changed in place, and the number of its storage.
        self._changes: list[tuple[int, int]] = []
        # By storage that an operation has filled with results of weights: when, and the tensor.
        self._filled: dict[int, tuple[int, torch.Tensor]] = {}
        # The running calls of modules, the innermost last: how many calls had ended before, the
        # arguments, and what the call might change. A call that an error ends leaves one behind.
        self._running: list[tuple[str, int, list[Any], Any]] = []
        self._count: Counter[str] = Counter()
        self._calls: list[_Call] = []
        # By the id of a tensor, the number of the call in ``_calls`` that has returned it first.
        self._first: dict[int, int] = {}

    def operation(self, call: Operation) -> Any:
        self.time += 1
        with torch._C.DisableTorchFunction():  # or other modes would see what is read here
            versions = list(map(version_of, call.inputs))
            depends, of_batch = self._note_inputs(call.inputs)
        out = call.run()
        with torch._C.DisableTorchFunction():
            changed = [t for t, v in zip(call.inputs, versions, strict=True) if version_of(t) != v]
            in_place = is_in_place(call.function)
            in_place |= getattr(call.function, "__self__", None) is _DATA
            if call.args and in_place and isinstance(call.args[0], torch.Tensor):
                changed.append(call.args[0])
            for t in changed:
                self._note_change(t, depends)
            for t in tensors_in(out) if depends or of_batch else ():
                if call.function in MAKES_NEW and not t.is_meta:
                    continue
                if of_batch:
                    setattr(t, _OF_BATCH, True)
                was_there = isinstance(t, nn.Parameter) or (_is_in(t, call.inputs) and _depends(t))
                if depends and not was_there:
                    setattr(t, _BORN, self.time)
                    if getattr(call.function, "__name__", "") in _ADDS_UP:
                        setattr(t, _FROM, call.inputs)
        return out

    def _note_inputs(self, inputs: Sequence[torch.Tensor]) -> tuple[bool, bool]:
        """Note what a function uses; return whether that depends on weights, and on the batch."""
        depends, of_batch = False, False
        for t in inputs:
            of_batch |= hasattr(t, _OF_BATCH)
            if isinstance(t, nn.Parameter):
                self.uses.setdefault(t, []).append(self.time)
                depends = True
            elif t.is_meta or _depends(t):
                if not _depends(t):  # PyTorch does not show what an autograd Function returns
                    setattr(t, _BORN, self.time - 1)
                    of_batch = True
                self._last_uses[getattr(t, _BORN), id(t)] = self.time, t
                depends = True
            elif (filled := self._filled.get(storage_of(t))) is not None:
                self._last_uses[filled[0], id(filled[1])] = self.time, filled[1]
        return depends, of_batch

    def _note_change(self, t: torch.Tensor, depends: bool) -> None:
        number = storage_of(t)
        self._changes.append((self.time, number))
        if number in self._buffer_at:
            self.writes[self._buffer_at[number]] = self.time
        if depends and not t.is_meta:
            self._filled[number] = self.time, t

    def note_arguments(self, tree: Any) -> None:
        for t in tensors_in(tree):
            setattr(t, _OF_BATCH, True)

    def note_result(self, tree: Any) -> None:
        """Note the result of the forward, which is used after its end."""
        for t in filter(_depends, tensors_in(tree)):
            self._last_uses[getattr(t, _BORN), id(t)] = self.time + 1, t

    def note_value_read(self, error: Exception) -> None:
        self.value_reads.append(self.time)
        self.value_readers[self._running[-1][0] if self._running else ""] = None
        self.read_error = self.read_error or error

    @staticmethod
    def is_result(t: torch.Tensor) -> bool:
        """Whether a tensor depends on weights, and is a single number or depends on the batch."""
        return _depends(t) and (not t.dim() or hasattr(t, _OF_BATCH))

    def calls_followed(self) -> Any:
        """A context in which this notes the calls of modules."""
        return calls_watched(self._modules, self._begin, self._end, before_hooks=False)

    def _begin(self, name: str, args: Any, kwargs: Any) -> None:
        if name:
            self.begun.setdefault(name, self.time)
            self._count[name] += 1
            before = self._side_outputs.changeable(self._modules[name], args, kwargs)
            self._running.append((name, len(self._calls), tree_leaves((args, kwargs)), before))

    def _end(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        if not name:
            for each, module in self._modules.items():
                self._note_new_buffers(each, module)
            return
        module = self._modules[name]
        while (running := self._running.pop())[0] != name:
            pass  # an error has ended the call of a module inside
        _, earlier, arguments, before = running
        self._note_new_buffers(name, module)
        now = self._side_outputs.changeable(module, args, kwargs)
        # A number may follow from a value that other ranks do not have.
        has_side_effects = now != before if self.value_reads else now[0] != before[0]
        # A number, for example, may be another one in the next call.
        fixed = all(isinstance(t, torch.Tensor | None) for t in tree_leaves(output))
        if not fixed or is_recomputed_within(module):
            return
        tensors, flops = tensors_in(output), self._flops.get_total_flops()
        with torch._C.DisableTorchFunction():  # this is no use of them
            requires_grad = [t.requires_grad for t in tensors]
        for t in tensors:
            self._first.setdefault(id(t), len(self._calls))
        result = tensors, structure_of(output), requires_grad
        kept = self._side_outputs.tensors()
        self._calls.append(
            _Call(name, earlier, self.time, flops, *result, arguments, has_side_effects, *kept)
        )

    def _note_new_buffers(self, name: str, module: nn.Module) -> None:
        for own, buffer in module.named_buffers(recurse=False):
            full = f"{name}.{own}" if name else own
            if full in self._buffers and storage_of(buffer) != storage_of(self._buffers[full]):
                self.writes.setdefault(full, self.time)

    def shape_only(self) -> Iterator[ShapeOnly]:
        """The modules that later stages need not run.

        They return new tensors that depend on weights, and nothing else inside is used later.
        """
        for each in self._calls:
            depends = [_depends(t) and self._is_new(t, each) for t in each.tensors]
            once = self._count[each.module] == 1 and not each.has_side_effects
            if once and depends and all(depends):
                begun = self.begun[each.module]
                made = self._crossing(each.time, begun)
                if made.keys() <= set(map(id, [*each.tensors, *each.side_outputs])):
                    shapes = tuple(t.shape for t in each.tensors)
                    yield ShapeOnly(each.module, begun, each.time, shapes)

    def places(self, side_outputs: Sequence[torch.Tensor]) -> list[ModuleCut]:
        """Where the model can be cut.

        All that is used later and depends on a parameter must be an output of a module, follow from
        such by a few operations, or be a side output that the forward keeps for the script.
        """
        found: list[ModuleCut] = []
        ended = [
            each
            for each in self._calls
            if self._count[each.module] == 1 and not each.is_inside_a_function
        ]
        for i, each in enumerate(ended):
            crossing = self._crossing(each.time)
            new = [t for t in each.tensors if self._is_new(t, each)]
            numbers = set(map(id, new))
            if each.has_side_effects or numbers.isdisjoint(crossing) or each.time >= self.time:
                continue
            # A tensor that it only passes through is sent as the output of the module that made it.
            crossing |= {
                id(t): t
                for t in side_outputs
                if getattr(t, _BORN, sys.maxsize) <= each.time and not _is_in(t, each.side_outputs)
            }
            others = {n: t for n, t in crossing.items() if n not in numbers}
            known = [self._sources(t, ended[:i], each) for t in others.values()]
            skips = tuple(dict.fromkeys(output for outputs in known for output in outputs or ()))
            own = {id(t): self._output_of(t, ended[:i], each.time) for t in others.values()}
            sent = [t for n, t in others.items() if own[n]]
            if None in known or _share_memory([*new, *sent], len(sent)):
                continue
            nbytes = bytes_of([*new, *others.values()])
            returned = (own.get(id(t)) for t in each.tensors)
            aliases = tuple(None if o is None else skips.index(o) for o in returned)
            # If modules end together, take the outermost.
            if found and found[-1].time == each.time:
                found.pop()
            sizes = nbytes, each.flops
            found.append(ModuleCut(each.module, each.time, *sizes, each.structure, skips, aliases))
        return found

    def _crossing(self, time: int, since: int = -1) -> dict[int, torch.Tensor]:
        """The tensors made after ``since`` and up to this end of a call, and used later, by id."""
        return {id(t): t for born, _, t in self._crossings[time] if born > since}

    @cached_property
    def _crossings(self) -> dict[int, list[tuple[int, int, torch.Tensor]]]:
        """By end of a call, tensors made up to then and used later: when made, used last."""
        later = [(born, *last) for (born, _), last in self._last_uses.items()]
        later.sort(key=lambda each: each[0], reverse=True)
        found: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
        made: list[tuple[int, int, torch.Tensor]] = []
        for time in (call.time for call in self._calls):
            while later and later[-1][0] <= time:
                made.append(later.pop())
            found[time] = [each for each in made if each[1] > time]
            made = found[time].copy()
        return found

    def _is_changed(self, t: torch.Tensor, begin: int, end: int) -> bool:
        """Whether the memory of a tensor is changed in place after ``begin``, and up to ``end``."""
        own = storage_of(t)
        return any(begin < time <= end and storage == own for time, storage in self._changes)

    def _is_new(self, t: torch.Tensor, call: _Call) -> bool:
        """Whether a call made its output itself, or modules inside of it did."""
        return self._first[id(t)] >= call.earlier and not _is_in(t, call.arguments)

    def _sources(
        self, t: torch.Tensor, ended: Sequence[_Call], call: _Call
    ) -> list[ModuleOutput] | None:
        """The outputs from which a later stage can compute a tensor; None if it cannot."""
        if output := self._output_of(t, ended, call.time):
            return [output]
        if _is_in(t, call.side_outputs):
            return []
        terms = getattr(t, _FROM, None)
        if t.dim() > 1 or not terms or self._is_changed(t, getattr(t, _BORN), call.time):
            return None
        found: list[ModuleOutput] = []
        for each in terms:
            if isinstance(each, nn.Parameter):
                return None
            if _depends(each):
                sources = self._sources(each, ended, call)
                # Side outputs in lists, of modules that are not called again, come too late.
                if sources is None or (not sources and not _is_in(each, call.side_tensors)):
                    return None
                found += sources
        return found

    def _output_of(self, t: torch.Tensor, ended: Sequence[_Call], time: int) -> ModuleOutput | None:
        """The first output that is this tensor, of the calls that have ended.

        None if there is none, or if the tensor is changed before ``time``: a later stage would
        change it again. Modules that only pass the tensor through, or have side effects, do not
        count.
        """
        for each in ended:
            number = next((i for i, own in enumerate(each.tensors) if own is t), None)
            if number is None or each.has_side_effects or not self._is_new(t, each):
                continue
            if not self._is_changed(t, each.time, time):
                return ModuleOutput(each.module, number)
        return None


def _depends(t: torch.Tensor) -> bool:
    return hasattr(t, _BORN)


def _is_in(t: torch.Tensor, things: Sequence[Any]) -> bool:
    return any(each is t for each in things)


def _share_memory(tensors: Sequence[torch.Tensor], others: int) -> bool:
    """Whether one of the last ``others`` tensors shares memory with another tensor.

    They arrive in memory of their own, so that a change of one would not change the other.
    """
    storages = [storage_of(t) for t in tensors]
    return any(storages.count(each) > 1 for each in storages[len(storages) - others :])
