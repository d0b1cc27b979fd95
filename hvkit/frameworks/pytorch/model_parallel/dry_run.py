"""One run of a model's own forward without its weights: where it can be cut, and what it costs.

Parameters are on the meta device, which knows shapes and computes nothing. So whatever depends on a
parameter is on the meta device as well, and the rest, such as masks and positions, is real: a
forward may look at it. Nothing is traced or exported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

# When a tensor came to depend on a parameter, as an attribute of it.
_BORN = "_hvkit_born"


class Slot:
    """Stands where a tensor was."""


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
class Kept:
    """A tensor that autograd keeps for backward.

    Attributes:
        time: when an operation kept it.
        storage: the number of its memory, which several operations may keep.
        nbytes: of this memory.
    """

    time: int
    storage: int
    nbytes: int


@dataclass(frozen=True)
class DryRun:
    """What a dry run has found.

    Attributes:
        places: where the model can be cut, in the order of forward.
        closed: modules from inside of which nothing is used later but their output, all of which
            is new and depends on weights.
        reads: by parameter, when it is used.
        calls: by module, when its first call began.
        writes: by buffer that is changed in place, when it is last.
        saved: what is kept for backward, without parameters.
        flops: of the whole forward.
        nbytes: of its result.
    """

    places: tuple[CutPlace, ...]
    closed: tuple[str, ...]
    reads: Mapping[str, tuple[int, ...]]
    calls: Mapping[str, int]
    writes: Mapping[str, int]
    saved: tuple[Kept, ...]
    flops: int
    nbytes: int


class OnMeta(TorchFunctionMode):
    """What is computed from a tensor on the meta device is on the meta device, too.

    Args:
        device: which the tensors claim to be on, so that a forward makes masks and positions there.

    Attributes:
        active: whether it does anything.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.active = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return self.device
        if func in _MOVES and args[0].is_meta:
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}
            rest = (a for a in args[1:] if not isinstance(a, torch.device | str | int))
            args = (args[0], *(a.dtype if isinstance(a, torch.Tensor) else a for a in rest))
            return func(*args, **kwargs) if func is _TO and (args[1:] or kwargs) else args[0]
        # Sizes that a script has made tensors of are read by pad.
        tensors = [] if func is functional.pad else tensors_in((args, kwargs))
        if any(t.is_meta for t in tensors) and not all(t.is_meta for t in tensors):
            args, kwargs = tree_map_only(torch.Tensor, _to_meta, (args, kwargs))
        return func(*args, **kwargs)


_TO: Any = torch.Tensor.to
_MOVES = (_TO, torch.Tensor.cuda, torch.Tensor.cpu)


