"""Divided parameters that behave like the full tensor in a script's own lines.

A script's lines look into a model: ``p.grad -= p.grad.mean(1, keepdim=True)``, ``p.norm()`` in a
loss, a sorted row for a log. Outside of the model's forward and of the optimizers' update, slices
of parameters and of gradients are of classes with a ``__torch_function__``. An operation on each
element returns a slice, computed from this rank's slice. Before any other operation the ranks
gather the full tensor, and all compute with it: a collective. If the operation writes into the full
tensor, or later into a view of it, the result goes back into the slice.

During a forward and an update the same objects are of PyTorch's own classes, as fast as without
hvkit. Code of hvkit, and of PyTorch's ``fully_shard``, always gets slices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from hvkit.frameworks.pytorch.model_parallel.slices import Slicing, as_plain
from hvkit.frameworks.pytorch.model_parallel.tensor import propagation_rules as rules
from hvkit.frameworks.pytorch.model_parallel.tensor.propagation_rules import Operation
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import storage_of, tensors_in


class _ShowsFull:
    """A base of tensors that behave like the full tensor in a script's operations."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func == _GET_GRADIENT:  # fast: zero_grad() reads that of each parameter
            with as_plain():
                gradient = args[0].grad
            slicing = slicing_of(args[0])
            if gradient is None or slicing is None or _calls_for_slices(sys._getframe(1)):
                return gradient
            return gradient if type(gradient) in _PLAIN else show(gradient, slicing)
        if func == _SET_GRADIENT and args[1] is None:
            return _raw(func, args, {})
        return _compute(func, args, kwargs or {}, as_slices=_calls_for_slices(sys._getframe(1)))

    # PyTorch's methods copy the attributes, and some bypass __torch_function__.
    def __deepcopy__(self: Any, memo: Any) -> Any:
        copied, slicing = _like(self, self.detach().clone()), slicing_of(self)
        return memo.setdefault(id(self), copied if slicing is None else show(copied, slicing))

    def __reduce_ex__(self: Any, proto: Any) -> Any:
        own, slicing = self.detach(), slicing_of(self)
        return _like(self, own if slicing is None else slicing.full(own)).__reduce_ex__(proto)


def _like(t: torch.Tensor, value: torch.Tensor) -> Any:
    """A tensor with this value, or a parameter if ``t`` is one."""
    if isinstance(t, nn.Parameter):
        return nn.Parameter(value, t.requires_grad)
    return value.requires_grad_(t.requires_grad)


class _ViewOfFull(_ShowsFull, torch.Tensor):
    """A view of a full tensor that was gathered: writes into it go back into the slice."""


# Classes of slices, by PyTorch's own.
_SHOWN: dict[Any, Any] = {
    plain: type(plain)(f"_Full{plain.__name__}", (_ShowsFull, plain), {})
    for plain in cast(Sequence[Any], (torch.Tensor, nn.Parameter, DTensor))
}
_PLAIN = {shown: plain for plain, shown in _SHOWN.items()}
_SLICING, _VIEWED = "_hvkit_slicing", "_hvkit_viewed"


@dataclass(eq=False)
class _Viewed:
    """A full tensor that was gathered, and this rank's slice of it."""

    own: torch.Tensor
    full: torch.Tensor | None  # the memory of the views; None if nothing may be written into them
    at: tuple[int, int]  # ``_now`` when both were last equal


# Counts events that may have changed slices.
_changes = 0


def show(t: Any, slicing: Slicing) -> Any:
    """Make a slice behave like the full tensor from now on."""
    if isinstance(t, torch.Tensor) and type(t) in _SHOWN:
        setattr(t, _SLICING, slicing)
        t.__class__ = _SHOWN[type(t)]
    return t


def slicing_of(t: Any) -> Slicing | None:
    """The slicing of a slice that behaves like the full tensor; None for other tensors."""
    return getattr(t, _SLICING) if type(t) in _PLAIN and hasattr(t, _SLICING) else None


