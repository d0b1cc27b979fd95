"""Runs a launcher, watches its ranks, and ends everything on all hosts after a failure."""

import contextlib
import json
import math
import queue
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hvkit import threads
from hvkit.errors import PREEMPTED, ranks_text
from hvkit.launching.supervision import processes, protocol
from hvkit.launching.supervision.failures import (
    Failure,
    first_failure,
    hidden_tracebacks,
    in_one_line,
    report,
)
from hvkit.launching.supervision.protocol import AgentSettings, Frame
from hvkit.launching.supervision.rank_output import Style
from hvkit.launching.supervision.run_status import RunStatus
from hvkit.launching.supervision.screen import LauncherOutput
from hvkit.launching.supervision.supervisor import Supervisor
from hvkit.launching.supervision.tracebacks import Raised

# All in seconds.
# For other ranks to fail by themselves after the first, with errors that help to find the cause.
_OTHERS_FAIL = 2.0
# For other lost hosts to be noticed: of those lost together, within one probe interval.
_OTHERS_LOST = 1.2
# For agents to end, in addition to the grace of their commands; shorter when a host is lost, since
# its agents will not answer at all.
_AGENTS_END = 3.0
_AGENTS_END_BUT_LOST = 1.0
# For the launcher to end by itself after its ranks, and for agents after their launcher.
_LAUNCHER_ENDS = 1.5
# For the launcher's last output to arrive after its end.
_LAUNCHER_PRINTS = 0.3
# A try that ends within this time, and without a step that hvkit counts, has not begun to train.
# Ranks that train without hvkit report no steps.
_BEGINS = 600.0
# For a launcher to notice that all ranks have ended well.
_LAUNCHER_NOTICES = 5.0


@dataclass(frozen=True)
class SupervisedRun:
    """A launcher's command line, and how to watch its ranks."""

    command: Sequence[str]
    environ: Mapping[str, str]  # of the launcher
    launcher: str  # its name in messages
    size: int
    agents: AgentSettings  # ``host`` and ``port`` are set when the supervisor listens
    hosts: Sequence[str] = ()  # by rank, the name of its host in the hostfile or list
    style: Style = field(default_factory=Style)
    status: RunStatus = field(default_factory=RunStatus)  # over all tries


@dataclass(frozen=True)
class Outcome:
    """How a run has ended."""

    status: int  # the exit status of the rank that failed first, or 0
    reason: str = ""  # in one line; empty if all ranks ended well
    # Not after a signal to this process, nor if the command does not exist or output cannot be
    # written: another try would not succeed.
    restartable: bool = False
    preempted: bool = False  # the ranks have left after SIGTERM, with a checkpoint
    terminated: frozenset[int] = frozenset()  # the ranks that got that SIGTERM
    saved: int | None = None  # the step of the newest checkpoint that was saved or resumed
    replicas: bool = False  # hosts hold copies of it in memory
    raised: Raised | None = None  # the exception that ended it before any step
    rank: int | None = None  # that failed first
    size: int = 0  # the number of ranks; 0 if none were started


def supervise(run: SupervisedRun) -> Outcome:
    """Start the ranks, and supervise them to their end.

    SIGINT, SIGTERM and SIGHUP end the run, with exit status 128 plus the signal's number. After
    SIGINT, ranks get SIGINT, SIGTERM and SIGKILL, each ``grace`` seconds after the one before;
    after the others, SIGTERM and SIGKILL. A further signal has the next of these sent at once.
    SIGUSR1 and SIGUSR2 go to the command of every rank.
    """
    processes.adopt_orphans()
    supervision = _Supervision(run)
    with processes.same_handlers_after():
        outcome = supervision.supervise()
    # A signal may have come after the outcome was known.
    return replace(outcome, restartable=outcome.restartable and not supervision.signalled_late)