def _to_meta(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


def storage_of(t: torch.Tensor) -> int:
    """The number of its memory, as long as something holds it."""
    return int(t.untyped_storage()._cdata) if t.layout is torch.strided else id(t)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, dicts and the like, in order."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of all elements of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


class _Flow(TorchFunctionMode):
    """Notes when tensors that depend on parameters are made and used.

    Attributes:
        time: operations so far.
        uses: when, of a tensor made when, with the tensor, which keeps its id from being used
            again.
        reads: by parameter, when it was used.
        changes: when the memory of a tensor was changed in place, by its number.
        buffers: their names, by the number of their memory.
        writes: by buffer, when it was changed last.
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.time += 1
        inputs = tensors_in((args, kwargs))
        depends = False
        for t in inputs:
            if isinstance(t, nn.Parameter):
                self.reads.setdefault(t, []).append(self.time)
                depends = True
            elif t.is_meta:
                if not hasattr(t, _BORN):  # PyTorch does not show what an autograd Function returns
                    setattr(t, _BORN, self.time - 1)
                self.uses.append((self.time, getattr(t, _BORN), t))
                depends = True
            elif (late := self._late.get(storage_of(t))) is not None:
                self.uses.append((self.time, *late))
        versions = list(map(_version_of, inputs))
        out = func(*args, **(kwargs or {}))
        changed = [t for t, v in zip(inputs, versions, strict=True) if _version_of(t) != v]
        if args and is_in_place(func) and isinstance(args[0], torch.Tensor):
            changed.append(args[0])
        for t in changed:
            self._note_change(t, depends)
        for t in tensors_in(out) if depends else ():
            changed_in_place = any(t is each for each in inputs)
            if not isinstance(t, nn.Parameter) and not (changed_in_place and hasattr(t, _BORN)):
                setattr(t, _BORN, self.time)
        return out

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

    def crossing(self, time: int, since: int = -1) -> dict[int, torch.Tensor]:
        """What was made after ``since`` and up to a time, and is used after it, by its id."""
        return {id(t): t for used, born, t in self.uses if since < born <= time < used}

    def is_changed(self, t: torch.Tensor, begin: int, end: int) -> bool:
        """Whether its memory is changed in place after one time, and up to another."""
        own = storage_of(t)
        return any(begin < time <= end and storage == own for time, storage in self.changes)


@dataclass
class _Ended:
    """The end of a call of a module."""

    module: str
    begun: int
    time: int
    flops: int
    tensors: list[torch.Tensor]
    structure: Any
    trained: list[bool]
    given: list[Any]
    changes_others: bool

    @property
    def is_inside_a_function(self) -> bool:
        """Whether autograd has seen its result only afterwards, from another operation."""
        return any(
            t.requires_grad is not before
            for t, before in zip(self.tensors, self.trained, strict=True)
        )


class _Calls:
    """The calls of modules during a dry run.

    Args:
        flow: its clock.
        flops: counts those of the forward.
        buffers: of the model, by name.
    """

    def __init__(
        self, flow: _Flow, flops: FlopCounterMode, buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._flow, self._flops, self._buffers = flow, flops, buffers
        # Of the calls that are running: when they began, with what, and what they might change.
        # By module; a call that an error ends leaves one behind.
        self._running: dict[str, list[tuple[int, Any, Any]]] = {}
        self.begun: dict[str, int] = {}
        self.count: dict[str, int] = {}
        self.ended: list[_Ended] = []

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

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.begun.setdefault(name, self._flow.time)
        self.count[name] = self.count.get(name, 0) + 1
        given = tree_leaves((args, kwargs))
        before = _changeable(module, args, kwargs)
        self._running.setdefault(name, []).append((self._flow.time, given, before))

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
        begun, given, before = self._running[name].pop()
        self._note_new_buffers(name, module)
        changes_others = _changeable(module, args, kwargs) != before
        flops = self._flops.get_total_flops()
        if any(not isinstance(t, torch.Tensor | None) for t in tree_leaves(output)):
            return  # a number, say, that may be another one in the next call
        if not _recomputed_from_within(module):
            tensors, structure = tensors_in(output), structure_of(output)
            trained = [t.requires_grad for t in tensors]
            self.ended.append(
                _Ended(
                    name,
                    begun,
                    self._flow.time,
                    flops,
                    tensors,
                    structure,
                    trained,
                    given,
                    changes_others,
                )
            )


def _changeable(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What the call of a module may change beside its result; equal if it has not.

    Lists and dicts that it is given, tensors, and attributes in which it keeps tensors.
    """
    # Not to be seen by the modes that look at operations.
    with torch._C.DisableTorchFunction():
        return _changeable_now(module, args, kwargs)


def _changeable_now(module: nn.Module, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    kept = [
        [id(t) for t in tensors_in(value)]
        for each in module.modules()
        for name, value in vars(each).items()
        if not name.startswith("_") and isinstance(value, torch.Tensor | list | dict | tuple)
    ]
    versions = [_version_of(each) for each in leaves if isinstance(each, torch.Tensor)]
    return spec, list(map(id, leaves)), versions, kept


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


def dry_run(model: nn.Module, args: Any, kwargs: Any, device: torch.device) -> DryRun:
    """Run the model's forward without its weights.

    Random generators, buffers and gradients stay as they are.

    Args:
        model: with its own forward.
        args, kwargs: of a call with some samples.
        device: of the model.

    Raises:
        ValueError: the forward looks at a value that depends on weights.
    """
    flow, flops = _Flow(), FlopCounterMode(display=False)
    meta, names = on_meta(model)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    flow.buffers = {storage_of(b): name for name, b in buffers.items()}
    calls, saved = _Calls(flow, flops, buffers), _Saved(flow, meta.values())
    hooks = calls.follow(model)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(attributes_kept(list(model.modules())))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(saved.keep, _as_it_is))
            stack.enter_context(_fused_attention(saved, device))
            for mode in (uncompiled(), OnMeta(device), flow, flops):
                stack.enter_context(mode)
            with explaining_meta():
                args, kwargs = copied_call(args, kwargs)
                out = torch.func.functional_call(
                    model, {**meta, **buffers}, args, kwargs, tie_weights=False
                )
    finally:
        for hook in hooks:
            hook.remove()
    flow.use_all(out)
    return DryRun(
        places=tuple(_places(flow, calls)),
        closed=tuple(_closed(flow, calls)),
        reads={names[p]: tuple(times) for p, times in flow.reads.items() if p in names},
        calls=calls.begun,
        writes=flow.writes,
        saved=tuple(saved.found),
        flops=flops.get_total_flops(),
        nbytes=bytes_of(tensors_in(out)),
    )


def is_in_place(function: Any) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(function, "__name__", "")
    own = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return own or name == "__setitem__"


def call_key(args: Any, kwargs: Any) -> Hashable:
    """The arguments of a call without the values of tensors."""
    leaves, spec = tree_flatten((args, kwargs))
    return str(spec), tuple(
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, torch.Tensor)
        else leaf
        if isinstance(leaf, int | float | str | bool | None)
        else repr(type(leaf))
        for leaf in leaves
    )