def undivided(obj: Any) -> Any:
    """An object with the full tensor in place of each slice that shows it; then a collective."""
    if all(slicing_of(each) is None for each in tree_leaves(obj)):
        return obj
    return tree_map(lambda t: t if slicing_of(t) is None else _of(t).full(t), obj)


def _of(t: torch.Tensor) -> Slicing:
    return cast(Slicing, slicing_of(t))


class WholeParameters:
    """The divided parameters of a model, which show a script the full tensors."""

    def __init__(self) -> None:
        self._slicings: dict[torch.Tensor, Slicing] = {}
        # Slots in which fully_shard puts gathered parameters that the tensor axis divides, too.
        self._slots: list[tuple[dict[str, Any], str, Slicing]] = []
        self._forwards = 0
        self._updates = False
        # Gradients and gathered parameters that a script may hold.
        self._others: list[tuple[torch.Tensor, Slicing]] = []

    def add(self, model: nn.Module, slicings: Mapping[torch.Tensor, Slicing]) -> None:
        """Show these parameters of a model as full tensors."""
        self._slicings |= slicings
        self._slots += [
            (module._parameters, name, replace(slicing, shards=None, gathered=True))
            for module in model.modules()
            for name, p in module.named_parameters(recurse=False)
            if (slicing := slicings.get(p)) and slicing.placement and slicing.shards
        ]
        for p, slicing in slicings.items():
            show(p, slicing)

    @contextmanager
    def as_slices(self) -> Iterator[None]:
        """A context in which the parameters are plain slices: for a forward."""
        self._change(self._forwards + 1, self._updates)
        try:
            yield
        finally:
            self._change(self._forwards - 1, self._updates)

    def begin_update(self, optimizer: Any) -> None:
        """Make them plain slices until ``end_update``."""
        self._change(self._forwards, True)

    def end_update(self) -> None:
        self._change(self._forwards, False)

    def _change(self, forwards: int, updates: bool) -> None:
        before = bool(self._forwards), self._updates
        self._forwards, self._updates = forwards, updates
        if before == (bool(forwards), updates):
            return
        note_change()
        with as_plain():
            gradients = [(p.grad, slicing) for p, slicing in self._slicings.items()]
        self._others += [(g, slicing) for g, slicing in gradients if g is not None]
        for t, slicing in (*self._slicings.items(), *self._others):
            # During a forward fully_shard puts whole tensors in place of its own.
            if self._updates or (self._forwards and slicing.shards is None):
                t.__class__ = _PLAIN.get(type(t), type(t))
            else:
                show(t, slicing)
        if not self._forwards and not self._updates:
            now = [(parameters[name], slicing) for parameters, name, slicing in self._slots]
            self._others = [(show(*each), each[1]) for each in now if each[0] not in self._slicings]


def _calls_for_slices(frame: FrameType | None) -> bool:
    """Whether code that needs slices calls an operation, perhaps through PyTorch."""
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if name.startswith(("hvkit.", "torch.distributed.")):
            # hvkit.average and others reduce the full tensor, which the script sees.
            return name != "hvkit.communication.allreduce"
        if not name.startswith("torch."):
            return False
        frame = frame.f_back
    return False


def _raw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with as_plain():
        return func(*args, **kwargs)


_TENSOR: Any = torch.Tensor
_GET_GRADIENT, _SET_GRADIENT = _TENSOR.grad.__get__, _TENSOR.grad.__set__
_SET_DATA = _TENSOR.data.__set__


