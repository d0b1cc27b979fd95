"""The thread on each rank that reports long waits; on rank 0 it collects and judges them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

from hvkit import threads
from hvkit.host.run_reports import report
from hvkit.log import shortened
from hvkit.watch import calls, channel
from hvkit.watch.calls import Status, report_now
from hvkit.watch.diagnosis import LIMIT_SET_BY, About, Diagnosis, Limits, diagnose
from hvkit.watch.preemption import PREEMPTION, StepAgreement
from hvkit.watch.rank_errors import SAME_CALLS, SAME_STEPS
from hvkit.watch.script_lines import inside, line_of_script, stack_of_script

# All in seconds.
# Between two checks of this rank's status.
_TICK = 1.0
# A rank that has waited this long reports to rank 0.
_WORTH_REPORTING = 2.0
# A report is valid for this long.
_FRESH = 3.0
# A rank that has not answered for this long counts as unreachable.
_NO_ANSWER = 10.0
# After a diagnosis, ranks have this long to end by themselves.
_GRACE = 30.0
_GRACE_FOR_STOPPED = 3.0
# Characters of a diagnosis that `hvkit run` repeats at its end.
_CAUSE = 500
# Within this time after a rank got SIGTERM, rank 0 requests the steps of all ranks.
_HOLDS_WITHIN = 5.0
# An error of Horovod waits this long for its explanation.
_EXPLAINED_WITHIN = 5.0

END_OF_SCRIPT = "has ended its script"


class _Explanation(NamedTuple):
    """Why the run ends."""

    text: str
    shown_by: int  # the rank that prints it
    diagnosis: bool  # of rank 0; else how another rank ended


class Watcher:
    """One rank's part in watching the run."""

    def __init__(self, rank: int, limits: Limits, shut_down: Callable[[], None]) -> None:
        self.rank = rank
        self._limits = limits
        self._shut_down = shut_down
        self._explained = threading.Event()  # that this run ends
        self._explanation: _Explanation | None = None  # the first
        self._printed = False
        self._stopped = threading.Event()
        self._peers: dict[int, Connection] = {}
        self._ended: dict[int, str] = {}
        self._own_end = END_OF_SCRIPT
        self._fails = False
        self._process = os.getpid()
        self._reading_stacks = threading.Lock()

    # Called by the script's thread.

    def reason(self) -> str:
        """Why this rank's current wait ended; empty if none comes within some seconds."""
        self._explained.wait(_EXPLAINED_WITHIN)
        why = self._explanation
        if why is None or why.diagnosis:
            return why.text if why else ""
        call, line = calls.current_call() or "a collective", line_of_script()
        here = f"rank {self.rank} waits in {call}{f' ({line})' if line else ''}"
        hint = f": {SAME_CALLS}, and {SAME_STEPS}" if END_OF_SCRIPT in why.text else ""
        return f"{here}; {why.text}{hint}"

    def shown_by(self) -> int | None:
        """The rank that prints the reason; None if this one must."""
        if self._printed:
            return self.rank
        why = self._explanation
        return why.shown_by if why and why.shown_by != self.rank else None

    def run_ends(self) -> bool:
        return self._explained.is_set()

    def failed(self, how: str, *, ends: bool) -> None:
        """Record that this rank has an error; if it ends now, also report to ``hvkit run``."""
        self._own_end = how
        if ends:
            self._fails = True
            report_now(self._status())
            _report_cause(f"rank {self.rank} {how}")

    def thread_failed(self, how: str) -> None:
        """Report to the others that an error in a thread of hvkit's ends this process now."""
        self._own_end = how
        _report_cause(f"rank {self.rank} {how}")
        self._send_to_all(channel.RankEnded(self.rank, how))

    def _send_to_all(self, message: channel.Message) -> None:
        """To rank 0, or from rank 0 to the others."""
        for peer in list(self._peers.values()):
            _send(peer, message)

    def stop(self) -> None:
        """Report this rank's end to the others, before Horovod shuts down."""
        if os.getpid() != self._process:
            return
        self._stopped.set()
        self._send_to_all(channel.RankEnded(self.rank, self._own_end))
        with self._reading_stacks:  # wait: stacks must not be read while the interpreter ends
            pass

    # Called by the watcher's thread.

    def _run(self, watch: Callable[..., None], *given: object) -> None:
        watch(*given)
        self._end_after_error()

    def _explain(self, text: str, shown_by: int, *, diagnosis: bool) -> None:
        if self._explanation is None:
            self._explanation = _Explanation(text, shown_by, diagnosis)
            self._explained.set()
            PREEMPTION.other_ended()

    def _status(self, *, with_stack: bool = False) -> Status:
        """This rank's status; ``with_stack`` adds the main thread's stack unless the rank waits."""
        with self._reading_stacks:
            if self._stopped.is_set():
                return Status()
            now = calls.status()
            if with_stack and not now.waits:
                return replace(now, stack=stack_of_script())
            return now

    def _must_end(self, seconds: float) -> None:
        """End this process after some seconds if Horovod does not end its current wait."""
        serial = self._status().serial

        def end() -> None:
            now = self._status()
            if now.waits and now.serial == serial:
                text = f"rank {self.rank} still waits in {now.call} ({now.where})"
                _print(f"{text}, {seconds:.0f} s after it should have ended: ended by force")
                os._exit(1)

        threads.later(seconds, "hvkit-watch-limit", end)

    def _end_after_error(self) -> None:
        """End this process if Horovod's shutdown waits for a rank that does not answer.

        Done in this thread, since none can be started while the interpreter ends.
        """
        self._stopped.wait()
        while self._fails:
            time.sleep(min(_GRACE, self._limits.end))
            if inside("horovod"):  # and not in an exit function of the script's own
                text = f"rank {self.rank} {self._own_end}, and Horovod does not end"
                _print(f"{text}: ended by force")
                os._exit(1)

    def _learn_of_end(self, rank: int, how: str, shown_by: int) -> None:
        """Another rank has ended, and Horovod will end with it."""
        self._ended[rank] = how
        report_now(self._status())
        _report_cause(f"rank {rank} {how}")
        self._explain(f"rank {rank} {how}", shown_by, diagnosis=False)