class _Supervision:
    launcher: "subprocess.Popen[bytes]"

    def __init__(self, run: SupervisedRun) -> None:
        self.run = run
        self.key = secrets.token_bytes(32)
        # Wakes up the main thread.
        self.news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.next_second = 0.0
        self.ended_by: signal.Signals | None = None
        self.signalled_again = False
        self.stopping = False
        # Whether a signal came while the ranks of a failed run were being ended.
        self.signalled_late = False
        call = None if run.agents.call is None else Path(run.agents.call)
        if call is not None:
            protocol.remove_outcomes(call)
        given = run.size, self.key, run.style, run.agents.lost_after, self.wake
        self.supervisor = Supervisor(*given, status=run.status, call=call)
        self.reports, self.screen = self.supervisor.reports, self.supervisor.screen
        self.launcher_output = LauncherOutput(
            self.supervisor.write, self.screen.show, lambda: self.ends, run.style.log_dir
        )
        self.begun = time.monotonic()

    def wake(self, _: object = None) -> None:
        self.news.put(None)

    def supervise(self) -> Outcome:
        addresses = self.run.agents.addresses
        port = self.supervisor.listen(addresses[0] if len(addresses) == 1 else None)
        for number in processes.END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.on_end_signal)
        for number in processes.COMMAND_SIGNALS:
            signal.signal(number, lambda number, _: self.supervisor.send_all(Frame.SIGNAL, number))
        self.start(port)
        status: int | None = None
        try:
            self.wait()
            status = self.launcher.returncode
            self.end()
        finally:
            self.show_now()
            threads.start("hvkit-close", self.close, status).join(0.5 if self.hurried else None)
            self.supervisor.hang_up()
        self.screen.end_line()
        return self.conclude(status)

    def outcome(self, status: int, reason: str = "", **more: Any) -> Outcome:
        saved, replicas = self.reports.saved, self.reports.replicas
        known = {"saved": saved, "replicas": replicas, "size": self.run.size}
        return Outcome(status, reason, **known | more)

    def failed(self, status: int, reason: str, *, restartable: bool = True) -> Outcome:
        self.screen.say(f"hvkit run: {reason}", failed=True)
        return self.outcome(status, reason, restartable=restartable)

    def start(self, port: int) -> None:
        run = self.run
        settings = asdict(replace(run.agents, host=socket.gethostname(), port=port))
        for_agents = {
            protocol.SUPERVISOR_VARIABLE: json.dumps(settings),
            protocol.KEY_VARIABLE: self.key.hex(),
        }
        self.launcher = subprocess.Popen(
            run.command,
            env={**run.environ, **for_agents},
            # Standard input is left for the commands that follow in a shell's loop. And Open MPI 5
            # does not pass on its end.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C in a terminal must reach this process only, which then ends the ranks.
            process_group=0,
            preexec_fn=processes.ends_with_parent(signal.SIGTERM),
        )
        assert self.launcher.stdout is not None
        assert self.launcher.stderr is not None
        self.launcher_output.read(Frame.STDOUT, self.launcher.stdout)
        self.launcher_output.read(Frame.STDERR, self.launcher.stderr)
        threads.start("hvkit-launcher", lambda: self.wake(self.launcher.wait()))

    def close(self, status: int | None) -> None:
        """Show the rest of the output, without what the report of a failure repeats."""
        self.launcher_output.finish(_LAUNCHER_PRINTS)
        if self.launcher_explains_end(status):
            self.launcher_output.show_kept()
        self.supervisor.close(hidden_tracebacks(self.supervisor.failures, self.reports.cause))

    def launcher_explains_end(self, status: int | None) -> bool:
        """Whether the launcher's last output may explain the end of the run."""
        if self.hurried or self.reports.left or status == 0:
            return False
        first = first_failure(self.supervisor.failures)
        if first is None:
            return status is not None or not self.supervisor.all_ended
        return (status is not None and status < 0) or (first.status is None and not first.lost)

    @property
    def ends(self) -> bool:
        """Whether the run is ending, for any reason."""
        stops = self.stopping or self.ended_by is not None
        return stops or self.supervisor.failed or self.supervisor.all_ended

    def show_now(self) -> None:
        self.run.status.update(phase="", **self.supervisor.state())

    @property
    def hurried(self) -> bool:
        """Whether a signal or a write error ended the run: then do not wait for output."""
        return self.ended_by is not None or self.supervisor.problem is not None

    def on_end_signal(self, number: int, _: object = None) -> None:
        if self.ended_by is None and not self.stopping:
            self.ended_by = signal.Signals(number)
        elif self.ended_by is signal.SIGINT and not self.signalled_again:
            self.signalled_again = True
        else:
            self.signalled_late = True
            self.supervisor.stop(0)
        self.wake()

    def until(self, holds: Callable[[], bool], seconds: float = math.inf) -> None:
        """Wait until something holds, for a limited time; show the ranks every second meanwhile."""
        deadline = time.monotonic() + seconds
        while not holds() and (left := deadline - time.monotonic()) > 0:
            if time.monotonic() > self.next_second:
                self.next_second = time.monotonic() + 1
                self.show_now()
                processes.reap_adopted(self.launcher.pid)
            with contextlib.suppress(queue.Empty):
                self.news.get(timeout=min(left, 1.0))

    def wait(self) -> None:
        """Wait until the launcher ends, a rank fails or a signal arrives.

        After all ranks have ended well, wait for the launcher for a few seconds only: Open MPI 5
        sometimes waits forever for ranks that ended within milliseconds.
        """

        def ended_or_signalled() -> bool:
            return self.launcher.returncode is not None or self.ended_by is not None

        def over() -> bool:
            return ended_or_signalled() or self.supervisor.failed

        self.until(lambda: over() or self.supervisor.all_ended)
        self.until(over, _LAUNCHER_NOTICES)
        if self.supervisor.failed and not self.hurried:
            patience = _OTHERS_LOST if self.supervisor.host_lost else _OTHERS_FAIL
            self.until(ended_or_signalled, patience)
        # When the network is gone, ranks fail with MPI's errors before their hosts count as lost.
        while self.supervisor.failed and self.supervisor.in_doubt and self.ended_by is None:
            time.sleep(0.1)

    def end(self) -> None:
        """End the agents on all hosts, then the launcher."""
        if self.launcher.returncode is not None:
            # The last output of agents may not have arrived yet.
            self.until(self.supervisor.all_gone, _LAUNCHER_ENDS)
        grace = self.run.agents.grace
        if self.ended_by is signal.SIGINT:
            self.supervisor.interrupt()
            self.until(lambda: self.supervisor.all_gone() or self.signalled_again, grace)
            self.signalled_again = True
        self.stopping = True
        self.supervisor.stop(grace)
        lost = self.supervisor.host_lost
        seconds = grace + (_AGENTS_END_BUT_LOST if lost else _AGENTS_END)
        self.until(self.supervisor.all_gone, seconds)
        # A launcher that has lost a host would wait for it.
        if self.launcher.returncode is None and not lost:
            self.launcher.terminate()
            self.until(lambda: self.launcher.returncode is not None, _LAUNCHER_ENDS)
        processes.end_descendants()
        self.launcher.wait()

    def left(self) -> Outcome:
        """Report that the ranks have left after SIGTERM."""
        got = self.reports.terminated
        who = f"{_on_hosts(got)} got SIGTERM" if got else "after SIGTERM"
        reason = f"{who}; all ranks have saved step {self.reports.saved} and left"
        self.screen.say(f"hvkit run: {reason}")
        more = {"restartable": True, "preempted": True, "terminated": frozenset(got)}
        return self.outcome(PREEMPTED, reason, **more)

    def conclude(self, status: int | None) -> Outcome:
        """Report what went wrong; ``status`` is None if the launcher did not end by itself."""
        if self.ended_by is not None:
            saved, resumes = self.reports.saved, self.reports.resumed is not None
            saved = self.run.status.last_saved if saved is None else saved
            self.screen.say(processes.ended_text(self.ended_by, saved, resumes=resumes))
            return self.outcome(128 + self.ended_by)
        if isinstance(problem := self.supervisor.problem, BrokenPipeError):
            # Silent, like any program whose output is piped into `head`.
            return self.outcome(128 + signal.SIGPIPE)
        if problem is not None:
            where = f" to {problem.filename}" if problem.filename else ""
            reason = f"cannot write output{where}: {problem.strerror}"
            return self.failed(1, reason, restartable=False)
        if status is not None and status < 0:  # all other failures follow from that
            name = signal.Signals(-status).name
            reason = f"{self.run.launcher} (process {self.launcher.pid}) was killed by {name}"
            return self.failed(128 - status, reason)
        failures = self.supervisor.failures
        others = [each for each in failures if each.rank not in self.reports.left]
        if self.reports.left and all(each.stopped for each in others):
            return self.left()
        first = first_failure(failures)
        hosts = {rank.host for rank in list(self.supervisor.ranks.values())}
        about = failures, hosts - {socket.gethostname()}, self.reports.cause
        if first:
            self.screen.say(report(*about), failed=True)
            return self.outcome(
                first.exit_status,
                in_one_line(*about),
                restartable=first.problem is None or first.status != protocol.CANNOT_RUN,
                raised=self.raised_early(first),
                rank=first.rank,
            )
        if status == 0 or (status is None and self.supervisor.all_ended):
            return self.outcome(0)
        if status is None:
            return self.outcome(1, "the ranks ended without an exit status", restartable=True)
        return self.failed(status, self.launcher_failed(status))

    def raised_early(self, first: Failure) -> Raised | None:
        """The exception that ended the run before its first step; None for any other end."""
        steps = self.reports.step > (self.reports.resumed or 0)
        if steps or time.monotonic() - self.begun > _BEGINS:
            return None
        if first.is_consequence:  # of a rank that was stopped while its exception ended it
            return next(filter(None, (each.raised for each in self.supervisor.failures)), None)
        return first.raised

    def launcher_failed(self, status: int) -> str:
        """Why the launcher ended with this status, although no rank has failed by itself."""
        ranks = self.supervisor.ranks
        ended = {n: each.host for n, each in ranks.items() if each.ended and not each.failed}
        started = len(ranks)
        if 0 < len(ended) < started:
            before = "ended with exit status 0 before the others, which it then ended"
            why = f"{_on_hosts(ended)} {before}"
        else:
            why = f"{started} of {self.run.size} ranks had started"
        return f"{self.run.launcher} ended with exit status {status}; {why}"


def _on_hosts(ranks: Mapping[int, str]) -> str:
    """Ranks and their hosts: ``ranks 0, 1 on node1, node2``."""
    return f"{ranks_text(sorted(ranks))} on {', '.join(sorted(set(ranks.values())))}"
