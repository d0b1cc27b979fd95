"""What a rank has returned or raised, in a file that the process reads that started the ranks.

A file holds two pickles: whether the rank has raised, with the text of the traceback, and then the
value or the exception itself.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from hvkit.errors import HvkitError
from hvkit.functions import pickling
from hvkit.host.call_folder import written
from hvkit.wording import in_short


def save_result(path: Path, value: object) -> None:
    """Save what the function has returned.

    Raises:
        TypeError: it cannot be pickled.
    """
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


def save_error(path: Path, rank: int, error: Exception) -> None:
    """Save what the function has raised, with its traceback."""
    lines = traceback.format_exception(type(error), error, from_function(error.__traceback__))
    with written(path) as file:
        pickle.dump(f"raised on rank {rank}, {socket.gethostname()}:\n{''.join(lines)}", file)
        file.write(picklable(error))


def error_in(file: BinaryIO) -> Exception | None:
    """What a rank's function has raised, with the rank's traceback as a note; None for nothing."""
    note = pickle.load(file)
    if note is None:
        return None
    try:
        error: Exception = pickle.load(file)
    except Exception as problem:  # such as one whose module is on the ranks only
        error = HvkitError(f"a rank has raised what cannot be unpickled here: {in_short(problem)}")
    error.add_note(note.rstrip("\n"))
    return error


def result_in(file: BinaryIO, rank: int) -> Any:
    """What a rank's function has returned, if ``error_in`` finds no error.

    Raises:
        HvkitError: it cannot be unpickled here.
    """
    pickle.load(file)
    try:
        return pickle.load(file)
    except Exception as problem:
        raise HvkitError(
            f"what rank {rank} returned cannot be unpickled here ({in_short(problem)}): return "
            "plain values, arrays, or a model's state_dict()"
        ) from problem


def picklable(error: Exception) -> bytes:
    """The exception as a pickle that gives the same class and text; without its frames.

    Many exceptions have an ``__init__`` that does not accept their ``args``. They are made without
    it. One that no way restores becomes a ``HvkitError`` with its name and text.
    """
    ways = ((_made, (type(error), error.args, vars(error))), (_same, (error,)))
    for way, arguments in ways:
        try:
            pickled = _pickled(_Reduced(way, arguments))
            restored = pickle.loads(pickled)
            if type(restored) is type(error) and str(restored) == str(error):
                return pickled
        except Exception:  # an exception may hold anything, and its class do anything
            continue
    return _pickled(HvkitError(in_short(error)))


def from_function(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without hvkit's frames above the function; None if it has no others."""
    while trace is not None and _is_above(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_above(file: str) -> bool:
    return os.path.dirname(file) == _HERE or file == "<frozen runpy>"


_HERE = os.path.dirname(os.path.abspath(__file__))


class _Reduced:
    """Pickles as a call."""

    def __init__(self, function: Any, arguments: Sequence[object]) -> None:
        self._reduced = function, tuple(arguments)

    def __reduce__(self) -> Any:
        return self._reduced


def _made(kind: type[Exception], args: tuple[object, ...], state: dict[str, Any]) -> Exception:
    error: Exception = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def _same(error: Exception) -> Exception:
    return error


def _pickled(value: object) -> bytes:
    file = io.BytesIO()
    pickling.dump(value, file)
    return file.getvalue()
