"""Where a model can be cut, from what a dry run sees: calls of modules, and who uses what.

A cut is after a call. All that is used later, and depends on weights, must then be what modules
have returned: a later stage gets it where they return it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hvkit.frameworks.pytorch.model_parallel.kept_results import KeptResults
from hvkit.frameworks.pytorch.model_parallel.meta_device import (
    MAKES_NEW,
    calls_watched,
    is_recomputed_within,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.rules import (
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

# What ``buffer.data = ...`` calls.
_DATA: Any = torch.Tensor.data
# When a tensor came to depend on a parameter, as an attribute of it.
_BORN = "_hvkit_born"
# Of what a forward adds up from losses, the tensors that it has taken. Later stages compute it
# again.
_FROM = "_hvkit_from"
_ADDS_UP = {"add", "mul", "div", "__add__", "__radd__", "__mul__", "__rmul__", "__truediv__"}
_ADDS_UP |= {"sum", "mean", "stack", "cat"}
# Of a tensor that depends on the batch.
_OF_BATCH = "_hvkit_of_batch"


@dataclass(frozen=True)
class Result:
    """A tensor that a module returns.

    Attributes:
        module: its name; it is called once.
        number: of the tensor, among those that the module returns.
    """

    module: str
    number: int


@dataclass(frozen=True)
class CutPlace:
    """A module after whose call the model can be cut.

    Attributes:
        module: its name.
        time: when its call ended, in operations.
        flops: of forward up to there.
        nbytes: of its output, and of the results beside it, for the samples of the dry run.
        structure: its output, with a ``Slot`` in place of each tensor.
        begun: when its call began.
        beside: results of modules before it that are used later, too.
        slots: for each tensor of the output, which of these it is; None for a new one.
    """

    module: str
    time: int
    flops: int
    nbytes: int
    structure: Any
    begun: int
    beside: tuple[Result, ...] = ()
    slots: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        others = ", ".join(each.module for each in self.beside)
        return self.module + (f", with the results of {others}" if others else "")


@dataclass(frozen=True)
class Closed:
    """A module of whose call later stages need to know no more than the shapes of its output.

    Attributes:
        module: its name.
        begun, ended: when, in operations.
        shapes: of its output.
    """

    module: str
    begun: int
    ended: int
    shapes: tuple[torch.Size, ...]

    def includes(self, time: int) -> bool:
        """Whether an operation was in the call."""
        return self.begun < time <= self.ended


@dataclass
class _Ended:
    """The end of a call of a module.

    Attributes:
        earlier: how many calls had ended when it began.
        trained: whether autograd followed each of the tensors that it returns.
        given: the arguments.
        changes_others: whether it has changed more than what it returns.
        kept: what the forward has kept so far, which stages pass on.
        alone: what of it is in no list.
    """

    module: str
    earlier: int
    time: int
    flops: int
    tensors: list[torch.Tensor]
    structure: Any
    trained: list[bool]
    given: list[Any]
    changes_others: bool
    kept: list[torch.Tensor]
    alone: list[torch.Tensor]

    @property
    def is_inside_a_function(self) -> bool:
        """Whether autograd has seen its result only afterwards, from another operation."""
        return [t.requires_grad for t in self.tensors] != self.trained


class ForwardTrace(EachOperation):
    """When tensors that depend on parameters are made and used, and when modules are called.

    Attributes:
        time: operations so far.
        reads: by parameter, when it was used.
        writes: by buffer, when it was changed last.
        looks: when the forward has looked at a value.
        lookers: the modules in whose own code it has.
        looked: the first error where it has.
        begun: by module, when its first call began.
    """

    def __init__(
        self,
        model: nn.Module,
        buffers: Mapping[str, torch.Tensor],
        flops: FlopCounterMode,
        kept: KeptResults,
    ) -> None:
        super().__init__()
        self._modules = dict(model.named_modules())
        self._buffers, self._flops, self._kept = buffers, flops, kept
        self._buffer_at = {storage_of(b): name for name, b in buffers.items()}
        self.time = 0
        self.reads: dict[torch.Tensor, list[int]] = {}
        self.writes: dict[str, int] = {}
        self.looks: list[int] = []
        self.lookers: dict[str, None] = {}
        self.looked: Exception | None = None
        self.begun: dict[str, int] = {}
        # When a tensor was used that was made when; the tensor keeps its id from being used again.
        self._uses: list[tuple[int, int, torch.Tensor]] = []
        # When the memory of a tensor was changed in place, by its number.
        self._changes: list[tuple[int, int]] = []
        # Memory that held no results of weights before: when such were written into it.
        self._late: dict[int, tuple[int, torch.Tensor]] = {}
        # Of the calls that are running: how many had ended before, with what they were called, and
        # what they might change. By module; a call that an error ends leaves one behind.
        self._running: dict[str, list[tuple[int, Any, Any]]] = {}
        # Those that are running, the innermost last.
        self._inside: list[str] = []
        self._count: dict[str, int] = {}
        self._ended: list[_Ended] = []
        # By the id of a tensor, the number of the call in ``_ended`` that has returned it first.
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
        """Note what a function uses, and return whether that depends on weights, and the batch."""
        depends, of_batch = False, False
        for t in inputs:
            of_batch |= hasattr(t, _OF_BATCH)
            if isinstance(t, nn.Parameter):
                self.reads.setdefault(t, []).append(self.time)
                depends = True
            elif t.is_meta or _depends(t):
                if not _depends(t):  # PyTorch does not show what an autograd Function returns
                    setattr(t, _BORN, self.time - 1)
                    of_batch = True
                self._uses.append((self.time, getattr(t, _BORN), t))
                depends = True
            elif (late := self._late.get(storage_of(t))) is not None:
                self._uses.append((self.time, *late))
        return depends, of_batch

    def _note_change(self, t: torch.Tensor, depends: bool) -> None:
        number = storage_of(t)
        self._changes.append((self.time, number))
        if number in self._buffer_at:
            self.writes[self._buffer_at[number]] = self.time
        if depends and not t.is_meta:
            self._late[number] = self.time, t

    def begin_with(self, tree: Any) -> None:
        """Note that the forward has got these tensors."""
        for t in tensors_in(tree):
            setattr(t, _OF_BATCH, True)

    def end_with(self, tree: Any) -> None:
        """Note that the forward has returned these tensors: they are used after the end."""
        for t in filter(_depends, tensors_in(tree)):
            self._uses.append((self.time + 1, getattr(t, _BORN), t))

    def look(self, error: Exception) -> None:
        """Note that the forward looks at a value now."""
        self.looks.append(self.time)
        self.lookers[self._inside[-1] if self._inside else ""] = None
        self.looked = self.looked or error

    @staticmethod
    def is_result(t: torch.Tensor) -> bool:
        """Whether it depends on weights, and is a single number or depends on the batch."""
        return _depends(t) and (not t.dim() or hasattr(t, _OF_BATCH))

    def calls_followed(self) -> Any:
        """A context in which calls of modules are noted."""
        return calls_watched(self._modules, self._begin, self._end, before_hooks=False)

    def _begin(self, name: str, args: Any, kwargs: Any) -> None:
        if not name:
            return
        self._inside.append(name)
        self.begun.setdefault(name, self.time)
        self._count[name] = self._count.get(name, 0) + 1
        before = self._kept.changeable(self._modules[name], args, kwargs)
        given = tree_leaves((args, kwargs))
        self._running.setdefault(name, []).append((len(self._ended), given, before))

    def _end(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        if not name:
            for each, module in self._modules.items():
                self._note_new_buffers(each, module)
            return
        module = self._modules[name]
        while self._inside and self._inside.pop() != name:
            pass  # an error has ended the call of one inside
        earlier, given, before = self._running[name].pop()
        self._note_new_buffers(name, module)
        now = self._kept.changeable(module, args, kwargs)
        # A number has perhaps changed by a value that other ranks do not have.
        changes_others = now != before if self.looks else now[0] != before[0]
        flops = self._flops.get_total_flops()
        if any(not isinstance(t, torch.Tensor | None) for t in tree_leaves(output)):
            return  # a number, say, that may be another one in the next call
        if is_recomputed_within(module):
            return
        tensors, structure = tensors_in(output), structure_of(output)
        with torch._C.DisableTorchFunction():  # a look is no use
            trained = [t.requires_grad for t in tensors]
        for t in tensors:
            self._first.setdefault(id(t), len(self._ended))
        self._ended.append(
            _Ended(
                name,
                earlier,
                self.time,
                flops,
                tensors,
                structure,
                trained,
                given,
                changes_others,
                *self._kept.tensors(),
            )
        )

    def _note_new_buffers(self, name: str, module: nn.Module) -> None:
        """Note when buffers of a module have got other tensors."""
        for own, buffer in module.named_buffers(recurse=False):
            full = f"{name}.{own}" if name else own
            if full in self._buffers and storage_of(buffer) != storage_of(self._buffers[full]):
                self.writes.setdefault(full, self.time)

    def closed(self) -> Iterator[Closed]:
        """The modules that later stages need not call."""
        for each in self._ended:
            depends = [_depends(t) and self._is_new(t, each) for t in each.tensors]
            once = self._count[each.module] == 1 and not each.changes_others
            if once and depends and all(depends):
                begun = self.begun[each.module]
                made = self._crossing(each.time, begun)
                if made.keys() <= set(map(id, [*each.tensors, *each.kept])):
                    shapes = tuple(t.shape for t in each.tensors)
                    yield Closed(each.module, begun, each.time, shapes)

    def places(self, kept: Sequence[torch.Tensor]) -> list[CutPlace]:
        """Where all that is used later and depends on a parameter is what modules return.

        Or what follows from that by a few operations, or what the forward keeps for the script.
        """
        found: list[CutPlace] = []
        once = [each for each in self._ended if self._count[each.module] == 1]
        ended = [each for each in once if not each.is_inside_a_function]
        for i, each in enumerate(ended):
            crossing = self._crossing(each.time)
            new = [t for t in each.tensors if self._is_new(t, each)]
            numbers = set(map(id, new))
            if each.changes_others or numbers.isdisjoint(crossing) or each.time >= self.time:
                continue
            # What it has been given and returns is sent as a result of the module that has made it.
            crossing |= {
                id(t): t
                for t in kept
                if getattr(t, _BORN, sys.maxsize) <= each.time and not _is_in(t, each.kept)
            }
            others = {n: t for n, t in crossing.items() if n not in numbers}
            known = [self._sources(t, ended[:i], each) for t in others.values()]
            beside = tuple(dict.fromkeys(result for results in known for result in results or ()))
            own = {id(t): self._result(t, ended[:i], each.time) for t in others.values()}
            sent = [t for n, t in others.items() if own[n]]
            if None in known or _share_memory([*new, *sent], len(sent)):
                continue
            returned = [own.get(id(t)) for t in each.tensors]
            slots = [None if result is None else beside.index(result) for result in returned]
            place = CutPlace(
                each.module,
                each.time,
                each.flops,
                bytes_of([*new, *others.values()]),
                each.structure,
                self.begun[each.module],
                beside,
                tuple(slots),
            )
            # Of those that end together the outermost.
            if found and found[-1].time == each.time:
                found.pop()
            found.append(place)
        return found

    def _crossing(self, time: int, since: int = -1) -> dict[int, torch.Tensor]:
        """What was made after ``since`` and up to a time, and is used after it, by its id."""
        return {id(t): t for used, born, t in self._uses if since < born <= time < used}

    def _is_changed(self, t: torch.Tensor, begin: int, end: int) -> bool:
        """Whether its memory is changed in place after one time, and up to another."""
        own = storage_of(t)
        return any(begin < time <= end and storage == own for time, storage in self._changes)

    def _is_new(self, t: torch.Tensor, call: _Ended) -> bool:
        """Whether no one has had a result of a call before, but modules inside of it."""
        return self._first[id(t)] >= call.earlier and not _is_in(t, call.given)

    def _sources(
        self, t: torch.Tensor, ended: Sequence[_Ended], call: _Ended
    ) -> list[Result] | None:
        """The results of modules from which a later stage has a tensor; None if not all."""
        if (result := self._result(t, ended, call.time)) is not None:
            return [result]
        if _is_in(t, call.kept):
            return []
        found: list[Result] = []
        if t.dim() > 1 or not hasattr(t, _FROM):
            return None
        if self._is_changed(t, getattr(t, _BORN), call.time):
            return None
        for each in getattr(t, _FROM):
            if isinstance(each, nn.Parameter):
                return None
            if _depends(each):
                its = self._sources(each, ended, call)
                # What modules that are not called again have kept in lists comes too late.
                if its is None or (not its and not _is_in(each, call.alone)):
                    return None
                found += its
        return found

    def _result(self, t: torch.Tensor, ended: Sequence[_Ended], time: int) -> Result | None:
        """The module that returns a tensor first as it is, of those that have ended.

        None if there is none, or if the tensor is changed before ``time``: a later stage would
        change it again. A module that was given the tensor, or changes something else, does not
        count.
        """
        for each in ended:
            numbers = [number for number, own in enumerate(each.tensors) if own is t]
            if not numbers or each.changes_others or not self._is_new(t, each):
                continue
            if not self._is_changed(t, each.time, time):
                return Result(each.module, numbers[0])
        return None


def _depends(t: torch.Tensor) -> bool:
    return hasattr(t, _BORN)


def _is_in(t: torch.Tensor, things: Sequence[Any]) -> bool:
    return any(each is t for each in things)


def _share_memory(tensors: Sequence[torch.Tensor], others: int) -> bool:
    """Whether one of the last tensors has memory in common with another one.

    They arrive apart, so that a change of one would not be seen in the other.
    """
    storages = [storage_of(t) for t in tensors]
    return any(storages.count(each) > 1 for each in storages[len(storages) - others :])
