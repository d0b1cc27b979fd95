"""What a forward keeps beside what it returns: a loss on a block, activations in a list of a hook.

The script reads it afterwards, as one process would: an auxiliary loss of a mixture of experts, a
penalty on activations. It is looked for in attributes of modules, and in the lists, dicts and
objects that these, hooks, and the code of a forward hold.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in, version_of

Path = tuple[str, Hashable]
"""Where something is kept: the name of what holds it, and the key there. Equal on all ranks."""

# Attributes of PyTorch's own and of hvkit's.
_OWN = frozenset({*vars(nn.Module()), "forward", "__deepcopy__"})
HOOKS = [name for name in vars(nn.Module()) if name.startswith("_forward")]
"""The attributes in which a module has the hooks around its forward."""
# Steps from a module, a hook or a forward to what keeps something.
_DEEPEST = 5
# A longer list or dict is data.
_LONGEST = 1000
# Objects of these packages keep nothing for a script.
_LIBRARIES = {"torch", "numpy", "hvkit", "builtins", "logging", "threading", "weakref"}
_NOTHING: Any = object()


@dataclass(frozen=True)
class _Place:
    """Where something is kept.

    Attributes:
        holder: a dict, such as the attributes of a module; what a function has closed over; or
            what holds a list that stays the same, such as the arguments of a partial function.
        key: in the dict, or an index.
    """

    holder: dict[Any, Any] | CellType | Sequence[Any]
    key: Any

    def get(self) -> Any:
        """What is there, or ``_NOTHING``."""
        if isinstance(self.holder, dict):
            return dict.get(self.holder, self.key, _NOTHING)  # a class may have its own
        try:
            if isinstance(self.holder, CellType):
                return self.holder.cell_contents
            return self.holder[self.key]
        except (ValueError, IndexError):
            return _NOTHING

    def set(self, value: Any) -> None:
        """Put something there, or take it away."""
        if isinstance(self.holder, CellType) and value is _NOTHING:
            del self.holder.cell_contents
        elif isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif not isinstance(self.holder, dict):
            return
        elif value is _NOTHING:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


@dataclass(frozen=True)
class Change:
    """What a forward has kept at a place.

    Attributes:
        value: what is there now; of a list, its new elements.
        appended: whether these came to what a list held before.
        refilled: whether the list is the same, and was cleared or changed before they came.
    """

    value: Any
    appended: bool = False
    refilled: bool = False


class _Places:
    """Where the forward of a model may keep something."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[Path, _Place] = {}
        self.holders: dict[str, dict[Any, Any]] = {}
        # Those dicts whose keys were all looked at.
        self.whole: dict[int, Any] = {}
        self._seen: set[int] = set()
        modules = dict(model.named_modules())
        for name, module in modules.items():
            held = self.whole[id(module.__dict__)] = module.__dict__
            self._keys(name, held, [key for key in held if key not in _OWN], 0)
        for name, module in modules.items():
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            code = (vars(module).get("forward"), type(module).forward)
            for i, each in enumerate((*code, *(h for h in hooks if not _is_of_library(h)))):
                self._look(f"{name} {getattr(each, '__qualname__', '')} {i}", each, 0)

    def _keys(self, name: str, holder: dict[Any, Any], keys: Iterable[Any], depth: int) -> None:
        self.holders[name] = holder
        for key in keys:
            place = self.found.setdefault((name, key), _Place(holder, key))
            self._look(f"{name}.{key}", place.get(), depth + 1)

    def _look(self, name: str, thing: Any, depth: int) -> None:
        if depth > _DEEPEST or id(thing) in self._seen or isinstance(thing, _PLAIN):
            return
        self._seen.add(id(thing))
        if isinstance(thing, functools.partial):
            thing = (thing.func, *thing.args, *thing.keywords.values())
        elif isinstance(thing, MethodType):
            thing = (thing.__self__, thing.__func__)
        if isinstance(thing, list | tuple | deque | dict) and len(thing) > _LONGEST:
            return
        if isinstance(thing, list | tuple | deque):
            for i, each in enumerate(thing):
                if isinstance(each, list | deque):
                    self.found.setdefault((name, i), _Place(thing, i))
                self._look(f"{name}[{i}]", each, depth)
        elif isinstance(thing, dict):
            self.whole[id(thing)] = thing
            self._keys(name, thing, list(thing), depth)
        elif isinstance(thing, FunctionType):
            if not _is_of_library(thing):
                self._look_into_code(name, thing, depth)
        elif _is_of_script(thing):
            attributes = cast(Any, thing).__dict__
            self.whole[id(attributes)] = attributes
            self._keys(name, attributes, list(attributes), depth)

    def _look_into_code(self, name: str, function: FunctionType, depth: int) -> None:
        """What a function has closed over, and what it reads of global containers and objects."""
        code, world = function.__code__, function.__globals__
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            place = self.found.setdefault((name, key), _Place(cell, key))
            self._look(f"{name}.{key}", place.get(), depth + 1)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._look(f"{name} defaults", defaults, depth)
        for key in code.co_names:
            value = world.get(key)
            if isinstance(value, list | dict | deque) or _is_of_script(value):
                self._keys(name, world, [key], depth)


