"""The agents' connections in ``hvkit run``: collects the ranks' output, reports and failures."""

import contextlib
import functools
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvkit import threads
from hvkit.connections import HEADER_BYTES, Connection, Listener, keep_alive, probe_interval
from hvkit.launching.supervision import protocol, run_status
from hvkit.launching.supervision.failures import Failure
from hvkit.launching.supervision.protocol import LONGEST_FRAME, Frame, SealedFile, sealed
from hvkit.launching.supervision.rank_output import RankOutput, Style
from hvkit.launching.supervision.run_status import RunStatus
from hvkit.launching.supervision.screen import Screen
from hvkit.launching.supervision.timeline import HostClock
from hvkit.log import logger

# Probes without an answer after which a host may be lost.
_DOUBTFUL_PROBES = 2.5
# Seconds between two comparisons of clocks.
_BETWEEN_CLOCKS = 2.0
# Seconds since 1970; no clock shows more.
_LATEST = 1e12
# What an agent may send only so far ahead.
_COUNTED = (Frame.STDOUT, Frame.STDERR, Frame.SPANS, Frame.OUTCOME, Frame.SEAL)


@dataclass
class _Rank:
    number: int
    host: str
    output: RankOutput
    connection: Connection
    connected: bool = True
    stopped: bool = False
    refused: bool = False
    starting: bool | None = None
    status: int | None = None
    failed: bool = False
    clock: HostClock = field(default_factory=HostClock)
    reports: run_status.RankReports = field(default_factory=run_status.RankReports)
    speed: float | None = None
    outcome: SealedFile | None = None

    @property
    def ended(self) -> bool:
        return self.status is not None

    def send(self, frame: Frame, number: int) -> None:
        with contextlib.suppress(OSError):  # what receives notices that, too
            self.connection.send(frame, protocol.packed(number))


@dataclass
class RunReports:
    """What the ranks of this try have reported about the run."""

    step: int = 0  # the last that a rank has begun
    saved: int | None = None  # the step of the newest checkpoint that was saved or resumed
    # The step at which the ranks have resumed, 0 for the beginning; None if they have not looked.
    resumed: int | None = None
    replicas: bool = False  # hosts hold checkpoints in memory
    cause: str = ""  # why the ranks have ended the run together
    terminated: dict[int, str] = field(default_factory=dict)  # that got SIGTERM, with their hosts
    left: set[int] = field(default_factory=set)  # that have saved after SIGTERM, and ended


