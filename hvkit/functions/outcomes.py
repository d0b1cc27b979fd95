"""Files with what each rank has returned or raised, for the process that started the ranks.

A file holds two pickles: whether the rank has raised, with the text of the traceback, and then the
value or the exception itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import socket
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, TracebackType
from typing import Any, BinaryIO

from hvkit.errors import HvkitError
from hvkit.functions import pickling
from hvkit.launching.supervision.protocol import written
from hvkit.log import in_short, text_of


def save_result(path: Path, value: object) -> None:
    try:
        with written(path) as file:
            pickle.dump(None, file)
            pickling.dump(value, file)
    except OSError:
        raise
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__} that cannot be pickled "
            f"({in_short(error)}): return plain values, arrays, or a model's state_dict()"
        ) from None


def save_error(path: Path, rank: int, error: BaseException) -> None:
    """Save what the function has raised, with its traceback."""
    lines = traceback.format_exception(type(error), error, from_function(error.__traceback__))
    with written(path) as file:
        pickle.dump(f"raised on rank {rank}, {socket.gethostname()}:\n{''.join(lines)}", file)
        file.write(picklable(error))


def error_in(file: BinaryIO) -> BaseException | None:
    """The exception that a rank's function has raised, with the traceback as a note, or None."""
    note = pickle.load(file)
    if note is None:
        return None
    try:
        error: BaseException = pickle.load(file)
    except Exception as problem:  # such as one whose module is on the ranks only
        error = HvkitError(f"a rank has raised what cannot be unpickled here: {in_short(problem)}")
    error.add_note(note.rstrip("\n"))
    return error


def results_in(paths: Sequence[Path]) -> list[Any]:
    """By rank, the returned values, if ``error_in`` finds no error."""
    results = []
    for rank, path in enumerate(paths):
        with path.open("rb") as file:
            pickle.load(file)
            try:
                results.append(pickle.load(file))
            except Exception as problem:
                kept = _kept(paths)
                raise HvkitError(
                    f"what rank {rank} returned cannot be unpickled here ({in_short(problem)}): "
                    "return plain values, arrays, or a model's state_dict(). The results are kept: "
                    "in a process that has what they need, "
                    f"pickle.load(open('{kept}/rank-{rank}.pickle', 'rb'))"
                ) from problem
    return results


def _kept(paths: Sequence[Path]) -> Path:
    """A folder of this user's with what each rank has returned."""
    folder = Path(tempfile.mkdtemp(prefix="hvkit-results-"))
    for rank, path in enumerate(paths):
        with path.open("rb") as file, (folder / f"rank-{rank}.pickle").open("wb") as kept:
            pickle.load(file)
            shutil.copyfileobj(file, kept)
    return folder


def picklable(error: BaseException) -> bytes:
    """The exception as a pickle that gives the same class, text and attributes; without its frames.

    So do its causes and contexts, and the exceptions of a group. Attributes that cannot be pickled
    are left out. One that no way restores becomes a ``HvkitError`` with its name and text; of a
    group, only that one does.
    """
    for chained in (True, False):
        try:
            file = io.BytesIO()
            _ErrorPickler(file, chained).dump(error)
            restored = pickle.loads(file.getvalue())
            if type(restored) is type(error) and text_of(restored) == text_of(error):
                return file.getvalue()
        except Exception:  # an exception may hold anything, and its class do anything
            continue
    made: BaseException = HvkitError(in_short(error))
    if isinstance(error, BaseExceptionGroup):
        each = [pickle.loads(picklable(one)) for one in error.exceptions]
        made = BaseExceptionGroup.derive(error, each)
    file = io.BytesIO()
    _ErrorPickler(file, chained=False).dump(made)
    return file.getvalue()


class _ErrorPickler(pickling.Pickler):
    """Pickles exceptions with what Python leaves out: attributes in slots, cause and context.

    Many exceptions have an ``__init__`` that does not accept their ``args``. They are made without
    it, unless their class says itself how it is pickled.
    """

    def __init__(self, file: BinaryIO, chained: bool) -> None:
        super().__init__(file)
        self._chained = chained

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, BaseException):
            return super().reducer_override(obj)
        state = {name: getattr(obj, name) for name in _CHAIN} if self._chained else {}
        if not _says_how(type(obj)):
            attributes = {**vars(obj), **dict(_in_slots(obj))}
            state = {name: v for name, v in attributes.items() if _can_travel(v)} | state
            return _made, (type(obj), obj.args), state, None, None, _complete
        how: Any = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if len(how) > 2 and how[2] is not None:  # a state, which may be for its own __setstate__
            return how
        return *how[:2], state, None, None, _complete


_CHAIN = ("__cause__", "__context__", "__suppress_context__")
_HOW = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__")


def _says_how(error_type: type[BaseException]) -> bool:
    """Whether a class of Python code, not of Python itself, defines how it is pickled."""
    return any(
        isinstance(vars(each).get(name), FunctionType)
        for each in error_type.__mro__
        for name in _HOW
    )


def _in_slots(error: BaseException) -> Iterator[tuple[str, object]]:
    """The attributes that are not in its ``__dict__``, such as the name of an ``ImportError``."""
    for error_type in type(error).__mro__:
        if error_type in (BaseException, object):
            continue
        for name, each in vars(error_type).items():
            if isinstance(each, MemberDescriptorType | GetSetDescriptorType):
                with contextlib.suppress(AttributeError):  # unset
                    yield name, getattr(error, name)


def _can_travel(value: object) -> bool:
    return isinstance(value, BaseException) or not pickling.problem_with(value)


def _made(error_type: type[BaseException], args: tuple[object, ...]) -> BaseException:
    error: BaseException = error_type.__new__(error_type, *args)
    error.args = args
    return error


def _complete(error: BaseException, state: Mapping[str, object]) -> None:
    for name, value in state.items():
        # What __new__ has set may have no other way in, and a None that is set may be shown.
        with contextlib.suppress(AttributeError, TypeError):
            if getattr(error, name, None) is not value:
                setattr(error, name, value)


def from_function(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without hvkit's frames above the function; None if it has no others."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if os.path.dirname(file) not in _HERE and file != "<frozen runpy>":
            break
        trace = trace.tb_next
    return trace


_HERE = tuple(str(Path(__file__).absolute().parents[1] / each) for each in ("functions", "spark"))