_PLAIN = (torch.Tensor, nn.Module, type, str, bytes, int, float, type(None))


def _is_of_library(thing: Any) -> bool:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return str(getattr(thing, "__module__", "")).split(".")[0] in _LIBRARIES


def _is_of_script(thing: Any) -> bool:
    """Whether it is an object with attributes, of a class of nobody's in ``_LIBRARIES``."""
    plain = isinstance(thing, (*_PLAIN, FunctionType)) or _is_of_library(type(thing))
    return not plain and isinstance(getattr(thing, "__dict__", None), dict)


def _elements(value: Any) -> tuple[Any, ...] | None:
    return tuple(value) if isinstance(value, list | deque) else None


def _same(some: Sequence[Any] | None, others: Sequence[Any] | None) -> bool:
    if some is None or others is None:
        return some is others
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class KeptResults:
    """What a model's forward keeps, at some places or anywhere.

    Args:
        model: its forward.
        paths: of the places; None for all there are.
    """

    def __init__(self, model: nn.Module, paths: Sequence[Path] | None = None) -> None:
        self._model, self.paths = model, paths
        self._places: dict[Path, _Place] = {}
        self._before: dict[Path, tuple[Any, tuple[Any, ...] | None]] = {}
        # Dicts that were there before, of which new keys are changes.
        self._known: dict[int, Any] = {}
        self._whole: dict[int, Any] = {}
        names = [f"{name}.{key}" for name, key in paths or ()]
        # The attributes of modules that these places are, or that lead to them.
        self._attributes = {
            (id(module), re.split(r"[.\[]", rest.removeprefix(f"{name}."))[0])
            for name, module in model.named_modules()
            for rest in names
            if rest.startswith(f"{name}.")
        }

    def begin(self) -> None:
        """Note what is there before a forward."""
        self._places = {}
        self._find()
        values = {path: place.get() for path, place in self._places.items()}
        self._known = self._whole
        self._before = {path: (value, _elements(value)) for path, value in values.items()}

    def filled(self) -> tuple[bool, ...]:
        """Whether there is a list at each of the paths that holds something."""
        self._places = {}
        self._find()
        found = (self._places.get(path) for path in self.paths or ())
        return tuple(each is not None and bool(_elements(each.get())) for each in found)

    def _find(self) -> None:
        """Add places that have come since."""
        modules = dict(self._model.named_modules()) if self.paths is not None else {}
        if self.paths is not None and all(name in modules for name, _ in self.paths):
            held = {path: _Place(modules[path[0]].__dict__, path[1]) for path in self.paths}
            self._places = held | self._places
            return
        found = _Places(self._model)
        self._whole, new = found.whole, found.found
        if self.paths is not None:
            new = {path: new[path] for path in self.paths if path in new}
            for name, key in self.paths:
                if name in found.holders:
                    new.setdefault((name, key), _Place(found.holders[name], key))
        self._places = new | self._places

    def _was_there(self, path: Path, place: _Place) -> bool:
        """Whether what holds this has not been made since ``begin``."""
        return path in self._before or id(place.holder) in self._known

    def changes(self) -> dict[Path, Change]:
        """What has come since ``begin``; of all places that where tensors are."""
        if self.paths is None or len(self._places) < len(self.paths):
            self._find()
        found: dict[Path, Change] = {}
        inside: list[str] = []
        for path, place in self._places.items():
            name, key = path
            value = place.get()
            before, old = self._before.get(path, (_NOTHING, None))
            now = _elements(value)
            if (value is before and _same(now, old)) or not self._was_there(path, place):
                continue
            appended = value is before and _same((now or ())[: len(old or ())], old)
            new = list((now or ())[len(old or ()) :]) if appended else value
            if value is _NOTHING or any(name.startswith(each) for each in inside):
                continue
            if self.paths is None and not tensors_in(new):
                continue
            refilled = value is before and now is not None and not appended
            found[path] = Change(tree_map(_as_it_is, new), appended, refilled)
            inside.append(f"{name}.{key}")
        return found

    def floats(self) -> tuple[str, ...]:
        """Names of the Python floats that have come or changed since ``begin``."""
        found = {path: place.get() for path, place in self._places.items()}
        then = self._before
        return tuple(
            f"{name}.{key}".lstrip(".")
            for (name, key), value in found.items()
            if isinstance(value, float) and value is not then.get((name, key), (None,))[0]
        )

    def put(self, changes: Mapping[Path, Change]) -> None:
        """Keep what a forward keeps, in place of what has come since ``begin``."""
        if any(path not in self._places for path in changes):
            self._find()
        for path, change in changes.items():
            if path not in self._places:  # in an object that this rank has not made
                continue
            place, value = self._places[path], tree_map(_as_it_is, change.value)
            before, old = self._before.get(path, (_NOTHING, None))
            now = place.get()
            if change.appended and isinstance(now, list | deque):
                _fill(now, (*(old or ()), *value))
            elif change.refilled and isinstance(now, list | deque):
                _fill(now, value)  # others may have another name for it
            elif isinstance(now, list) and isinstance(value, list) and now is not before:
                _fill(now, value)  # as the forward that is running
            else:
                place.set(value)

    def restore(self) -> None:
        """Put back what was there at ``begin``."""
        if self.paths is None:
            self._find()
        for path, place in self._places.items():
            if not self._was_there(path, place):
                continue
            before, elements = self._before.get(path, (_NOTHING, None))
            if elements is not None and not _same(_elements(before), elements):
                _fill(before, elements)
            if place.get() is not before:
                place.set(before)

    def changeable(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the call of a module may change beside its result; equal if it has not.

        First lists and dicts that it is given, tensors, and attributes in which it keeps tensors,
        unless they are among the places; then the numbers in its attributes.
        """
        attributes = [
            (each, name, value) for each in module.modules() for name, value in vars(each).items()
        ]
        # Not to be seen by the modes that look at operations.
        with torch._C.DisableTorchFunction():
            leaves, spec = tree_flatten((args, kwargs))
            kept = [
                [id(t) for t in tensors_in(value)]
                for each, name, value in attributes
                if not name.startswith("_")
                and isinstance(value, torch.Tensor | list | dict | tuple)
                if (id(each), name) not in self._attributes
            ]
            versions = [version_of(each) for each in leaves if isinstance(each, torch.Tensor)]
        numbers = [
            (n, value) for _, n, value in attributes if isinstance(value, bool | int | float)
        ]
        return (spec, list(map(id, leaves)), versions, kept), numbers

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those that have come since ``begin``, and those among them that are in no list."""
        values = [each.value for each in self.changes().values()] if self.paths else []
        return tensors_in(values), [t for t in values if isinstance(t, torch.Tensor)]

    def tree(self) -> list[Any]:
        """What has come since ``begin``, by place: nested lists, dicts and the like."""
        found = self.changes()
        chosen = [found.get(path) for path in self.paths or ()]
        return [each and _written(each) for each in chosen]

    def put_tree(self, tree: Sequence[Any]) -> None:
        """Keep what ``tree`` has returned, also on another rank."""
        pairs = zip(self.paths or (), tree, strict=True)
        self.put({path: _read(each) for path, each in pairs if each})


def _written(change: Change) -> Any:
    """A change as a tree, of which no leaf says what kind it is."""
    value = change.value
    return (value,) if change.appended else {0: value} if change.refilled else [value]


def _read(tree: Any) -> Change:
    return Change(tree[0], isinstance(tree, tuple), isinstance(tree, dict))


def _as_it_is(leaf: Any) -> Any:
    return leaf


def _fill(held: Any, elements: Iterable[Any]) -> None:
    elements = list(elements)
    held.clear()
    held.extend(elements)


@contextmanager
def left_as_before(model: nn.Module) -> Iterator[KeptResults]:
    """Puts back what a forward sets meanwhile: counters, caches, hooks, and what it keeps."""
    modules = list(model.modules())
    before = [(module, dict(vars(module))) for module in modules]
    hooks = [(held := vars(module)[name], dict(held)) for module in modules for name in HOOKS]
    kept = KeptResults(model)
    kept.begin()
    try:
        yield kept
    finally:
        kept.restore()
        for held, content in (*((vars(m), attributes) for m, attributes in before), *hooks):
            held.clear()
            held.update(content)
