"""Pickles functions and values for the way to ranks and back, with cloudpickle.

cloudpickle sends functions and classes of ``__main__``, such as a notebook's cells define, by
value, and what modules define by name. A class that has travelled both ways is the same class
again, so ``isinstance`` and ``except`` work with what ranks return and raise.

IPython compiles each cell as a file of its own that does not exist, such as
``/tmp/ipykernel_7/123.py``, and keeps its lines in ``linecache``. Ranks get both, so that their
tracebacks say ``File "Cell In[3]", line 2`` and show the line, and ``inspect.getsource`` works.

Tensors travel in the host's memory, and no larger than they are. One that was pickled on a GPU
would be restored there: it would take a GPU of the process that has started the ranks, or fail
where there is none. An array of JAX's or TensorFlow's would start that framework wherever it is
unpickled, with all GPUs; on a rank, before hvkit can.
"""

from __future__ import annotations

import functools
import inspect
import io
import linecache
import os
import pickle
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, BinaryIO

import numpy as np

from hvkit.errors import is_of_full_disk
from hvkit.functions import keras_objects
from hvkit.launching.supervision.protocol import CALL_PREFIX, call_in, written
from hvkit.log import in_short

try:
    import cloudpickle
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "functions travel to ranks by cloudpickle, which is missing here: pip install cloudpickle",
        name=missing.name,
    ) from missing

# At the end of the file of a call: where in it the names of ``__main__`` begin.
_POSITION = struct.Struct("!Q")
# How far the search for what cannot be pickled goes: values in values, and of each so many parts.
_DEEPEST, _MOST_PARTS = 8, 1000
# The main module of processes that a rank starts with multiprocessing.
_RANK = "hvkit.functions.rank"
# What multiprocessing calls the script in processes that it spawns, which may start ranks, too.
_OF_SPAWNED = "__mp_main__"
_MAIN = ("__main__", _OF_SPAWNED)

# A function and its arguments.
Call = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which names cells as notebooks do, and sends tensors in the host's memory."""

    def __init__(self, file: BinaryIO) -> None:
        # By name, what it has pickled by value that __main__ defines.
        self.of_main: dict[str, object] = {}
        self._main = vars(sys.modules["__main__"])
        if _OF_SPAWNED in sys.modules:
            cloudpickle.register_pickle_by_value(sys.modules[_OF_SPAWNED])
        self._cells = _cell_names()
        self.dispatch_table = cloudpickle.Pickler.dispatch_table.new_child()
        self.dispatch_table[CodeType] = self._reduced_code
        super().__init__(file)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type) and obj.__module__ in _MAIN:
            name = obj.__qualname__
            if self._main.get(name) is obj:
                self.of_main[name] = obj
        if (copy := host_copy(obj)) is not None:
            return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if keras_objects.is_saveable(obj):
            return keras_objects.reduced(obj)
        return super().reducer_override(obj)

    def _reduced_code(self, code: CodeType) -> Any:
        name = self._cells.get(code.co_filename, code.co_filename)
        return cloudpickle.Pickler.dispatch_table[CodeType](code.replace(co_filename=name))


def check_function(user: str, function: object, example: str) -> None:
    """Raise ``TypeError``, with an example, if what the user shall run is no function."""
    if not callable(function):
        raise TypeError(
            f"{user} needs a function, got {function!r}: pass the function itself, not its "
            f"result: {example}"
        )
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_one(function) for is_one in kinds):
        name = _name_of(function)
        raise TypeError(
            f"{user}: calling {name} runs none of it, as it is a generator or an async function: "
            f"pass a function that runs it, with list({name}(...)) or asyncio.run({name}(...))"
        )


def dump(value: object, file: BinaryIO) -> None:
    Pickler(file).dump(value)


