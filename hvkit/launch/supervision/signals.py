"""Signals to ``hvkit run`` while it has no ranks: before the first start, and between two tries.

While ranks run, ``supervised_run`` handles signals in its event loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those that end the run, with an exit status of 128 plus the signal's number."""

COMMAND_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Those that go to the command of every rank."""


class EndedBySignal(SystemExit):
    """A signal ends the run; raised where the main thread is, so that it cleans up.

    A ``SystemExit``, which event loops pass on.

    Attributes:
        code: the exit status.
    """

    code: int


def ended_text(number: signal.Signals, saved: int | None) -> str:
    """What ``hvkit run`` prints after a signal that ends it.

    Args:
        number: the signal.
        saved: the step of the newest checkpoint; ``None`` if there is none.
    """
    newest = "" if saved is None else f"; newest checkpoint: step {saved}"
    return f"hvkit run: ended by {number.name}{newest}"


@contextlib.contextmanager
def end_on_signals(saved: Callable[[], int | None]) -> Iterator[None]:
    """Within: signals that end the run raise ``EndedBySignal``, those for ranks do nothing.

    Signals that this process was started to ignore stay ignored.

    Args:
        saved: returns the step of the newest checkpoint, for the message; ``None`` for none.
    """

    def end(number: int, _: FrameType | None) -> None:
        # Not print, which may be what the signal has interrupted.
        with contextlib.suppress(OSError):
            os.write(2, f"{ended_text(signal.Signals(number), saved())}\n".encode())
        raise EndedBySignal(128 + number)

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
    """Within: signals that end the run do nothing, as it ends already, and has to clean up."""
    with same_handlers_after():
        for number in END_SIGNALS:
            signal.signal(number, lambda *_: None)
        yield


@contextlib.contextmanager
def same_handlers_after() -> Iterator[None]:
    """Afterwards, signals do what they did before; an event loop leaves the system's defaults."""
    before = {number: signal.getsignal(number) for number in (*END_SIGNALS, *COMMAND_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that Python has not set
                signal.signal(number, handler)