@dataclass
class Supervisor:
    """Listens to the agents of one run, to each in a thread of its own.

    A slow terminal blocks only the ranks that print. Threads are daemons, so a write that blocks
    forever does not keep this process alive.
    """

    size: int
    key: bytes
    style: Style
    lost_after: float | None  # seconds without an acknowledgement; None for never
    changed: Callable[[], None]  # called in the thread that has noticed something new
    status: RunStatus = field(default_factory=RunStatus)  # over all tries
    call: Path | None = None  # the folder of the function that ranks run
    ranks: dict[int, _Rank] = field(default_factory=dict)  # that have connected so far
    failures: list[Failure] = field(default_factory=list)  # as they became known
    reports: RunReports = field(default_factory=RunReports)
    problem: OSError | None = None  # why something cannot be written; nothing more is written
    screen: Screen = field(default_factory=Screen)
    # The last request to end, and its number: for agents that connect after it, too.
    _ending: tuple[Frame, int] | None = None
    _interrupted: bool = False
    # Guards what follows from reports and ends of ranks.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    # Held while something is written.
    _writing: threading.RLock = field(default_factory=threading.RLock)
    _ends: threading.Event = field(default_factory=threading.Event)

    def listen(self, address: str | None) -> int:
        """Listen on an address, ``None`` for all, and return the port."""
        self._listener = Listener(address, self.key)
        # Accepted sockets inherit the size.
        size = protocol.RECEIVE_BUFFER
        self._listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        threads.start("hvkit-listener", self._listener.serve, self._serve)
        threads.start("hvkit-unfinished-lines", self._show_unfinished_lines)
        if self.status.timeline is not None:
            threads.start("hvkit-clocks", self._ask_for_clocks)
        return self._listener.port

    def write(self, work: Callable[..., object], *given: object) -> None:
        """Call what writes, after all that is written before it."""
        with self._writing:
            try:
                if self.problem is None:
                    work(*given)
            except OSError as problem:
                self._cannot_write(problem)

    @property
    def all_ended(self) -> bool:
        """Whether the exit status of every rank is known."""
        return sum(rank.ended for rank in list(self.ranks.values())) == self.size

    @property
    def host_lost(self) -> bool:
        return any(failure.lost for failure in self.failures)

    @property
    def failed(self) -> bool:
        """Whether a rank has failed, or something cannot be written."""
        return bool(self.failures) or self.problem is not None

    @property
    def in_doubt(self) -> bool:
        """Whether a host has been silent for so long that it may be lost."""
        if self.lost_after is None:
            return False
        doubt = _DOUBTFUL_PROBES * probe_interval(self.lost_after)
        return any(rank.connection.silent_for() > doubt for rank in self._connected())

    def all_gone(self) -> bool:
        return not self._connected()

    def state(self) -> dict[str, Any]:
        """The ranks, their number and the newest checkpoint, for the ``RunState``.

        ``saved`` is there only if the ranks have saved or resumed a checkpoint since they were
        started.
        """
        with self._lock:
            running = self._connected()
            reports = run_status.at_one_moment([each.reports for each in running], time.time())
            shown = {rank.number: each for rank, each in zip(running, reports, strict=True)}
            ranks: list[run_status.RankState] = [
                {
                    "rank": number,
                    "host": rank.host,
                    "ended": not rank.connected,
                    "speed": rank.speed,
                    **shown.get(number, rank.reports.newest),
                }
                for number, rank in sorted(self.ranks.items())
            ]
        saved = self.reports.saved
        return {"size": self.size, "ranks": ranks} | ({} if saved is None else {"saved": saved})

    def stop(self, grace: float) -> None:
        """Have all agents end their commands, by force after ``grace`` seconds."""
        self._ending = Frame.STOP, round(grace * 1000)
        self.send_all(*self._ending)

    def interrupt(self) -> None:
        self._ending, self._interrupted = (Frame.INTERRUPT, 0), True
        for rank in list(self.ranks.values()):
            rank.output.interrupted = True
        self.send_all(*self._ending)

    def close(self, hidden: Collection[int] = ()) -> None:
        """Admit no more agents, show the rest of the output, and close the log files.

        Tracebacks of the ranks in ``hidden`` are dropped if they were not shown yet.
        """
        self._ends.set()
        self._listener.close()
        for rank in list(self.ranks.values()):
            self.write(functools.partial(rank.output.close, drop=rank.number in hidden))

    def hang_up(self) -> None:
        for rank in self._connected():
            rank.connection.hang_up()

    def _connected(self) -> list[_Rank]:
        return [rank for _, rank in sorted(self.ranks.items()) if rank.connected]

    def _show_unfinished_lines(self) -> None:
        def flush() -> None:
            for rank in list(self.ranks.values()):
                rank.output.flush(failed=rank.failed)

        while not self._ends.wait(1):
            self.write(flush)

    def _ask_for_clocks(self) -> None:
        """Compare the clocks of all hosts with this one's every few seconds."""
        while not self._ends.wait(_BETWEEN_CLOCKS if len(self.ranks) == self.size else 0.2):
            for rank in self._connected():
                rank.send(Frame.ASK, rank.clock.ask(time.monotonic()))

    def _cannot_write(self, problem: OSError) -> None:
        self.problem = self.problem or problem
        self.changed()

    def send_all(self, frame: Frame, number: int) -> None:
        """Send all agents a frame with a number, such as a signal's."""
        for rank in self._connected():
            rank.send(frame, number)

    def _serve(self, connected: socket.socket) -> None:
        """Register an agent and handle what it sends until its rank has ended, or it is lost."""
        connection = Connection(connected, LONGEST_FRAME)
        rank = None
        try:
            keep_alive(connected, self.lost_after)
            rank = self._register(connection)
            if rank is not None:
                self._follow(rank)
        except (OSError, ValueError) as problem:
            if rank is not None and not rank.ended and not self._ends.is_set():
                self._lose(rank, problem.__cause__ or problem)
        finally:
            if rank is not None:
                rank.connected = False
                self.changed()
            connection.close()

    def _lose(self, rank: _Rank, problem: BaseException) -> None:
        """Count a rank as failed whose connection has ended before it."""
        with self._lock:
            if isinstance(problem, ConnectionResetError | BrokenPipeError | ValueError):
                self._fail(rank, None)
            else:  # The kernel got no answer for too long.
                self._fail(rank, None, lost=True, at=time.monotonic() - (self.lost_after or 0.0))

    def _register(self, connection: Connection) -> _Rank | None:
        """Read the agent's HELLO; ``None`` if that is invalid, or its log file cannot be opened."""
        frame, payload = connection.receive()
        if frame != Frame.HELLO:
            return None
        number, host, wants_call = protocol.fields(payload, rank=int, host=str, call=bool)
        with self._lock:
            unknown = number not in self.ranks and number in range(self.size)
            if not unknown or host is None or self._ends.is_set():
                return None
            try:
                show = functools.partial(self.screen.show, writer=number)
                output = RankOutput(number, host, self.style, show)
            except OSError as problem:
                self._cannot_write(problem)
                return None
            rank = self.ranks[number] = _Rank(number, host, output, connection)
        if self._ending is not None:
            output.interrupted = self._interrupted
            rank.send(*self._ending)
        elif wants_call and self.call is not None:
            path = protocol.outcome_in(self.call, number)
            rank.outcome = SealedFile(path, self.key, Frame.OUTCOME)
            for frame, piece in sealed(protocol.call_in(self.call), self.key, Frame.CALL):
                connection.send(frame, piece)
        return rank

    def _follow(self, rank: _Rank) -> None:
        while not rank.ended:
            number, payload = rank.connection.receive()
            frame = Frame(number)
            if frame in (Frame.STDOUT, Frame.STDERR):
                self.write(rank.output.write, frame, bytes(payload))
            elif frame in (Frame.OUTCOME, Frame.SEAL):
                if rank.outcome is None:
                    raise ValueError("an outcome that was not asked for")
                self.write(rank.outcome.take, frame, payload)
            elif frame is Frame.SPANS and (timeline := self.status.timeline) is not None:
                # Ranks of this host have its clock.
                here = rank.host == socket.gethostname()
                ahead = 0.0 if here else rank.clock.ahead
                self.write(timeline.take, rank.number, rank.host, ahead, bytes(payload))
            else:
                with self._lock:
                    self._take(rank, frame, payload)
            if frame in _COUNTED:
                rank.send(Frame.TAKEN, HEADER_BYTES + len(payload))

    def _take(self, rank: _Rank, frame: Frame, payload: bytearray) -> None:
        if frame is Frame.REPORT:
            self._take_report(rank, bytes(payload))
        elif frame is Frame.CLOCK:
            number, clock = protocol.fields(payload, number=int, now=float)
            if number is not None and clock is not None and math.isfinite(clock):
                rank.clock.answered(number, clock, time.monotonic())
        elif frame is Frame.STOPPED:
            rank.stopped = True
        elif frame is Frame.ENDED:
            status, problem, stopped, ago = protocol.fields(
                payload, status=int, problem=str, stopped=bool, ago=float
            )
            rank.status = 1 if status is None else status
            if status != 0:
                rank.stopped = stopped or False
                self._fail(rank, status, problem, at=time.monotonic() - (ago or 0.0))
            self._fail_if_missed()
            self.changed()

    def _take_report(self, rank: _Rank, line: bytes) -> None:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):  # the script has written to hvkit's pipe
            self._warn("a rank's report is no JSON: %r", line[:80])
            return
        run = self.reports
        match values:
            case {"saved": int(step)} if step >= 0:
                run.saved = max(step, run.saved or 0)
                self.status.saved_in[str(values.get("directory"))] = step
            case {"resumes": int() | None as step, "directory": str(directory)}:
                run.resumed = max(step or 0, run.resumed or 0)
                saved = self.status.saved_in.get(directory)
                if saved is not None and (step is None or step < saved):
                    self._warn(
                        "the ranks go on from %s, although step %d was saved: no host that has "
                        "ranks now has that checkpoint, complete, on disk or in memory",
                        *("the beginning" if step is None else f"step {step}", saved),
                    )
            case {"starting": bool(starting)}:
                rank.starting = starting
                self._fail_if_missed()
            case {"refused": True}:
                rank.refused = True
            case {"replica": True}:
                run.replicas = True
            case {"cause": str(text)}:
                run.cause = run.cause or text  # others follow from the first
            case {"terminated": True} if not run.left:  # later ones come from the launcher
                if not (run.terminated or self.failures or self._ending):
                    who = f"rank {rank.number} on {rank.host} got SIGTERM"
                    self._warn("%s: all ranks leave as soon as they have saved a checkpoint", who)
                run.terminated[rank.number] = rank.host
            case {"left": True}:
                run.left.add(rank.number)
            case {
                "now": {
                    "call": str(call),
                    "waits": int() | float() as waits,
                    "where": str(where),
                    "step": int(step),
                    "made": int() | float() as made,
                }
            } if abs(made) < _LATEST:
                arrived, before = time.monotonic(), rank.reports.newest
                moved = before["moved"] if before.get("step") == step else arrived
                run.step = max(step, run.step)
                report: run_status.RankReport
                report = {"call": call, "waits": waits, "where": where, "step": step}
                report["moved"] = moved
                rank.reports.take(report, made, time.time(), arrived)
            case {"speed": int(speed) | float(speed)}:
                rank.speed = speed

    def _fail_if_missed(self) -> None:
        """Count ranks as failed that have ended without Horovod, if others wait for its start."""
        if not any(rank.starting and not rank.ended for rank in self.ranks.values()):
            return
        for rank in self.ranks.values():
            if rank.status == 0 and rank.starting is None and not rank.failed:
                problem = (
                    "ended with exit status 0 and did not start Horovod, for which the other "
                    "ranks wait: call hvkit on every rank"
                )
                self._fail(rank, None, problem)

    def _fail(
        self,
        rank: _Rank,
        status: int | None,
        problem: str | None = None,
        *,
        at: float | None = None,
        lost: bool = False,
    ) -> None:
        rank.failed = True
        self.failures.append(
            Failure(
                rank=rank.number,
                host=rank.host,
                status=status,
                at=time.monotonic() if at is None else at,
                problem=problem,
                last_lines=tuple(rank.output.last_lines()),
                all_last_lines=tuple(rank.output.all_last_lines()),
                traceback=tuple(rank.output.last_traceback()),
                refused=rank.refused,
                stopped=rank.stopped or self._ending is not None,
                lost=lost,
            )
        )
        self.changed()

    def _warn(self, text: str, *values: object) -> None:
        self.screen.end_line()
        logger.warning(text, *values)
