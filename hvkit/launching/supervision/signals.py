"""Signals to ``hvkit run`` while it has no ranks: before the first start, and between two tries.

While ranks run, ``supervised_run`` handles signals itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

# Those that end the run, with an exit status of 128 plus the signal's number.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

COMMAND_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # those that go to the command of every rank


# A batch system and a launcher may both pass on the same signal. After so many seconds, another
# signal is not the same one.
_SAME = 2.0


class EndedBySignal(SystemExit):
    """A signal ends the run; raised in the main thread, wherever it is, so that it cleans up."""

    code: int


def ended_text(number: signal.Signals, saved: int | None, *, resumes: bool = True) -> str:
    """The line that ``hvkit run`` prints after a signal that ends it."""
    text = f"hvkit run: ended by {number.name}"
    if saved is None:
        return text
    again = "the same command resumes" if resumes else "resume it with Checkpoint.restore()"
    return f"{text}; step {saved} is saved; {again}"


@contextlib.contextmanager
def end_on_signals(saved: Callable[[], int | None]) -> Iterator[None]:
    """Within: signals that end the run raise ``EndedBySignal``, those for ranks do nothing.

    A further signal that comes while the first one's exception cleans up ends this process at once.
    Signals that this process was started to ignore stay ignored.
    """
    first: float | None = None

    def end(number: int, _: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            # Not print: the signal may have interrupted one.
            with contextlib.suppress(OSError):
                os.write(2, f"{ended_text(signal.Signals(number), saved())}\n".encode())
            raise EndedBySignal(128 + number)
        if time.monotonic() - first > _SAME:
            os._exit(128 + number)

    with same_handlers_after():
        for number in END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, end)
        for number in COMMAND_SIGNALS:
            # A function, as commands would inherit SIG_IGN.
            signal.signal(number, lambda *_: None)
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within: signals that end the run do nothing, since it is ending and cleaning up."""
    with same_handlers_after():
        for number in END_SIGNALS:
            signal.signal(number, lambda *_: None)
        yield


@contextlib.contextmanager
def same_handlers_after() -> Iterator[None]:
    """Restore the signal handlers afterwards."""
    before = {number: signal.getsignal(number) for number in (*END_SIGNALS, *COMMAND_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that Python has not set
                signal.signal(number, handler)