class Reporter(Watcher):
    """Any rank but 0: reports to rank 0 and follows its diagnosis."""

    def __init__(self, rank: int, limits: Limits, shut_down: Callable[[], None]) -> None:
        super().__init__(rank, limits, shut_down)
        self._tried = threading.Event()
        self._agreeing = False

    def stop(self) -> None:
        """As for any rank; one that ends at once must first reach rank 0 to report it."""
        self._tried.wait(channel.PATIENCE)
        super().stop()

    def start(self, endpoint: channel.Endpoint) -> None:
        threads.start("hvkit-watch", self._run, self._watch, endpoint)

    def _watch(self, endpoint: channel.Endpoint) -> None:
        hub = channel.connect(endpoint, self.rank)
        if hub is not None:
            self._peers[0] = hub
        self._tried.set()
        if hub is None:
            self._watch_without_rank_0(endpoint.addresses)
            return
        reported, sent_at = -1.0, 0.0  # the begin of the last reported wait; GotSigterm
        while not self._stopped.is_set():
            try:
                if hub.poll(_TICK):
                    self._take(hub, channel.receive_message(hub))
            except (OSError, EOFError, ValueError):
                if not self._stopped.is_set():  # else it ended because this rank did
                    self._learn_of_end(0, "died without reporting an error", shown_by=1)
                return
            if PREEMPTION.requested and not sent_at:
                sent_at = time.monotonic()
                _send(hub, channel.GotSigterm())
            late = sent_at and not self._agreeing and time.monotonic() - sent_at > _HOLDS_WITHIN
            if late and not channel.is_acknowledged(hub):
                PREEMPTION.give_up()  # rank 0 is not just busy
            now = self._status()
            if now.waits and now.seconds >= self._limits.end + _NO_ANSWER:
                # Rank 0, which should end this wait, is stopped, or its host is lost.
                limit = f"the limit is {self._limits.end:g} s ({LIMIT_SET_BY})"
                _print(f"RankLostError: {self._waits(now)}; rank 0 does not answer; {limit}")
                os._exit(1)
            began = time.monotonic() - now.seconds
            if now.waits and now.seconds >= _WORTH_REPORTING and began > reported + 0.1:
                reported = began
                _send(hub, now)

    def _watch_without_rank_0(self, addresses: Sequence[str]) -> None:
        """Without a connection to rank 0, print a long wait of this rank."""
        why = f"it cannot reach rank 0 at {' or '.join(addresses)} to find the reason"
        while not self._stopped.wait(_TICK):
            now = self._status()
            if now.waits and now.seconds >= self._limits.report:
                _print(f"{self._waits(now)}; {why}")
                return

    def _waits(self, now: Status) -> str:
        return f"rank {self.rank} waits in {now.call} ({now.where}) for {now.seconds:.0f} s"

    def _take(self, hub: Connection, message: channel.Message) -> None:
        match message:
            case channel.EndRun(diagnosis, within):
                self._explain(diagnosis, 0, diagnosis=True)
                self._must_end(within)
            case channel.RankEnded(rank, how, shown_by):
                self._learn_of_end(rank, how, shown_by)
            case channel.HoldStep():
                self._agreeing = True
                _send(hub, channel.StepHeld(PREEMPTION.hold()))
            case channel.LeaveAt(step):
                PREEMPTION.leave_at(step)
            case channel.HostLost():
                PREEMPTION.give_up()
            case channel.StatusRequest():
                _send(hub, self._status(with_stack=True))


