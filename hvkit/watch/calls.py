"""What this rank is doing: which call of hvkit it is in, whether it waits there, and at which line.

The training script's thread only sets a few fields. Whoever wants to know more, the watcher's
thread, looks at the thread's stack when a wait has lasted long enough to matter.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class GraphWait(Protocol):
    """Collectives inside a TensorFlow graph, which no Python code surrounds."""

    def read(self) -> tuple[int, int]:
        """How often ranks have come to them, and how often they were over."""

    key: str
    """Tells the collectives from others; the same on every rank."""
    name: str
    """What to say that the rank waits in, where the script made no call of hvkit's."""


@dataclass(frozen=True)
class Status:
    """What a rank is doing.

    Attributes:
        call: the user's call that it is in, ``hvkit.average`` or ``backward() of step 11``; empty
            if it is in none.
        key: calls of the same key wait for each other.
        serial: the number of calls so far, this one included.
        before: the key of the call before this one.
        waits: whether it waits there for other ranks.
        seconds: how long it has waited, or has been out of any wait.
        where: the line of the script, ``train.py:41``.
    """

    call: str = ""
    key: str = ""
    serial: int = 0
    before: str = ""
    waits: bool = False
    seconds: float = 0.0
    where: str = ""


class _Now:
    """The fields that the script's thread sets; one object for the process."""

    def __init__(self) -> None:
        self.call = ""
        self.step: int | None = None
        self.key = ""
        self.before = ""
        self.serial = 0
        self.turns = 0
        self.waits = 0
        self.since = time.monotonic()


@dataclass(frozen=True)
class _Seen:
    """The counters of a graph when they were last seen to change.

    A graph that fails leaves them as they are. Its script is out of it once it has begun or ended
    another call (``turns``), or is no longer inside TensorFlow.
    """

    counts: tuple[int, int]
    at: float
    turns: int


_now = _Now()
_graph_waits: list[GraphWait] = []
_graph_seen: dict[int, _Seen] = {}


@contextmanager
def call(name: str, step: int | None = None, key: str = "") -> Iterator[None]:
    """A call that ranks make together; everything inside belongs to it.

    Inside another call it does nothing: that is the one which the user made.

    Args:
        name: as the user writes it: ``fit``, ``backward()``.
        step: the optimizer step that it belongs to, counted from 1.
        key: what calls have to have in common to wait for each other, beside the name.
    """
    if _now.call:
        yield
        return
    with _entered(name, step, key):
        yield


def named(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: where the script itself calls this function, that is the call ``name``.

    Also inside another call, as in a callback of ``fit``. Where hvkit calls it, it belongs to the
    call that the script made.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def in_call(*args: P.args, **kwargs: P.kwargs) -> R:
            if sys._getframe(1).f_code.co_filename.startswith(_OWN_FOLDER):
                return function(*args, **kwargs)
            with _entered(name, None, ""):
                return function(*args, **kwargs)

        return in_call

    return decorate


@contextmanager
def _entered(name: str, step: int | None, key: str) -> Iterator[None]:
    now = _now
    outer = now.call, now.step, now.key
    now.call, now.step, now.key = name, step, f"{name} {key}"
    now.serial += 1
    now.turns += 1
    try:
        yield
    finally:
        now.before = now.key
        now.turns += 1
        now.call, now.step, now.key = outer


def current_call() -> str:
    """The user's call that this rank is in; empty if in none."""
    return _described(_now.call, _now.step)


@contextmanager
def waiting() -> Iterator[None]:
    """Around code that returns only when every rank has come to it."""
    now = _now
    now.waits += 1
    now.turns += 1
    now.since = time.monotonic()
    try:
        yield
    finally:
        now.waits -= 1
        now.since = time.monotonic()


def watch_graph(wait: GraphWait) -> None:
    """Count waits in these collectives of a graph as this rank's, too."""
    _graph_waits.append(wait)


def status() -> Status:
    """What this rank is doing; for a thread other than the script's."""
    now = _now
    moment = time.monotonic()
    waits, since, serial = now.waits > 0, now.since, now.serial
    name, key = _described(now.call, now.step), now.key
    for i, each in enumerate(_graph_waits):
        entered, left = each.read()
        seen = _graph_seen.get(i)
        if seen is None or seen.counts != (entered, left):
            seen = _graph_seen[i] = _Seen((entered, left), moment, now.turns)
        serial += entered
        since = max(since, seen.at)
        if entered > left and not waits and now.turns == seen.turns and _inside_tensorflow():
            waits, key = True, f"{now.call or each.name} {each.key}"
            name = f"{now.call or each.name}, step {entered}"
    return Status(name, key, serial, now.before, waits, moment - since, line_of_script())


def _inside_tensorflow() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and f"{os.sep}tensorflow{os.sep}" in frame.f_code.co_filename


def _described(name: str, step: int | None) -> str:
    return name if step is None else f"{name} of step {step}"


def line_of_script() -> str:
    """The line of the user's own code that the main thread is at: ``train.py:41``.

    That is the innermost line outside of hvkit, installed packages and the standard library.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    fallback: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN_FOLDER):
            if not _is_library(frame):
                return _line(frame)
            fallback = fallback or frame
        frame = frame.f_back
    return _line(fallback) if fallback is not None else ""


_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith("<"):  # code that was made from text: a shell's, a notebook's, a library's
        return frame.f_globals.get("__name__") != "__main__"
    return file.startswith(_library_folders()) or "__autograph_generated_file" in file


@functools.cache
def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_path(name) for name in names} | {os.path.dirname(os.__file__)}
    return tuple(sorted(f"{folder}{os.sep}" for folder in folders if folder))


def _line(frame: Any) -> str:
    file = frame.f_code.co_filename
    if os.path.isabs(file):
        near = os.path.relpath(file)
        file = file if near.startswith("..") else near
    return f"{file}:{frame.f_lineno}"
