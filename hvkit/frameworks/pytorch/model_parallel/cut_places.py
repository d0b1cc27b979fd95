"""Where a model can be cut, from what a dry run sees: calls of modules, and who uses what.

A cut is after a call. All that is used later, and depends on weights, must then be what modules
have returned: a later stage gets it where they return it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hvkit.frameworks.pytorch.model_parallel.kept_results import KeptResults
from hvkit.frameworks.pytorch.model_parallel.meta_device import MAKES_NEW
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import (
    bytes_of,
    storage_of,
    structure_of,
    tensors_in,
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


class TensorUses(TorchFunctionMode):
    """Notes when tensors that depend on parameters are made and used.

    Attributes:
        time: operations so far.
        uses: when, of a tensor made when, with the tensor, which keeps its id from being used
            again.
        reads: by parameter, when it was used.
        changes: when the memory of a tensor was changed in place, by its number.
        buffers: their names, by the number of their memory.
        writes: by buffer, when it was changed last.
        looks: when the forward has looked at a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.time = 0
        self.changes: list[tuple[int, int]] = []
        self.uses: list[tuple[int, int, torch.Tensor]] = []
        self.reads: dict[torch.Tensor, list[int]] = {}
        # Memory that held no results of weights before: when such were written into it.
        self._late: dict[int, tuple[int, torch.Tensor]] = {}
        self.buffers: dict[int, str] = {}
        self.writes: dict[str, int] = {}
        self.looks: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.time += 1
        with torch._C.DisableTorchFunction():  # or other modes would see what is read here
            inputs, versions, depends, of_batch = self._note_inputs(args, kwargs)
        out = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            changed = [t for t, v in zip(inputs, versions, strict=True) if _version_of(t) != v]
            in_place = is_in_place(func) or getattr(func, "__self__", None) is _DATA
            if args and in_place and isinstance(args[0], torch.Tensor):
                changed.append(args[0])
            for t in changed:
                self._note_change(t, depends)
            for t in tensors_in(out) if depends or of_batch else ():
                if func in MAKES_NEW and not t.is_meta:
                    continue
                if of_batch:
                    setattr(t, _OF_BATCH, True)
                if not depends:
                    continue
                changed_in_place = any(t is each for each in inputs)
                if not isinstance(t, nn.Parameter) and not (changed_in_place and hasattr(t, _BORN)):
                    setattr(t, _BORN, self.time)
                    if getattr(func, "__name__", "") in _ADDS_UP:
                        setattr(t, _FROM, inputs)
        return out

    def _note_inputs(
        self, args: Any, kwargs: Any
    ) -> tuple[list[torch.Tensor], list[int], bool, bool]:
        """The tensors that a function gets, their versions, and on what they depend."""
        inputs = tensors_in((args, kwargs))
        depends, of_batch = False, False
        for t in inputs:
            of_batch |= hasattr(t, _OF_BATCH)
            if isinstance(t, nn.Parameter):
                self.reads.setdefault(t, []).append(self.time)
                depends = True
            elif t.is_meta or hasattr(t, _BORN):
                if not hasattr(t, _BORN):  # PyTorch does not show what an autograd Function returns
                    setattr(t, _BORN, self.time - 1)
                    of_batch = True
                self.uses.append((self.time, getattr(t, _BORN), t))
                depends = True
            elif (late := self._late.get(storage_of(t))) is not None:
                self.uses.append((self.time, *late))
        return inputs, list(map(_version_of, inputs)), depends, of_batch

    def _note_change(self, t: torch.Tensor, depends: bool) -> None:
        number = storage_of(t)
        self.changes.append((self.time, number))
        if number in self.buffers:
            self.writes[self.buffers[number]] = self.time
        if depends and not t.is_meta:
            self._late[number] = self.time, t

    def use_all(self, tree: Any) -> None:
        """Count tensors as used after the end."""
        for t in tensors_in(tree):
            if (born := getattr(t, _BORN, None)) is not None:
                self.uses.append((self.time + 1, born, t))

    def begin_with(self, tree: Any) -> None:
        """Note that a forward has got these tensors."""
        for t in tensors_in(tree):
            setattr(t, _OF_BATCH, True)

    @staticmethod
    def is_result(t: torch.Tensor) -> bool:
        """Whether it depends on weights, and is a single number or depends on the batch."""
        return hasattr(t, _BORN) and (not t.dim() or hasattr(t, _OF_BATCH))

    def crossing(self, time: int, since: int = -1) -> dict[int, torch.Tensor]:
        """What was made after ``since`` and up to a time, and is used after it, by its id."""
        return {id(t): t for used, born, t in self.uses if since < born <= time < used}

    def is_changed(self, t: torch.Tensor, begin: int, end: int) -> bool:
        """Whether its memory is changed in place after one time, and up to another."""
        own = storage_of(t)
        return any(begin < time <= end and storage == own for time, storage in self.changes)