class Hub(Watcher):
    """Rank 0: collects all ranks' reports, judges them, and ends the run."""

    def __init__(
        self, size: int, limits: Limits, shut_down: Callable[[], None], *, one_host: bool
    ) -> None:
        super().__init__(0, limits, shut_down)
        self._size = size
        self._listener = channel.RankListener(one_host=one_host)
        self.endpoint = self._listener.endpoint
        # A message wakes the watcher's thread for a new connection, whose rank may end at once.
        self._wakes, self._wake = Pipe(duplex=False)
        self._connected: set[int] = set()
        self._statuses: dict[int, Status] = {}
        self._answered: dict[int, float] = {}
        self._asked: dict[int, float] = {}
        self._reported: set[About] = set()
        self._next_look = 0.0
        self._over = threading.Event()
        self._agreement = StepAgreement(size)
        self._somebody_leaves = False

    def start(self) -> None:
        threads.start("hvkit-watch-listener", self._listener.serve, self._admit)
        threads.start("hvkit-watch", self._run, self._watch)

    def stop(self) -> None:
        """As for any rank; waits for a shutdown in progress."""
        self._listener.close()
        super().stop()
        if self._explanation and self._explanation.diagnosis:
            self._over.wait(_GRACE)

    def _admit(self, rank: int, connection: Connection) -> None:
        self._peers[rank] = connection
        self._wake.send_bytes(b"new")
        self._connected.add(rank)
        if len(self._connected) == self._size - 1:
            self._listener.close()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._read_messages()
            self._agree_on_last_step()
            if not self._explained.is_set() or self._ended:
                self._diagnose()

    def _read_messages(self) -> None:
        # A copy, since the listener's threads may admit further ones.
        peers = list(self._peers.items())
        ready: set[Any] = {*wait([self._wakes, *(each for _, each in peers)], timeout=_TICK)}
        if self._wakes in ready:
            self._wakes.recv_bytes()
        for rank, connection in peers:
            if connection not in ready:
                continue
            try:
                message = channel.receive_message(connection)
            except (OSError, EOFError, ValueError):
                self._end_of(rank, "died without reporting an error")
                continue
            match message:
                case channel.RankEnded(how=how):
                    self._end_of(rank, how)
                case channel.GotSigterm():
                    self._somebody_leaves = True
                case channel.StepHeld(step):
                    self._agreement.take(rank, step)
                case Status():
                    self._statuses[rank] = message
                    self._answered[rank] = time.monotonic()
                    self._asked.pop(rank, None)

    def _agree_on_last_step(self) -> None:
        """If a rank got SIGTERM, choose the step at whose end all leave.

        If a rank answers too late, because it holds the interpreter's lock for long, try again.
        """
        wanted = self._somebody_leaves or PREEMPTION.requested
        all_here = len(self._peers) == self._size - 1
        if wanted and all_here and not self._explained.is_set() and self._agreement.begin():
            self._agreement.take(0, PREEMPTION.hold())
            self._send_to_all(channel.HoldStep())
        if self._agreement.decided():
            step, missing = self._agreement.step, self._agreement.missing & self._peers.keys()
            if any(not channel.is_acknowledged(self._peers[rank]) for rank in missing):
                PREEMPTION.give_up()
                self._send_to_all(channel.HostLost())
                return
            PREEMPTION.leave_at(step)
            self._send_to_all(channel.LeaveAt(step))
            if step is None:
                self._agreement = StepAgreement(self._size)

    def _end_of(self, rank: int, how: str) -> None:
        """Handle the end of a rank; after the first one, Horovod ends on all others."""
        del self._peers[rank]
        self._statuses.pop(rank, None)
        if self._stopped.is_set():  # it ended because this rank did
            return
        first = not self._ended
        self._learn_of_end(rank, how, shown_by=0)
        if first:
            self._send_to_all(channel.RankEnded(rank, how, shown_by=0))

    def _diagnose(self) -> None:
        """If a rank waits, collect all ranks' statuses, and act on the diagnosis."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _TICK
        here = self._status()
        longest = max((s.seconds for s in (here, *self._statuses.values()) if s.waits), default=0.0)
        if longest < _WORTH_REPORTING:
            return
        for rank, peer in list(self._peers.items()):
            if rank not in self._asked:
                self._asked[rank] = now
                _send(peer, channel.StatusRequest())
        statuses = {0: self._status(with_stack=True)}
        for rank in range(1, self._size):
            if rank in self._ended:
                continue
            silent = now - self._asked.get(rank, now - _NO_ANSWER)
            fresh = now - self._answered.get(rank, 0.0) < _FRESH
            if not fresh and silent < _NO_ANSWER:
                return  # wait for its answer
            statuses[rank] = self._statuses[rank] if fresh else Status()
        limits = self._limits
        diagnosis = diagnose(statuses, self._ended, limits.report, limits.end, self._reported)
        if diagnosis is not None:
            self._act_on(diagnosis)

    def _act_on(self, diagnosis: Diagnosis) -> None:
        if not diagnosis.ends:
            if diagnosis.about not in self._reported:
                self._reported.add(diagnosis.about)
                _print(diagnosis.text)
            return
        _print(f"RankLostError: {diagnosis.text}")
        _report_cause(diagnosis.text.split("\n")[0])
        self._printed = True
        seconds = _GRACE if diagnosis.answered else _GRACE_FOR_STOPPED
        self._send_to_all(channel.EndRun(diagnosis.text, seconds))
        self._explain(diagnosis.text, 0, diagnosis=True)
        self._must_end(seconds)
        self._stopped.wait(_TICK)  # so that the others read it before their waits end
        self._shut_down()
        self._over.set()


def _print(text: str) -> None:
    """Print a line at once and as a whole, also while the script's thread prints."""
    os.write(2, f"hvkit: {text}\n".encode())


def _report_cause(text: str) -> None:
    report(cause=shortened(text, _CAUSE))


def _send(connection: Connection, message: channel.Message) -> None:
    # If the other end has gone, whoever reads from the connection notices that.
    with contextlib.suppress(OSError, ValueError):
        channel.send_message(connection, message)
