"""Side outputs: tensors that a forward keeps for the script, apart from what it returns.

Examples are the auxiliary loss of a mixture of experts in an attribute, or activations in a list of
a hook. This module finds them in attributes of modules, and in the lists, dicts and objects that
these attributes, hooks, and the code of a forward refer to.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in, version_of

# Where a side output is: the name of its container, and the key there; the same on all ranks.
OutputPath = tuple[str, Hashable]

# Attributes of PyTorch and of hvkit.
_OWN = frozenset({*vars(nn.Module()), "forward", "__deepcopy__"})
# The attributes in which a module has the hooks around its forward.
HOOKS = [name for name in vars(nn.Module()) if name.startswith("_forward")]
# How many references to follow from a module, a hook or a forward.
_DEEPEST = 5
# A longer list or dict is data.
_LONGEST = 1000
# Objects of these packages have no side outputs.
_LIBRARIES = {"torch", "numpy", "hvkit", "builtins", "logging", "threading", "weakref"}
_NOTHING: Any = object()


@dataclass(frozen=True)
class _Location:
    """A place where a side output can be.

    It is in a dict, such as the attributes of a module, in a closure cell of a function, or in a
    sequence with a list in it, such as the arguments of a partial function.
    """

    container: dict[Any, Any] | CellType | Sequence[Any]
    key: Any

    def get(self) -> Any:
        if isinstance(self.container, dict):
            return dict.get(self.container, self.key, _NOTHING)  # a class may have its own
        try:
            if isinstance(self.container, CellType):
                return self.container.cell_contents
            return self.container[self.key]
        except (ValueError, IndexError):
            return _NOTHING

    def set(self, value: Any) -> None:
        """Set a value, or remove it for ``_NOTHING``."""
        if isinstance(self.container, CellType) and value is _NOTHING:
            del self.container.cell_contents
        elif isinstance(self.container, CellType):
            self.container.cell_contents = value
        elif not isinstance(self.container, dict):
            return
        elif value is _NOTHING:
            self.container.pop(self.key, None)
        else:
            self.container[self.key] = value


class Change(NamedTuple):
    """A new value; or elements that were appended to a list, or have refilled the same list."""

    value: Any
    appended: bool
    refilled: bool


class _Search:
    """Finds all places where the forward of a model may keep side outputs."""

    def __init__(self, model: nn.Module) -> None:
        self.entries: dict[OutputPath, _Location] = {}
        self.containers: dict[str, dict[Any, Any]] = {}
        # By id, the dicts of which this has followed all keys.
        self.complete: dict[int, Any] = {}
        self._seen: dict[int, Any] = {}  # alive, so that nothing else gets the id
        modules = dict(model.named_modules())
        for name, module in modules.items():
            attributes = self.complete[id(module.__dict__)] = module.__dict__
            self._follow_keys(name, attributes, [k for k in attributes if k not in _OWN], 0)
        for name, module in modules.items():
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            code = (vars(module).get("forward"), type(module).forward)
            for i, each in enumerate((*code, *(h for h in hooks if not _is_of_library(h)))):
                self._follow(f"{name} {getattr(each, '__qualname__', '')} {i}", each, 0)

    def _follow_keys(
        self, name: str, container: dict[Any, Any], keys: Iterable[Any], depth: int
    ) -> None:
        self.containers[name] = container
        for key in keys:
            self._add(name, container, key, depth)

    def _add(self, name: str, container: Any, key: Any, depth: int) -> None:
        entry = self.entries.setdefault((name, key), _Location(container, key))
        self._follow(f"{name}.{key}", entry.get(), depth + 1)

    def _follow(self, name: str, thing: Any, depth: int) -> None:
        if depth > _DEEPEST or id(thing) in self._seen or isinstance(thing, _PLAIN):
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, functools.partial):
            thing = (thing.func, *thing.args, *thing.keywords.values())
        elif isinstance(thing, MethodType):
            thing = (thing.__self__, thing.__func__)
        if isinstance(thing, list | tuple | deque | dict) and len(thing) > _LONGEST:
            return
        if isinstance(thing, list | tuple | deque):
            for i, each in enumerate(thing):
                if isinstance(each, list | deque):
                    self.entries.setdefault((name, i), _Location(thing, i))
                self._follow(f"{name}[{i}]", each, depth)
        elif isinstance(thing, dict):
            self.complete[id(thing)] = thing
            self._follow_keys(name, thing, list(thing), depth)
        elif isinstance(thing, FunctionType):
            if not _is_of_library(thing):
                self._follow_code(name, thing, depth)
        elif _is_of_script(thing):
            attributes = cast(Any, thing).__dict__
            self.complete[id(attributes)] = attributes
            self._follow_keys(name, attributes, list(attributes), depth)

    def _follow_code(self, name: str, function: FunctionType, depth: int) -> None:
        """Follow the closure of a function, its defaults, and its global containers and objects."""
        code, world = function.__code__, function.__globals__
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._add(name, cell, key, depth)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._follow(f"{name} defaults", defaults, depth)
        for key in code.co_names:
            value = world.get(key)
            if isinstance(value, list | dict | deque) or _is_of_script(value):
                self._follow_keys(name, world, [key], depth)


_PLAIN = (torch.Tensor, nn.Module, type, str, bytes, int, float, type(None))


def _is_of_library(thing: Any) -> bool:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return str(getattr(thing, "__module__", "")).split(".")[0] in _LIBRARIES


def _is_of_script(thing: Any) -> bool:
    """Whether it is an object with attributes, of a class that no library defines."""
    plain = isinstance(thing, (*_PLAIN, FunctionType)) or _is_of_library(type(thing))
    return not plain and isinstance(getattr(thing, "__dict__", None), dict)


def _elements(value: Any) -> tuple[Any, ...] | None:
    return tuple(value) if isinstance(value, list | deque) else None


def _same(some: Sequence[Any] | None, others: Sequence[Any] | None) -> bool:
    if some is None or others is None:
        return some is others
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class SideOutputs:
    """Finds, moves and undoes what a forward changes after ``begin``, at paths or everywhere."""

    def __init__(self, model: nn.Module, paths: Sequence[OutputPath] | None = None) -> None:
        self._model, self.paths = model, paths
        self._entries: dict[OutputPath, _Location] = {}
        self._before: dict[OutputPath, tuple[Any, tuple[Any, ...] | None]] = {}
        # By id, dicts that were there before the forward: new keys in them are side outputs.
        self._known: dict[int, Any] = {}
        self._complete: dict[int, Any] = {}
        modules = dict(model.named_modules())
        names = [f"{name}.{key}" for name, key in paths or ()]
        # The attributes of modules that are at these paths, or lead to them.
        self._attributes = {
            (id(module), re.split(r"[.\[]", rest.removeprefix(f"{name}."))[0])
            for name, module in modules.items()
            for rest in names
            if rest.startswith(f"{name}.")
        }
        # The paths, if all are attributes of modules, which need no search.
        self._direct: dict[OutputPath, _Location] | None = None
        if paths is not None and all(name in modules for name, _ in paths):
            self._direct = {path: _Location(modules[path[0]].__dict__, path[1]) for path in paths}

    def begin(self) -> None:
        self._entries = {}
        self._find()
        self._known = self._complete
        self._before = {
            path: (value := entry.get(), _elements(value)) for path, entry in self._entries.items()
        }

    def filled(self) -> tuple[bool, ...]:
        """By path, whether there is a list that is not empty."""
        self._entries = {}
        self._find()
        found = (self._entries.get(path) for path in self.paths or ())
        return tuple(each is not None and bool(_elements(each.get())) for each in found)

    def _find(self) -> None:
        """Add entries that are new."""
        if self._direct is not None:
            self._entries = self._direct | self._entries
            return
        found = _Search(self._model)
        self._complete, new = found.complete, found.entries
        for name, key in self.paths or ():
            if name in found.containers:
                new.setdefault((name, key), _Location(found.containers[name], key))
        if self.paths is not None:
            new = {path: new[path] for path in self.paths if path in new}
        self._entries = new | self._entries

    def _was_there(self, path: OutputPath, entry: _Location) -> bool:
        return path in self._before or id(entry.container) in self._known

    def changes(self) -> dict[OutputPath, Change]:
        """All changes since ``begin``; without paths only those with tensors."""
        if self.paths is None or len(self._entries) < len(self.paths):
            self._find()
        found: dict[OutputPath, Change] = {}
        inside: tuple[str, ...] = ()
        for path, entry in self._entries.items():
            name, key = path
            value = entry.get()
            before, old = self._before.get(path, (_NOTHING, None))
            same, now = value is before, _elements(value)
            if (same and _same(now, old)) or not self._was_there(path, entry):
                continue
            if value is _NOTHING or name.startswith(inside):
                continue
            appended = same and _same((now or ())[: len(old or ())], old)
            new = list((now or ())[len(old or ()) :]) if appended else value
            if self.paths is not None or tensors_in(new):
                refilled = same and now is not None and not appended
                found[path] = Change(tree_map(_unchanged, new), appended, refilled)
                inside += (f"{name}.{key}",)
        return found

    def floats(self) -> tuple[str, ...]:
        """The names of Python floats that are new or have changed since ``begin``."""
        return tuple(
            f"{name}.{key}".lstrip(".")
            for (name, key), entry in self._entries.items()
            if isinstance(value := entry.get(), float)
            and value is not self._before.get((name, key), (None,))[0]
        )

    def restore(self) -> None:
        if self.paths is None:
            self._find()
        for path, entry in self._entries.items():
            if not self._was_there(path, entry):
                continue
            before, elements = self._before.get(path, (_NOTHING, None))
            if elements is not None and not _same(_elements(before), elements):
                _fill(before, elements)
            if entry.get() is not before:
                entry.set(before)

    def changeable(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Two values that stay equal unless the call of a module has side effects.

        The first covers the module's arguments, and attributes in which it keeps tensors, unless
        they are at the paths. The second covers numbers in attributes.
        """
        attributes = [
            (each, name, value) for each in module.modules() for name, value in vars(each).items()
        ]
        # The modes that trace operations must not see this.
        with torch._C.DisableTorchFunction():
            leaves, spec = tree_flatten((args, kwargs))
            ids = [
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
        return (spec, list(map(id, leaves)), versions, ids), numbers

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors that are new since ``begin``, and those of them that are in no list."""
        values = [each.value for each in self.changes().values()] if self.paths else []
        return tensors_in(values), [t for t in values if isinstance(t, torch.Tensor)]

    def tree(self) -> list[Any]:
        """All changes since ``begin``, by path, as nested containers that ranks can send."""
        found = self.changes()
        return [found.get(path) for path in self.paths or ()]

    def put_tree(self, tree: Sequence[Any]) -> None:
        """Replace what has changed since ``begin`` by what ``tree`` has returned, on any rank."""
        pairs = zip(self.paths or (), tree, strict=True)
        changes: dict[OutputPath, Change] = {path: each for path, each in pairs if each}
        if not changes.keys() <= self._entries.keys():
            self._find()
        for path, change in changes.items():
            if path not in self._entries:  # in an object that this rank has not made
                continue
            entry, value = self._entries[path], tree_map(_unchanged, change.value)
            before, old = self._before.get(path, (_NOTHING, None))
            now = entry.get()
            if change.appended and isinstance(now, list | deque):
                _fill(now, (*(old or ()), *value))
            elif change.refilled and isinstance(now, list | deque):
                _fill(now, value)  # it stays the same list under all of its names
            elif isinstance(now, list) and isinstance(value, list) and now is not before:
                _fill(now, value)  # the forward that is running has this list
            else:
                entry.set(value)


def _unchanged(leaf: Any) -> Any:
    return leaf


def _fill(container: Any, elements: Iterable[Any]) -> None:
    elements = list(elements)
    container.clear()
    container.extend(elements)


@contextmanager
def undoing_side_effects(model: nn.Module) -> Iterator[SideOutputs]:
    """Undoes what a forward changes in the model: attributes, hooks, and side outputs."""
    modules = list(model.modules())
    before = [(module, dict(vars(module))) for module in modules]
    hooks = [(own := vars(module)[name], dict(own)) for module in modules for name in HOOKS]
    side_outputs = SideOutputs(model)
    side_outputs.begin()
    try:
        yield side_outputs
    finally:
        side_outputs.restore()
        for current, content in (*((vars(m), attributes) for m, attributes in before), *hooks):
            current.clear()
            current.update(content)