def _compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, as_slices: bool) -> Any:
    name: str = getattr(func, "__name__", "")
    if name in ("register_hook", "register_post_accumulate_grad_hook"):
        return _register_hook(func, *args, **kwargs)
    if not as_slices and name.startswith("new_"):  # a tensor of its own
        return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)
    if as_slices or name in rules.OF_SLICES:
        return _raw(func, args, kwargs)
    if name == "__set__":
        return _set(func, *args)
    if name == "__get__":
        name = func.__self__.__name__
        if name not in rules.VIEW_ATTRIBUTES:
            return _attribute(name, func, args)
    if func is torch.autograd.grad:
        return _gradients(func, args, kwargs)
    if "foreach" in name and isinstance(args[0], list | tuple) and len(args[0]) > 1:
        return _for_each(func, args, kwargs)
    operation = Operation(func, name, args, dict(kwargs), tensors_in((args, kwargs)))
    divided = [t for t in operation.inputs if slicing_of(t) is not None]
    if divided and name in rules.LENGTHS:
        shape = _of(divided[0]).shape(divided[0])
        return operation.run(lambda t: torch.empty(shape, dtype=t.dtype, device="meta"))
    for t in operation.inputs:
        _refresh(t)
    if divided:
        result = _by_element(operation, divided)
        if result is not NotImplemented:
            return result
        if name == "sum" and len(args) == 1 and not kwargs and _of(divided[0]).shards is None:
            return _of(divided[0]).total(_raw(func, args, kwargs))
    return _of_full(operation, divided)


def _attribute(name: str, func: Any, args: Sequence[Any]) -> Any:
    t = args[0]
    slicing, value = slicing_of(t), _raw(func, args, {})
    if slicing is None:
        return _as_view(value, getattr(t, _VIEWED)) if name == "data" else value
    if name == "data":
        return show(value, slicing)
    if name == "shape":
        return slicing.shape(t)
    return slicing.shape(t).numel() * t.itemsize if name == "nbytes" else value


def _set(func: Any, t: Any, value: Any) -> None:
    slicing = slicing_of(t)
    if isinstance(value, torch.Tensor):
        _refresh(value)
        if slicing is None:
            value = undivided(value)
        elif slicing_of(value) is None and value.shape == slicing.shape(t):
            with torch.no_grad():
                value = slicing.slice_of(value)
    if isinstance(t, DTensor) and func == _SET_DATA:
        # fully_shard has the slice's memory, and would not see another tensor.
        with torch.no_grad(), as_plain():
            t.copy_(value)
    else:
        _raw(func, (t, value), {})
    note_change()