@dataclass
class _Ended:
    """The end of a call of a module.

    Attributes:
        earlier: how many calls had ended when it began.
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
        return any(
            t.requires_grad is not before
            for t, before in zip(self.tensors, self.trained, strict=True)
        )


class ModuleCalls:
    """The calls of modules during a dry run.

    Args:
        flow: its clock.
        flops: counts those of the forward.
        buffers: of the model, by name.
        kept: what the forward keeps, which stages pass on.
    """

    def __init__(
        self,
        flow: TensorUses,
        flops: FlopCounterMode,
        buffers: Mapping[str, torch.Tensor],
        kept: KeptResults,
    ) -> None:
        self._flow, self._flops, self._buffers, self._kept = flow, flops, buffers, kept
        # Of the calls that are running: when they began, with what, and what they might change.
        # By module; a call that an error ends leaves one behind.
        self._running: dict[str, list[tuple[int, Any, Any]]] = {}
        # Those that are running, the innermost last; where a value was looked at; the first error.
        self._inside: list[str] = []
        self.lookers: dict[str, None] = {}
        self.looked: Exception | None = None
        self.begun: dict[str, int] = {}
        self.count: dict[str, int] = {}
        self.ended: list[_Ended] = []
        # By the id of a tensor, the number of the call in ``ended`` that has returned it first.
        self.first: dict[int, int] = {}

    def follow(self, model: nn.Module) -> list[Any]:
        """Register hooks, and return what removes them."""
        hooks = []
        for name, module in model.named_modules():
            if name:
                begin = functools.partial(self._begin, name)
                hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
                end = functools.partial(self._end, name)
                hooks.append(module.register_forward_hook(end, with_kwargs=True))
        hooks.append(model.register_forward_hook(self._end_of_all))
        return hooks

    def look(self, error: Exception) -> None:
        """Note that the forward looks at a value now."""
        self._flow.looks.append(self._flow.time)
        self.lookers[self._inside[-1] if self._inside else ""] = None
        self.looked = self.looked or error

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.append(name)
        self.begun.setdefault(name, self._flow.time)
        self.count[name] = self.count.get(name, 0) + 1
        given = tree_leaves((args, kwargs))
        before = _changeable(module, args, kwargs, self._kept), _numbers(module)
        self._running.setdefault(name, []).append((len(self.ended), given, before))

    def _end_of_all(self, model: nn.Module, args: Any, output: Any) -> None:
        for name, module in model.named_modules():
            self._note_new_buffers(name, module)

    def _note_new_buffers(self, name: str, module: nn.Module) -> None:
        """Note when buffers of a module have got other tensors."""
        for own, buffer in module.named_buffers(recurse=False):
            whole = f"{name}.{own}" if name else own
            if whole in self._buffers and storage_of(buffer) != storage_of(self._buffers[whole]):
                self._flow.writes.setdefault(whole, self._flow.time)

    def _end(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        while self._inside and self._inside.pop() != name:
            pass  # an error has ended the call of one inside
        earlier, given, before = self._running[name].pop()
        self._note_new_buffers(name, module)
        changes_others = _changeable(module, args, kwargs, self._kept) != before[0]
        if self._flow.looks and _numbers(module) != before[1]:
            changes_others = True  # perhaps by a value that other ranks do not have
        flops = self._flops.get_total_flops()
        if any(not isinstance(t, torch.Tensor | None) for t in tree_leaves(output)):
            return  # a number, say, that may be another one in the next call
        if not _recomputed_from_within(module):
            tensors, structure = tensors_in(output), structure_of(output)
            with torch._C.DisableTorchFunction():  # a look is no use
                trained = [t.requires_grad for t in tensors]
            for t in tensors:
                self.first.setdefault(id(t), len(self.ended))
            self.ended.append(
                _Ended(
                    name,
                    earlier,
                    self._flow.time,
                    flops,
                    tensors,
                    structure,
                    trained,
                    given,
                    changes_others,
                    *self._kept.tensors(),
                )
            )


def _changeable(module: nn.Module, args: Any, kwargs: Any, passed_on: KeptResults) -> Any:
    """What the call of a module may change beside its result; equal if it has not.

    Lists and dicts that it is given, tensors, and attributes in which it keeps tensors, unless
    stages pass these on.
    """
    # Not to be seen by the modes that look at operations.
    with torch._C.DisableTorchFunction():
        leaves, spec = tree_flatten((args, kwargs))
        kept = [
            [id(t) for t in tensors_in(value)]
            for each in module.modules()
            for name, value in vars(each).items()
            if not name.startswith("_") and isinstance(value, torch.Tensor | list | dict | tuple)
            if not passed_on.includes(each, name)
        ]
        versions = [_version_of(each) for each in leaves if isinstance(each, torch.Tensor)]
        return spec, list(map(id, leaves)), versions, kept


def _numbers(module: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for each in module.modules()
        for name, value in vars(each).items()
        if isinstance(value, bool | int | float)
    ]


def _version_of(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _recomputed_from_within(module: nn.Module) -> bool:
    """Whether the call of a module that ends now is a part of what a checkpoint computes again.

    It is none if the checkpoint computes this module and nothing else.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            function = frame.f_locals.get("function")
            while isinstance(function, functools.partial):
                function = function.func
            if function is not None:
                return getattr(function, "__self__", function) is not module
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_in_place(function: Any) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(function, "__name__", "")
    own = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return own or name == "__setitem__"