@contextmanager
def call_folder(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[Path]:
    """A folder for this user only, which holds the call until the block ends."""
    folder = Path(tempfile.mkdtemp(prefix=CALL_PREFIX))
    try:
        with written(call_in(folder)) as file:
            write_call(file, function, args, kwargs)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_call(
    file: BinaryIO,
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> None:
    """Write what ``read_call`` reads in another process."""
    caller = {
        "path": sys.path,
        "folder": os.getcwd(),
        "argv": sys.argv,
        "cells": _lines_of_cells(),
        "main": getattr(sys.modules["__main__"], "__file__", None),
    }
    pickle.dump(caller, file)
    pickler = Pickler(file)
    try:
        pickler.dump((function, tuple(args), dict(kwargs)))
    except Exception as error:
        if is_of_full_disk(error):
            raise
        raise TypeError(_unpicklable(function, args, kwargs, error)) from error
    pickler.dump(pickler.of_main)  # by the same one: the objects of the call, and no copies
    position = file.tell()
    dump(pickler.of_main, file)
    file.write(_POSITION.pack(position))


def read_call(file: BinaryIO) -> Call:
    """The function and its arguments, in a process that then finds the caller's modules."""
    caller = _prepare(file)
    unpickler = pickle.Unpickler(file)
    try:
        call: Call = unpickler.load()
    except Exception as error:
        error.add_note(
            "The function and its arguments could not be unpickled on this rank. What they take "
            "from modules is imported: the modules must exist on every host."
        )
        raise
    # In place of the module that this process runs: what pickles by name, such as torch.save and
    # processes that the function starts, looks for the caller's classes there.
    main = sys.modules["__main__"] = sys.modules[_OF_SPAWNED] = ModuleType("__main__")
    main.__spec__ = ModuleSpec(_RANK, None)
    if caller["main"] is not None:
        main.__file__ = os.path.join(caller["folder"], caller["main"])
    vars(main).update(unpickler.load())
    return call


def read_main(file: BinaryIO) -> dict[str, object]:
    """The names of the caller's ``__main__`` that the call uses, for processes of a rank."""
    _prepare(file)
    file.seek(-_POSITION.size, os.SEEK_END)
    file.seek(*_POSITION.unpack(file.read()))
    names: dict[str, object] = pickle.load(file)
    return names


def _prepare(file: BinaryIO) -> dict[str, Any]:
    """Let this process find the caller's modules; return what is known of the caller."""
    caller: dict[str, Any] = pickle.load(file)
    here = caller["folder"]
    sys.argv[:] = caller["argv"]
    sys.path[:] = dict.fromkeys([*(each or here for each in caller["path"]), *sys.path])
    for name, lines in caller["cells"].items():
        # No time of change: the lines stay although there is no file.
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return caller


def _unpicklable(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    error: Exception,
) -> str:
    """The message that names what cannot be pickled, as deep inside as it can be found."""
    name = _name_of(function)
    parts = [(f"argument {number} of {name}", each) for number, each in enumerate(args, start=1)]
    parts += [(f"argument {key}= of {name}", each) for key, each in kwargs.items()]
    parts += _parts_of(name, function)
    message, user = f"{name} cannot be pickled for the ranks ({in_short(error)})", name
    for _ in range(_DEEPEST):
        found = ((*each, problem_with(each[1])) for each in parts[:_MOST_PARTS])
        part, value, problem = next((each for each in found if each[2]), ("", None, ""))
        if not problem:
            break
        message = (
            f"{part} is a {type(value).__name__}, which cannot be pickled ({problem}): create it "
            f"inside of {user}, or pass what it is made from"
        )
        user = _name_of(value) if isinstance(value, FunctionType) else user
        parts = _parts_of(part, value)
    return message


def _name_of(function: Callable[..., object]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _parts_of(part: str, value: Any) -> list[tuple[str, object]]:
    """The parts of a value, which messages call ``part``; each with its name for a message."""
    if isinstance(value, FunctionType):
        name = value.__name__
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        used = [(f"{each}, which {name} uses,", variable) for each, variable in _used_by(value)]
        return used + [(f"a default of {name}", each) for each in given]
    if isinstance(value, functools.partial):
        given = [*value.args, *value.keywords.values()]
        return [
            *((f"what {part} holds", each) for each in given),
            (f"the function of {part}", value.func),
        ]
    if isinstance(value, MethodType):
        return [(f"the object of {part}", value.__self__), (part, value.__func__)]
    if isinstance(value, Mapping):
        return [(f"{key!r} of {part}", each) for key, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"element {number} of {part}", each) for number, each in enumerate(value)]
    attributes = getattr(value, "__dict__", {})
    return [(f"{name} of {part}", each) for name, each in attributes.items() if name != "__dict__"]


def _used_by(function: FunctionType) -> Iterator[tuple[str, object]]:
    """The variables that a function uses, by name, without those that have no value yet."""
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
        with suppress(ValueError):
            yield name, cell.cell_contents
    for name in dict.fromkeys(_names_in(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names_in(code: CodeType) -> Iterator[str]:
    """The global names in code, and in the code of the functions that it defines."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)


def check_environ(user: str, env: object) -> dict[str, str]:
    """The environment variables that a caller has passed."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(
            f"{user}: env must be a dict of variables, got {env!r}: env={{'NAME': '1'}}"
        )
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(
                f"{user}: names and values of env must be str, got {name!r}: {value!r}: write "
                f"{str(name)!r}: {str(value)!r}"
            )
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(
                f"{user}: no environment can have {name!r}: {value!r} of env: a name is not empty "
                "and has no =, and neither it nor its value a NUL"
            )
    return dict(env)


def problem_with(value: object) -> str:
    """Why a value cannot be pickled, in a line; empty if it can."""
    try:
        dump(value, io.BytesIO())
    except Exception as error:
        return in_short(error)
    return ""


def _cell_names() -> dict[str, str]:
    """By the name of a file that does not exist, the name of its cell, such as ``Cell In[3]``."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_shell() if get_shell is not None else None
    if shell is None:
        return {}
    found = ((file, shell.compile.format_code_name(file)) for file in linecache.cache)
    return {file: " ".join(name) for file, name in found if name is not None}


def _lines_of_cells() -> dict[str, list[str]]:
    """The lines of all code that is in no file, by the name that ranks give to it."""
    names = _cell_names()
    return {
        names.get(file, file): entry[2]
        for file, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(file)
    }


def host_copy(thing: object) -> Any:
    """The value to pickle instead of a tensor; None if the thing is pickled as it is.

    A part of a tensor of PyTorch's becomes a tensor of its own, without the rest of its storage.
    Arrays of JAX's and tensors of TensorFlow's become NumPy's.
    """
    if (torch := sys.modules.get("torch")) is not None and isinstance(thing, torch.Tensor):
        return _of_torch(thing, torch)
    jax: Any = sys.modules.get("jax")
    of_jax: Any = getattr(jax, "Array", ())
    if isinstance(thing, of_jax):
        if not thing.is_fully_addressable and not thing.is_fully_replicated:
            raise TypeError(
                f"an array of shape {thing.shape} is divided among the ranks: call "
                "jax.experimental.multihost_utils.process_allgather(array, tiled=True) on every one"
            )
        is_key = jax.dtypes.issubdtype(thing.dtype, jax.dtypes.prng_key)
        return None if is_key else np.array(thing)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(thing, getattr(tensorflow, "Tensor", ())):
        return np.array(thing.numpy()) if hasattr(thing, "numpy") else None
    return None


def _of_torch(tensor: Any, torch: Any) -> Any:
    if tensor.device.type == "cuda":
        copy = tensor.detach().cpu()
    elif _is_part(tensor, torch):
        copy = tensor.detach().clone()
    else:
        return None
    copy.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, tensor.requires_grad)
    return copy


def _is_part(tensor: Any, torch: Any) -> bool:
    """Whether its storage holds more than this tensor."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return bool(tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size())
