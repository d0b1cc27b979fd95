"""What this rank is doing: which call of hvkit it is in, whether it waits there, and at which line.

The threads of the training script only set a few fields, each its own. Whoever wants to know more,
the watcher's thread, looks at their stacks when a wait has lasted long enough to matter.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import threading
import time
import weakref
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
        handling: the error that the script was handling when it made the call, if it was.
    """

    call: str = ""
    key: str = ""
    serial: int = 0
    before: str = ""
    waits: bool = False
    seconds: float = 0.0
    where: str = ""
    handling: str = ""


class _Thread:
    """What a thread of the script is doing; only that thread sets it."""

    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.call = ""
        self.step: int | None = None
        self.key = ""
        self.before = ""
        self.handling = ""
        self.serial = 0
        self.waits = 0
        self.since = time.monotonic()
        # How often a call or a wait has begun or ended.
        self.turns = 0


@dataclass(frozen=True)
class _Seen:
    """The counters of a graph when they were last seen to change.

    A graph that fails leaves them as they are. Its script is out of it once it has begun or ended
    another call (``turns``), or is no longer inside TensorFlow.
    """

    counts: tuple[int, int]
    at: float
    turns: int


class _Graph:
    """The collectives of a graph, as long as somebody else holds them."""

    def __init__(self, wait: GraphWait) -> None:
        self.wait = weakref.ref(wait)
        self.seen = _Seen((0, 0), time.monotonic(), -1)


_MAIN = threading.main_thread().ident or 0
# By thread; the next thread of the same number goes on with what an ended one has left.
_threads: dict[int, _Thread] = {_MAIN: _Thread(_MAIN)}
_graphs: list[_Graph] = []


def _this_thread() -> _Thread:
    ident = threading.get_ident()
    try:
        return _threads[ident]
    except KeyError:
        return _threads.setdefault(ident, _Thread(ident))


@contextmanager
def call(name: str, step: int | None = None, key: str = "") -> Iterator[None]:
    """A call that ranks make together; everything inside belongs to it.

    Inside another call it does nothing: that is the one which the user made.

    Args:
        name: as the user writes it: ``fit``, ``backward()``.
        step: the optimizer step that it belongs to, counted from 1.
        key: what calls have to have in common to wait for each other, beside the name.
    """
    if _this_thread().call:
        yield
        return
    with _entered(name, step, key):
        yield


@contextmanager
def call_within(name: str) -> Iterator[None]:
    """A call that another one may contain on every rank or on none: ``evaluate in fit``."""
    outer = _this_thread().call
    with _entered(f"{name} in {outer}" if outer else name, None, ""):
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
    now = _this_thread()
    outer = now.call, now.step, now.key, now.handling
    now.call, now.step, now.key = name, step, f"{name} {key}"
    error = sys.exc_info()[1]
    now.handling = in_short(error) if error is not None and is_failure(error) else ""
    now.serial += 1
    now.turns += 1
    try:
        yield
    finally:
        now.before = now.key
        now.turns += 1
        now.call, now.step, now.key, now.handling = outer


def is_failure(error: BaseException) -> bool:
    """Whether handling this error says that something went wrong: the end of a loop does not."""
    return not isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit)


def in_short(error: BaseException) -> str:
    """An error in one line: ``ValueError: boom``."""
    text = str(error).strip().split("\n")[0][:200]
    return type(error).__name__ + (f": {text}" if text else "")


def current_call() -> str:
    """The user's call that this thread is in; empty if in none."""
    now = _this_thread()
    return _described(now.call, now.step)


@contextmanager
def waiting() -> Iterator[None]:
    """Around code that returns only when every rank has come to it."""
    now = _this_thread()
    now.waits += 1
    now.turns += 1
    now.since = time.monotonic()
    try:
        yield
    finally:
        now.waits -= 1
        now.since = time.monotonic()


def watch_graph(wait: GraphWait) -> None:
    """Count waits in these collectives of a graph as this rank's, too, as long as they exist."""
    _graphs.append(_Graph(wait))


def status() -> Status:
    """What this rank is doing; for a thread other than the script's."""
    moment = time.monotonic()
    threads = list(_threads.values())
    serial, turns = sum(each.serial for each in threads), sum(each.turns for each in threads)
    now = _thread_to_speak_of(threads)
    waits, since, thread = now.waits > 0, now.since, now.ident
    name, key = _described(now.call, now.step), now.key
    for graph in list(_graphs):
        wait = graph.wait()
        if wait is None:
            _graphs.remove(graph)
            continue
        entered, left = wait.read()
        if graph.seen.counts != (entered, left):
            graph.seen = _Seen((entered, left), moment, turns)
        serial += entered
        since = max(since, graph.seen.at)
        if entered > left and not waits and turns == graph.seen.turns:
            inside = _inside_tensorflow()
            if inside is not None:
                waits, key, thread = True, f"{now.call or wait.name} {wait.key}", inside
                name = f"{now.call or wait.name}, step {entered}"
    where = line_of_script(thread)
    return Status(name, key, serial, now.before, waits, moment - since, where, now.handling)


def _thread_to_speak_of(threads: list[_Thread]) -> _Thread:
    """The one that has waited for longest; if none waits, the one that came to hvkit last."""
    running = sys._current_frames()
    alive = [each for each in threads if each.ident in running] or threads
    if waiting := [each for each in alive if each.waits]:
        return min(waiting, key=lambda each: each.since)
    return max(alive, key=lambda each: (bool(each.call), each.since))


def _inside_tensorflow() -> int | None:
    """The thread that runs a graph, if one does; the main one if several do."""
    frames = sys._current_frames()
    for ident in sorted(frames, key=lambda each: each != _MAIN):
        if f"{os.sep}tensorflow{os.sep}" in frames[ident].f_code.co_filename:
            return ident
    return None


def _described(name: str, step: int | None) -> str:
    return name if step is None else f"{name} of step {step}"


def line_of_script(thread: int | None = None) -> str:
    """The line of the user's own code that a thread is at, by default this one: ``train.py:41``.

    That is the innermost line outside of hvkit, installed packages and the standard library. Of a
    thread that runs none of the user's code it is the main thread's, which waits for it.
    """
    frames = sys._current_frames()
    fallback: FrameType | None = None
    for ident in (threading.get_ident() if thread is None else thread, _MAIN):
        frame = frames.get(ident)
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
        with contextlib.suppress(OSError):  # the working directory has been removed
            near = os.path.relpath(file)
            file = file if near.startswith("..") else near
    return f"{file}:{frame.f_lineno}"
