"""Preemption after SIGTERM: all ranks save at the end of the same step, and end.

Batch systems and clouds send SIGTERM before they take a host away. Perhaps only the ranks of that
host get it, and not in the same step. So the ranks agree over the watcher's sockets, during
training: every rank stops at the end of its current step and sends its number to rank 0, which
chooses the step after the last of these. No rank can be beyond that one; all go on to its end. A
step without SIGTERM only reads two fields.

A rank that waits in a collective for a rank that has died ends at once: it will complete no step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import NoReturn

from hvkit import threads
from hvkit.errors import PREEMPTED
from hvkit.host.run_reports import listened_to, report
from hvkit.watch import calls

# Seconds for a rank to end by itself, with an error that gives the reason, after another has died.
_FAILS = 2.0
# Seconds to wait at the end of a step for an answer from rank 0.
_AGREES = 20.0
# A batch system, a launcher and `hvkit run` may each pass on the same SIGTERM. After so many
# seconds, another SIGTERM is not the same one.
_SAME = 2.0


class Preemption:
    """This rank's part in the end after SIGTERM."""

    def __init__(self) -> None:
        self.requested = False  # whether this rank got SIGTERM
        self.left = False  # whether it has saved after that, as all others have, and ends
        self._since = 0.0
        self._other_ended = False  # so that no step will be completed
        self._one_rank = True
        self._holds = False
        self._last: int | None = None
        self._step = 0
        self._wakes: int | None = None
        self._changed = threading.Condition()

    # Called by the script's thread.

    def handle_sigterm(self) -> None:
        """Handle SIGTERM from now on, unless the script does so itself; in the main thread only.

        A second SIGTERM ends the process at once, as without this.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, _on_sigterm)
        # Python's handlers wait while the main thread is inside C code. The descriptor does not.
        if self._wakes is None:
            reader, self._wakes = os.pipe()
            os.set_blocking(self._wakes, False)
            threads.start("hvkit-sigterm", self._await_sigterm, reader)
        self.take_signals()

    def take_signals(self) -> bool:
        """Let the thread see signals from now on; return whether it has seen them until now.

        An event loop of the script has precedence while it runs: it sets its own descriptor, and
        removes it at its end.
        """
        if self._wakes is None:
            return False
        other = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        if other not in (-1, self._wakes):
            signal.set_wakeup_fd(other)
        return other == self._wakes

    def stop_handling(self) -> None:
        """Let SIGTERM end the process again: there will be no further step."""
        if signal.getsignal(signal.SIGTERM) is _on_sigterm and not self.requested:
            if (other := signal.set_wakeup_fd(-1)) != self._wakes:
                signal.set_wakeup_fd(other)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def at_last_step(self) -> bool:
        """Whether to save and leave at the end of this step; the same on all ranks.

        Every rank calls this at the end of each step. It waits while the ranks agree on the step.
        """
        self._step += 1
        if self.requested and self._one_rank:
            return True
        if not self._holds:
            return False
        with self._changed:
            self._changed.wait_for(lambda: not self._holds or self._last is not None, _AGREES)
            return self._last is not None and self._step >= self._last

    def leave(self) -> NoReturn:
        """End this rank with status 143: its checkpoint is saved."""
        self.left = True
        report(left=True)
        raise SystemExit(PREEMPTED)

    # Called by the watcher's thread.

    def hold(self) -> int:
        """Wait at the end of the current step; return how many are completed."""
        with self._changed:
            self._holds = True
            return self._step

    def leave_at(self, step: int | None) -> None:
        """Leave at the end of this step; None for no agreement yet: go on."""
        with self._changed:
            self._last = step
            self._holds = step is not None
            self._changed.notify_all()

    def give_up(self) -> None:
        """A rank's host is lost, so no step will be completed: end if this rank got SIGTERM."""
        self.leave_at(None)
        if self.requested:
            self._end_if_waiting(0.0)

    def several_ranks(self) -> None:
        self._one_rank = False

    def other_ended(self) -> None:
        """Another rank has ended, and no step will be completed: end soon if this got SIGTERM."""
        self._other_ended = True
        if self.requested:
            self._end_if_waiting(_FAILS)

    def _end_if_waiting(self, seconds: float) -> None:
        """End this process after some seconds if it then still waits for other ranks."""

        def end() -> None:
            if not self.left and calls.status().waits:
                os._exit(1)

        threads.later(seconds, "hvkit-preemption", end)

    # Called in the main thread by SIGTERM, and by a thread that sees it sooner.

    def _await_sigterm(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            if signal.SIGTERM in numbers and self.take_sigterm():
                os._exit(128 + signal.SIGTERM)

    def take_sigterm(self) -> bool:
        """Note a SIGTERM; return whether it must end the process at once."""
        now = time.monotonic()
        if self.left:
            return False
        if self.requested:
            return now - self._since > _SAME
        if self._other_ended:
            return True
        self.requested, self._since = True, now
        report(terminated=True)
        if not listened_to():  # else `hvkit run` prints it, once for all ranks
            os.write(2, b"hvkit: SIGTERM: leaves as soon as all ranks have saved a checkpoint\n")
        return False


PREEMPTION = Preemption()
_process = os.getpid()


def _on_sigterm(number: int, _: FrameType | None) -> None:
    # The thread has counted it: Python's handler is late if the main thread was inside C code.
    if os.getpid() == _process and PREEMPTION.take_signals():
        return
    if os.getpid() != _process or PREEMPTION.take_sigterm():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _became_child() -> None:
    """In a child process, such as a worker of a data loader, let SIGTERM end it."""
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_became_child)


class StepAgreement:
    """Rank 0's part: collects the ranks' steps, and chooses the one to leave at."""

    PATIENCE = 3.0
    """Seconds for all ranks to answer."""

    def __init__(self, size: int) -> None:
        self.missing = {*range(size)}  # the ranks that have not answered
        self._steps: list[int] = []
        self._begun: float | None = None
        self._ended = False

    def begin(self) -> bool:
        """Request the steps from now on; False if that has begun before."""
        first = self._begun is None
        if first:
            self._begun = time.monotonic()
        return first

    def take(self, rank: int, step: int) -> None:
        self.missing.discard(rank)
        self._steps.append(step)

    def decided(self) -> bool:
        """Whether the result is known now; True once only."""
        if self._begun is None or self._ended:
            return False
        self._ended = not self.missing or time.monotonic() - self._begun > self.PATIENCE
        return self._ended

    @property
    def step(self) -> int | None:
        """The step to leave at; None if a rank has not answered."""
        return None if self.missing else max(self._steps) + 1
