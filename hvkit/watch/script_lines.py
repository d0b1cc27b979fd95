"""Which lines of the script its threads are at, and whether they run code of a package.

The watcher's thread looks at the stacks of others, and only when a wait has lasted long enough to
matter.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_stack
from types import FrameType, TracebackType

from hvkit.log import near

MAIN = threading.main_thread().ident or 0
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""Where hvkit's own code is."""

# Lines of a stack to report.
_STACK = 12


def stack_of_script() -> tuple[str, ...]:
    """The main thread's stack without hvkit's code: ``train.py:41 in load``, innermost last."""
    with frames() as now:
        walked = ((frame.f_code, line) for frame, line in _walk(now.get(MAIN)))
        calls = [(code.co_filename, line, code.co_name) for code, line in walked][:_STACK]
    return tuple(f"{_line(file, line)} in {name}" for file, line, name in reversed(calls))


def _walk(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """A thread's frames outside of hvkit and their lines, the innermost first."""
    for each, line in walk_stack(frame) if frame is not None else ():
        if not each.f_code.co_filename.startswith(OWN_FOLDER):
            yield each, line


def inside_tensorflow() -> int | None:
    """A thread that runs a graph, preferably the main one; None if there is none."""
    with frames() as now:
        files = {ident: frame.f_code.co_filename for ident, frame in now.items()}
    for ident in sorted(files, key=lambda each: each != MAIN):
        file = files[ident]
        if f"{os.sep}tensorflow{os.sep}" in file and not file.startswith(OWN_FOLDER):
            return ident
    return None


def inside(package: str) -> bool:
    """Whether the main thread runs code of an installed package."""
    with frames() as now:
        name = str(now[MAIN].f_globals.get("__name__", "")) if MAIN in now else ""
    return name.partition(".")[0] == package


def line_of_traceback(trace: TracebackType) -> str:
    return _line(trace.tb_frame.f_code.co_filename, trace.tb_lineno)


@contextmanager
def frames() -> Iterator[dict[int, FrameType]]:
    """The innermost frame of each thread; of this one, the frame that called the caller's function.

    Up to Python 3.11, a thread may read memory that was freed if three things happen together:
    it holds a frame of a thread that runs, that thread returns from the function, and a garbage
    collection lets other threads run while Python makes a frame object. A collection at that moment
    can also hang (python/cpython issue 106883). So garbage collection is off here, no frame is kept
    afterwards, and the frames are read right after this thread has got the interpreter's lock,
    which it keeps for some milliseconds then. A frame would also keep local variables alive, such
    as a batch on a GPU.
    """
    found: dict[int, FrameType] = {}
    _library_folders()  # reads files the first time
    time.sleep(0)  # releases the interpreter's lock, and gets it again
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            found = sys._current_frames()
            # Not this function's caller: a frame that refers to itself stays until it is collected.
            found[threading.get_ident()] = sys._getframe(3)
            yield found
        finally:
            found.clear()
            if collects:
                gc.enable()


# Reentrant: a signal handler may read frames while its own thread does.
_looking = threading.RLock()


def line_of_script(thread: int | None = None) -> str:
    """The current line of the user's own code in a thread, by default this one: ``train.py:41``.

    That is the innermost line outside of hvkit, installed packages and the standard library. For a
    thread that runs no code of the user's, it is the line of the main thread, which waits for it.
    """
    this_thread = threading.get_ident()
    thread = this_thread if thread is None else thread
    if thread == this_thread == MAIN:
        return _line(*_file_and_line({this_thread: sys._getframe(1)}, thread))
    with frames() as now:
        found = _file_and_line(now, thread)
    return _line(*found)


def _file_and_line(frames: dict[int, FrameType], thread: int) -> tuple[str, int]:
    fallback = "", 0
    for ident in (thread, MAIN):
        for frame, line in _walk(frames.get(ident)):
            found = frame.f_code.co_filename, line
            if not _is_library(frame):
                return found
            fallback = fallback if fallback[0] else found
    return fallback


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith("<"):  # code from a string: a shell's, a notebook's or a library's
        return frame.f_globals.get("__name__") != "__main__"
    return file.startswith(_library_folders()) or "__autograph_generated_file" in file


@functools.cache
def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_path(name) for name in names} | {os.path.dirname(os.__file__)}
    return tuple(sorted(f"{folder}{os.sep}" for folder in folders if folder))


def _line(file: str, line: int) -> str:
    return f"{near(file)}:{line}" if file else ""
