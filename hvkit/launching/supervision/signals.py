"""Signals to ``hvkit run`` while it has no ranks: before the first start, and between two tries.

While ranks run, ``supervised_run`` handles signals in its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those that end the run, with an exit status of 128 plus the signal's number."""

COMMAND_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Those that go to the command of every rank."""


# A batch system and a launcher may both pass on the same signal. After so many seconds, another
# signal is not the same one.
_SAME = 2.0


class EndedBySignal(SystemExit):
    """A signal ends the run; raised in the main thread, wherever it is, so that it cleans up.

    It is a ``SystemExit`` because event loops do not catch that.

    Attributes:
        code: the exit status.
    """

    code: int


def ended_text(number: signal.Signals, saved: int | None, *, resumes: bool = True) -> str:
    """What ``hvkit run`` prints after a signal that ends it.

    Args:
        number: the signal.
        saved: the step of the newest checkpoint; ``None`` if there is none.
        resumes: whether the script begins with ``Checkpoint.restore()``.
    """
    text = f"hvkit run: ended by {number.name}"
    if saved is None:
        return text
    again = "the same command resumes" if resumes else "resume it with Checkpoint.restore()"
    return f"{text}; step {saved} is saved; {again}"


@contextlib.contextmanager
def end_on_signals(saved: Callable[[], int | None]) -> Iterator[None]:
    """Within: signals that end the run raise ``EndedBySignal``, those for ranks do nothing.

    Signals that this process was started to ignore stay ignored. Event loops need
    ``run_until_signal``.

    Args:
        saved: returns the step of the newest checkpoint, for the message; ``None`` for none.
    """
    with same_handlers_after():
        for number in END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _Ends(saved))
        for number in COMMAND_SIGNALS:
            # A function, as commands would inherit SIG_IGN.
            signal.signal(number, lambda *_: None)
        yield


class _Ends:
    """Handles a signal that ends the run."""

    def __init__(self, saved: Callable[[], int | None]) -> None:
        self._saved = saved

    def __call__(self, number: int, _: FrameType | None) -> None:
        # Not print: the signal may have interrupted one.
        with contextlib.suppress(OSError):
            os.write(2, f"{ended_text(signal.Signals(number), self._saved())}\n".encode())
        raise EndedBySignal(128 + number)


def run_until_signal(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` that also works within ``end_on_signals``.

    An exception of a signal handler may be raised anywhere in the event loop's own code, which then
    loses the exception, or the processes that it has started. So a signal cancels ``main``, and its
    handler runs after the loop is closed.

    Raises:
        EndedBySignal: a signal ends the run.
    """
    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        return asyncio.run(main)
    came: list[int] = []
    first = 0.0
    with same_handlers_after(), asyncio.Runner() as runner:
        loop = runner.get_loop()
        task: asyncio.Task[Any] | None = None

        def cancel() -> None:
            if task is not None:
                task.cancel()

        def note(number: int, frame: FrameType | None) -> None:
            nonlocal first
            came.append(number)
            if len(came) == 1:
                first = time.monotonic()
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(cancel)
            elif time.monotonic() - first > _SAME:  # a second signal: end at once
                with contextlib.suppress(EndedBySignal):
                    ends(number, frame)
                os._exit(128 + number)

        async def cancellable() -> T:
            nonlocal task
            task = asyncio.current_task()
            if came:
                cancel()
            with _woken_by_signals(loop):
                return await main

        for number in END_SIGNALS:
            if isinstance(handler := signal.getsignal(number), _Ends):
                ends = handler
                signal.signal(number, note)
        try:
            result = runner.run(cancellable())
        except BaseException:  # including an error of the clean-up
            if not came:
                raise
    if came:
        signal.raise_signal(came[0])
    return result


@contextlib.contextmanager
def _woken_by_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Within: a signal also wakes up a loop that was just about to wait."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        loop.add_reader(reader, lambda: reader.recv(4096))
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(reader)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within: signals that end the run do nothing, since it is ending and cleaning up."""
    with same_handlers_after():
        for number in END_SIGNALS:
            signal.signal(number, lambda *_: None)
        yield


@contextlib.contextmanager
def same_handlers_after() -> Iterator[None]:
    """Restore the signal handlers afterwards; an event loop would leave the system's defaults."""
    before = {number: signal.getsignal(number) for number in (*END_SIGNALS, *COMMAND_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that Python has not set
                signal.signal(number, handler)