def places_in(
    flow: TensorUses, calls: ModuleCalls, kept: Sequence[torch.Tensor] = ()
) -> list[CutPlace]:
    """Where all that is used later and depends on a parameter is what modules return.

    Or what follows from that by a few operations, or what the forward keeps for the script.

    Args:
        flow, calls: of a dry run.
        kept: what the forward has kept at its end.
    """
    found: list[CutPlace] = []
    once = [each for each in calls.ended if calls.count[each.module] == 1]
    ended = [each for each in once if not each.is_inside_a_function]
    for i, each in enumerate(ended):
        crossing = flow.crossing(each.time)
        new = [t for t in each.tensors if _is_new(t, each, calls)]
        numbers = set(map(id, new))
        if each.changes_others or numbers.isdisjoint(crossing) or each.time >= flow.time:
            continue
        # What it has been given and returns is sent as a result of the module that has made it.
        crossing |= {id(t): t for t in kept if _is_born(t, each.time) and not _is_in(t, each.kept)}
        others = {n: t for n, t in crossing.items() if n not in numbers}
        find = functools.partial(_sources, ended=ended[:i], call=each, uses=flow, calls=calls)
        known = [find(t) for t in others.values()]
        beside = tuple(dict.fromkeys(result for results in known for result in results or ()))
        own = {id(t): _result(t, ended[:i], each.time, flow, calls) for t in others.values()}
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
            calls.begun[each.module],
            beside,
            tuple(slots),
        )
        # Of those that end together the outermost.
        if found and found[-1].time == each.time:
            found[-1] = place
        else:
            found.append(place)
    return found


def _is_born(t: torch.Tensor, time: int) -> bool:
    return getattr(t, _BORN, sys.maxsize) <= time


def _is_in(t: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    return any(each is t for each in tensors)


def _sources(
    t: torch.Tensor,
    ended: Sequence[_Ended],
    call: _Ended,
    uses: TensorUses,
    calls: ModuleCalls,
) -> list[Result] | None:
    """The results of modules from which a later stage has a tensor; None if they are not enough.

    Args:
        t: made before the end of a call.
        ended: the calls that have ended before.
        call: this one; what is kept then is passed on anyway.
    """
    if (result := _result(t, ended, call.time, uses, calls)) is not None:
        return [result]
    if _is_in(t, call.kept):
        return []
    found: list[Result] = []
    if t.dim() > 1 or not hasattr(t, _FROM) or uses.is_changed(t, getattr(t, _BORN), call.time):
        return None
    for each in getattr(t, _FROM):
        if isinstance(each, nn.Parameter):
            return None
        if hasattr(each, _BORN):
            theirs = _sources(each, ended, call, uses, calls)
            # What modules that are not called again have kept in lists comes too late.
            if theirs is None or (not theirs and not _is_in(each, call.alone)):
                return None
            found += theirs
    return found


def _result(
    t: torch.Tensor, ended: Sequence[_Ended], time: int, uses: TensorUses, calls: ModuleCalls
) -> Result | None:
    """The module that returns a tensor first as it is, of those that have ended; others keep it.

    None if there is none, or if the tensor is changed before ``time``: a later stage would change
    it again. A module that was given the tensor, or changes something else, does not count.
    """
    for each in ended:
        numbers = [number for number, own in enumerate(each.tensors) if own is t]
        if not numbers or each.changes_others or not _is_new(t, each, calls):
            continue
        if not uses.is_changed(t, each.time, time):
            return Result(each.module, numbers[0])
    return None


def _is_new(t: torch.Tensor, call: _Ended, calls: ModuleCalls) -> bool:
    """Whether no one has had a result of a call before, but modules inside of it."""
    return calls.first[id(t)] >= call.earlier and not any(each is t for each in call.given)


def _share_memory(tensors: Sequence[torch.Tensor], others: int) -> bool:
    """Whether one of the last tensors has memory in common with another one.

    They arrive apart, so that a change of one would not be seen in the other.
    """
    storages = [storage_of(t) for t in tensors]
    return any(storages.count(each) > 1 for each in storages[len(storages) - others :])


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


def closed_in(flow: TensorUses, calls: ModuleCalls) -> Iterator[Closed]:
    """The modules that later stages need not call."""
    for each in calls.ended:
        depends = [hasattr(t, _BORN) and _is_new(t, each, calls) for t in each.tensors]
        once = calls.count[each.module] == 1 and not each.changes_others
        if once and depends and all(depends):
            made = flow.crossing(each.time, calls.begun[each.module])
            if made.keys() <= set(map(id, [*each.tensors, *each.kept])):
                shapes = tuple(t.shape for t in each.tensors)
                yield Closed(each.module, calls.begun[each.module], each.time, shapes)