def _gradients(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    found = _raw(func, args, kwargs)
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    for gradient, p in zip(found, tensors_in(inputs), strict=True):
        if (slicing := slicing_of(p)) is not None:
            show(gradient, slicing)
    return found


def _for_each(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation on lists of tensors, one by one: each is divided in its own way."""
    length = len(args[0])

    def at(i: int, value: Any) -> Any:
        listed = isinstance(value, list | tuple) and len(value) == length
        return [value[i]] if listed else value

    found: list[Any] = []
    for i in range(length):
        own, named = [at(i, a) for a in args], {k: at(i, v) for k, v in kwargs.items()}
        result = _compute(func, own, named, as_slices=False)
        found += result or ()
    return tuple(found) or None


def _by_element(operation: Operation, divided: Sequence[torch.Tensor]) -> Any:
    """The result of an operation on each element by itself; else ``NotImplemented``."""
    name = operation.name.removeprefix("_foreach_")
    one_argument = name == "where" and len(operation.args) == 1
    if name not in rules.EACH_ELEMENT or one_argument or "out" in operation.kwargs:
        return NotImplemented
    first = divided[0]
    slicing = _of(first)
    if rules.writes(operation) and operation.inputs[0] is not first:
        return NotImplemented
    if any(not _of(t).is_like(slicing) or t.shape != first.shape for t in divided):
        return NotImplemented
    graph = torch.is_grad_enabled()
    operands: dict[int, Any] = {}
    for t in operation.inputs:
        if slicing_of(t) is None:
            # An operand with a gradient would get that of this rank's slice alone.
            operand = None if graph and t.requires_grad else slicing.operand(t, first)
            if operand is None:
                return NotImplemented
            operands[id(t)] = operand
    with as_plain():
        try:
            result = operation.run(lambda t: operands.get(id(t), t))
        except NotImplementedError:  # a DTensor's
            if slicing.shards is None or rules.writes(operation):
                raise
            return NotImplemented
    for t in tensors_in(result):
        show(t, slicing)
    if rules.writes(operation):
        note_change()
    return result


def _of_full(operation: Operation, divided: Sequence[torch.Tensor]) -> Any:
    target = None
    if operation.inputs and ("out" in operation.kwargs or rules.writes(operation)):
        target = operation.kwargs.get("out", operation.inputs[0])
    viewed: _Viewed | None = getattr(target, _VIEWED, None)
    if viewed is not None and viewed.full is None:
        raise RuntimeError(
            f"{operation.name}() would write into a view of a divided parameter that autograd "
            "follows: write into a clone() of it, or under torch.no_grad()"
        )
    full: dict[int, torch.Tensor] = {}
    for t in divided:
        leaf = t is target and t.is_leaf
        # Functions of torch.nn.init write without autograd.
        initialises = getattr(operation.function, "__module__", "") == nn.init.__name__
        if leaf and t.requires_grad and torch.is_grad_enabled() and not initialises:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation."
            )
        full[id(t)] = _of(t).full(t.detach() if leaf else t)
    with as_plain():
        result = operation.run(lambda t: full.get(id(t), t))
        if target is not None and id(target) in full:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not target.is_leaf):
                target.copy_(_of(target).slice_of(full[id(target)]))
            note_change()
            return target if result is full[id(target)] else result
        if viewed is not None:
            with torch.no_grad():
                viewed.own.copy_(_of(viewed.own).slice_of(cast(torch.Tensor, viewed.full)))
            note_change()
            viewed.at = _now(viewed.own)
            return result
    gathered = [(t, full[id(t)]) for t in divided]
    views = [(_Viewed(t, None if f.requires_grad else f, _now(t)), f) for t, f in gathered]
    views += [(getattr(t, _VIEWED), t) for t in operation.inputs if hasattr(t, _VIEWED)]
    for view, memory in views:
        for t in tensors_in(result):
            if type(t) is torch.Tensor and storage_of(t) == storage_of(memory):
                _as_view(t, view)
    return result


def _as_view(t: Any, viewed: _Viewed) -> Any:
    setattr(t, _VIEWED, viewed)
    t.__class__ = _ViewOfFull
    return t


def _refresh(t: torch.Tensor) -> None:
    """Update a view if slices may have changed since they were gathered; then a collective."""
    viewed: _Viewed | None = getattr(t, _VIEWED, None)
    if viewed is None or viewed.full is None or viewed.at == _now(viewed.own):
        return
    with torch.no_grad(), as_plain():
        viewed.full.copy_(_of(viewed.own).full(viewed.own.detach()))
    viewed.at = _now(viewed.own)


def _now(own: torch.Tensor) -> tuple[int, int]:
    """A number that changes when the slice may have changed; the same on all ranks."""
    return _changes, own._version


def note_change() -> None:
    """Note that slices may have changed: views are updated before their next use."""
    global _changes
    _changes += 1


def _register_hook(register: Any, t: Any, hook: Callable[..., Any]) -> Any:
    """Register a hook on a gradient; ``gradients.script_hooks`` handles hooks on parameters."""
    slicing = slicing_of(t)
    if slicing is not None and slicing.gathered:
        raise ValueError(
            f"{register.__name__}() on a parameter that a shard axis and another one divide must "
            "come before the forward pass, or change p.grad after backward()"
        )
    if slicing is not None and not t.is_leaf:
        raise ValueError(
            f"{register.__name__}() on what is computed from a divided parameter would see a part "
            "of the gradient: register the hook on the parameter, before the forward pass, or "
            "change p.grad after backward()"
        )
    return _raw(register, (t, hook), {})