def copied_call(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call with copies of tensors, which a forward may change in place."""
    some, named = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    return some, named


@contextmanager
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Puts attributes of modules back that a forward sets meanwhile: counters, caches."""
    before = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def uncompiled() -> AbstractContextManager[Any]:
    """Runs compiled modules as they were before, since there is nothing to compute."""
    # Importing the compiler takes a second.
    used = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if used else nullcontext()


def samples_in(args: Any, kwargs: Any) -> int:
    """The length of the first dimension of the first tensor that has dimensions.

    Raises:
        ValueError: there is none.
    """
    for t in tensors_in((args, kwargs)):
        if t.dim():
            return t.shape[0]
    raise ValueError(
        "a model in a pipeline must be called with tensors whose first dimension is the batch; it "
        "was called with none"
    )


def on_meta(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[torch.Tensor, str]]:
    """Parameters of the same shapes without memory, by each of their names; and their first names.

    A parameter of several modules is one in both. A module with several names has its first one,
    since ``functional_call`` would put back what it has itself put there under another.
    """
    made: dict[torch.Tensor, nn.Parameter] = {}
    by_name: dict[str, nn.Parameter] = {}
    first: dict[torch.Tensor, str] = {}
    for path, module in model.named_modules():
        for name, p in module.named_parameters(path, recurse=False, remove_duplicate=False):
            if p not in made:
                made[p] = nn.Parameter(p.detach().to("meta"), p.requires_grad)
                first[made[p]] = name
            by_name[name] = made[p]
    return by_name, first


@contextmanager
def explaining_meta() -> Iterator[None]:
    """Explains PyTorch's errors about tensors without values.

    Raises:
        ValueError: instead of them.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise
        raise ValueError(
            "the model's forward looks at a value that depends on its weights, or was computed "
            "together with one that does, and that ranks do not have for layers of others. Move "
            "the decision out of forward (nn.TransformerEncoder: enable_nested_tensor=False), or "
            f"use hvkit.FullyShard(). PyTorch says: {error}"
        ) from error


class _Saved:
    """What autograd keeps for backward.

    Args:
        flow: its clock.
        parameters: which are in memory anyway, also where a view of one is kept.
    """

    def __init__(self, flow: _Flow, parameters: Iterable[nn.Parameter]) -> None:
        self._flow = flow
        self._parameters = set(map(storage_of, parameters))
        self.found: list[Kept] = []
        # The number of a storage is used again when nobody holds it.
        self._alive: list[Any] = []

    def keep(self, t: torch.Tensor) -> torch.Tensor:
        storage, number = t.untyped_storage(), storage_of(t)
        if t.is_meta and number not in self._parameters:
            self.found.append(Kept(self._flow.time, number, storage.nbytes()))
            self._alive.append(storage)
        return t


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t


@contextmanager
def _fused_attention(saved: _Saved, device: torch.device) -> Iterator[None]:
    """Has attention keep what the kernels of a device keep: on meta, PyTorch takes its slow path.

    That one keeps the products of all queries and keys. The result is kept by what takes it, in
    the same memory, because kernels lay it out so.
    """
    module: Any = functional
    own = module.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        run = functools.partial(own, query, key, value, attn_mask, dropout_p, *args, **kwargs)
        if dropout_p and device.type == "cpu":  # the slow path is the only one there
            return cast(torch.Tensor, run())
        # Of nested hooks the innermost ones count.
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            out = cast(torch.Tensor, run())
        for t in (query, key, value) if out.requires_grad else ():
            saved.keep(t)
        return out

    module.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        module.scaled_dot_product_attention = own


def _places(flow: _Flow, calls: _Calls) -> list[CutPlace]:
    """Where all that is used later and depends on a parameter is what modules return."""
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
        others = {n: t for n, t in crossing.items() if n not in numbers}
        known = [_result(t, ended[:i], each.time, flow) for t in others.values()]
        if None in known or _share_memory([*new, *others.values()], len(others)):
            continue
        beside = tuple(result for result in known if result is not None)
        order = list(others)
        place = CutPlace(
            each.module,
            each.time,
            each.flops,
            bytes_of([*new, *others.values()]),
            each.structure,
            calls.begun[each.module],
            beside,
            tuple(order.index(id(t)) if id(t) in others else None for t in each.tensors),
        )
        # Of those that end together the outermost.
        if found and found[-1].time == each.time:
            found[-1] = place
        else:
            found.append(place)
    return found


def _result(t: torch.Tensor, ended: Sequence[_Ended], time: int, flow: _Flow) -> Result | None:
    """The module that returns a tensor first, of those that have ended; others may keep it.

    None if there is none; if that was given the tensor, or changes something else; or if the tensor
    is changed before ``time``: a later stage would change it again.
    """
    for each in ended:
        numbers = [number for number, own in enumerate(each.tensors) if own is t]
        if numbers:
            known = each.changes_others or any(given is t for given in each.given)
            if known or flow.is_changed(t, each.time, time):
                return None
            return Result(each.module, numbers[0])
    return None


def _is_new(t: torch.Tensor, call: _Ended, calls: _Calls) -> bool:
    """Whether no one has had a result of a call before."""
    if any(each is t for each in call.given):
        return False
    before = (each for each in calls.ended if each.time <= call.begun)
    return not any(own is t for each in before for own in each.tensors)


def _share_memory(tensors: Sequence[torch.Tensor], others: int) -> bool:
    """Whether one of the last tensors has memory in common with another one.

    They arrive apart, so that a change of one would not be seen in the other.
    """
    storages = [storage_of(t) for t in tensors]
    return any(storages.count(each) > 1 for each in storages[len(storages) - others :])


def _closed(flow: _Flow, calls: _Calls) -> Iterator[str]:
    """The modules of whose calls later stages need to know no more than the shapes of outputs."""
    for each in calls.ended:
        depends = [hasattr(t, _BORN) and _is_new(t, each, calls) for t in each.tensors]
        once = calls.count[each.module] == 1 and not each.changes_others
        if once and depends and all(depends):
            made = flow.crossing(each.time, calls.begun[each.module])
            if made.keys() <= set(map(id, each.tensors)):
                yield each.module


def with_tensors(structure: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """A structure with tensors in its slots, in order."""
    following = iter(tensors)
    return tree_map_only(Slot, lambda slot: next(following), structure)


def structure_of(tree: Any) -> Any:
    """A tree with a ``Slot`` in place of each tensor."""
    make: Callable[[torch.Tensor], Slot] = lambda t: Slot()  # noqa: E731
    return tree_map_only(torch.Tensor, make, tree)
