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
    """Names the collectives among all; the same on every rank."""


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
        self.depth = 0
        self.waits = 0
        self.since = time.monotonic()


_now = _Now()
_graph_waits: list[GraphWait] = []
_graph_seen: dict[int, tuple[int, float]] = {}


@contextmanager
def call(name: str, step: int | None = None, key: str = "") -> Iterator[None]:
    """The user's call that everything inside belongs to; inside another call it counts as that one.

    Args:
        name: as the user writes it: ``hvkit.average``, ``backward()``.
        step: the optimizer step that it belongs to, counted from 1.
        key: what calls have to have in common to wait for each other, beside the name.
    """
    now = _now
    now.depth += 1
    if now.depth == 1:
        now.call, now.step, now.key = name, step, f"{name} {key}"
        now.serial += 1
    try:
        yield
    finally:
        now.depth -= 1
        if now.depth == 0:
            now.before, now.call, now.step, now.key = now.key, "", None, ""


def named(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: the whole function is the user's call ``name``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def in_call(*args: P.args, **kwargs: P.kwargs) -> R:
            with call(name):
                return function(*args, **kwargs)

        return in_call

    return decorate


def current_call() -> str:
    """The user's call that this rank is in; empty if in none."""
    return _described(_now.call, _now.step)


@contextmanager
def waiting() -> Iterator[None]:
    """Around code that returns only when every rank has come to it."""
    now = _now
    now.waits += 1
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
        before, when = _graph_seen.get(i, (-1, moment))
        if entered + left != before:
            when = moment
            _graph_seen[i] = (entered + left, moment)
        serial += entered
        since = max(since, when)
        if entered > left and not waits:
            waits, key = True, f"{now.call or 'step'} {each.key}"
            name = f"{now.call or 'the optimizer'}, step {entered}"
    return Status(name, key, serial, now.before, waits, moment - since, line_of_script())


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
        if not file.startswith("<frozen") and not file.startswith(_OWN_FOLDER):
            if not _is_library(file):
                return _line(frame)
            fallback = fallback or frame
        frame = frame.f_back
    return _line(fallback) if fallback is not None else ""


_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _is_library(file: str) -> bool:
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
