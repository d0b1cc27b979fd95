"""hvkit's own threads: one that fails ends its process, with a traceback and the reason.

Nobody waits for most of these threads. Without this, a failure would show in its consequences only:
nobody would notice ranks that wait for each other, or send what others wait for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

from hvkit.log import in_short

# Called with how a thread has failed, before that ends this process.
before_end: list[Callable[[str], None]] = []


def start(name: str, function: Callable[..., object], *given: Any) -> threading.Thread:
    """Call a function in a daemon thread of this name, and end this process if it raises."""
    arguments = (name, function, *given)
    thread = threading.Thread(target=_run, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


def later(
    seconds: float, name: str, function: Callable[..., object], *given: Any
) -> threading.Timer:
    """As ``start``, after some seconds; ``cancel()`` of the result prevents that."""
    timer = threading.Timer(seconds, _run, [name, function, *given])
    timer.name, timer.daemon = name, True
    timer.start()
    return timer


def _run(name: str, function: Callable[..., object], *given: Any) -> None:
    try:
        function(*given)
    except BaseException as error:
        if not threading.main_thread().is_alive():
            # The script has ended, and the interpreter is about to: it starts no threads any more.
            raise
        how = f"failed in its thread {name} with {in_short(error)}"
        text = f"{traceback.format_exc()}hvkit: this process {how}: it ends, and the run with it\n"
        with contextlib.suppress(OSError):  # nobody reads it, which may be why the thread failed
            os.write(2, text.encode(errors="replace"))
        try:
            for each in before_end:
                each(how)
        finally:
            # Not sys.exit, which would end this thread alone; the main thread may wait in C code.
            os._exit(1)
