"""Runs a launcher, and sees to it that everything on all hosts ends when one thing does."""

import asyncio
import contextlib
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvkit.launch.supervision.first_failure import culprit, report
from hvkit.launch.supervision.output import Style
from hvkit.launch.supervision.processes import (
    adopt_orphans,
    end_descendants,
    ends_with_parent,
    reap_adopted,
)
from hvkit.launch.supervision.protocol import KEY_VARIABLE, SUPERVISOR_VARIABLE, Supervised
from hvkit.launch.supervision.supervisor import Supervisor

# After the first failure the other ranks fail by themselves, with errors worth waiting for.
_OTHERS_FAIL = 2.0
# Hosts that are lost at the same time were asked within a second of each other.
_OTHERS_LOST = 1.2
# How long agents have to end besides the time that their commands have.
_AGENTS_END = 3.0
# Where a host is lost some will not tell.
_AGENTS_END_BUT_LOST = 1.0
# How long the launcher has to end by itself once its ranks have.
_LAUNCHER_ENDS = 1.5

# How long a launcher whose ranks have all ended well has to notice.
_LAUNCHER_LATE = 5.0

_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Run:
    """What to run and how to watch it.

    Attributes:
        command: the launcher's command line.
        environ: the launcher's environment.
        launcher: what it is, for people.
        size: the number of ranks.
        addresses: where agents reach this host; the loopback address alone for a run on one host.
        lost_after: seconds without a sign of life after which a host is given up; ``None`` for
            never.
        grace: seconds that commands have to end, after a signal or the failure of another rank.
        bind: whether each rank keeps to its share of its host's cores.
        here: environment variables for the ranks of this host alone.
        style: how output is shown.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    launcher: str
    size: int
    addresses: tuple[str, ...]
    lost_after: float | None
    grace: float
    bind: bool
    here: Mapping[str, str] = field(default_factory=dict)
    style: Style = field(default_factory=Style)


def supervise(run: Run) -> int:
    """Run it to its end; the exit status is that of the rank that failed first, or 0.

    SIGINT, SIGTERM and SIGHUP end everything; the exit status is then 128 and the signal's number.
    Ranks get SIGINT first where it was SIGINT, then SIGTERM, then SIGKILL, each ``grace`` seconds
    after the one before, or at once with a further signal. SIGUSR1 and SIGUSR2 go to the command
    of every rank.
    """
    adopt_orphans()
    return asyncio.run(_Supervision(run).supervise())


class _Supervision:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.key = secrets.token_hex(32)
        self.failed = asyncio.Event()
        self.asked_by: signal.Signals | None = None
        self.asked = asyncio.Event()
        self.asked_again = asyncio.Event()
        self.stopping = False
        self.supervisor = Supervisor(run.size, self.key, run.style, run.lost_after, self.failed.set)

    async def supervise(self) -> int:
        only_here = self.run.addresses[0] if len(self.run.addresses) == 1 else None
        server = await self.supervisor.listen(only_here)
        port = server.sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        for number in _END:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self.ask, number)
        for number in _FOR_RANKS:
            loop.add_signal_handler(number, self.supervisor.signal, number)
        launcher = await self.start(port)
        showing = asyncio.create_task(self.supervisor.show_begun_lines())
        reaping = asyncio.create_task(_reap(launcher.pid))
        try:
            await self.wait(launcher)
            status = launcher.returncode
            await self.end(launcher)
        finally:
            showing.cancel()
            reaping.cancel()
            server.close()
            in_order = self.asked_by is None and self.supervisor.writer.problem is None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.supervisor.close(), None if in_order else 0.5)
        undisturbed = self.asked_by is None and self.supervisor.writer.problem is None
        if status is not None and status < 0 and undisturbed:
            return self.blame(launcher.pid, -status)
        return self.conclude(status)

    async def start(self, port: int) -> asyncio.subprocess.Process:
        run = self.run
        supervised = Supervised(
            host=socket.gethostname(),
            addresses=run.addresses,
            port=port,
            lost_after=run.lost_after,
            grace=run.grace,
            bind=run.bind,
            variables=run.here,
        )
        own = {SUPERVISOR_VARIABLE: supervised.to_json(), KEY_VARIABLE: self.key}
        return await asyncio.create_subprocess_exec(
            *run.command,
            env={**run.environ, **own},
            # A process in the background that reads from a terminal is stopped.
            stdin=None if sys.stdin and not sys.stdin.isatty() else asyncio.subprocess.DEVNULL,
            # A Ctrl-C is for this process, which tells the launcher.
            process_group=0,
            preexec_fn=ends_with_parent(signal.SIGTERM),
        )

    def ask(self, number: signal.Signals) -> None:
        """A signal that asks this process to end."""
        if self.asked_by is None and not self.stopping:
            self.asked_by = number
            self.asked.set()
        elif self.asked_by is signal.SIGINT and not self.asked_again.is_set():
            self.asked_again.set()
        else:
            self.supervisor.stop(0)

    async def wait(self, launcher: asyncio.subprocess.Process) -> None:
        """Wait for the launcher's end, a failure or a signal.

        A launcher whose ranks have all ended well has ended for us, too: Open MPI 5 now and then
        waits for ever for the end of ranks that took milliseconds.
        """
        ended = asyncio.create_task(launcher.wait())
        failed, asked, all_ended = (
            asyncio.create_task(event.wait())
            for event in (self.failed, self.asked, self.supervisor.all_ended)
        )
        await asyncio.wait([ended, failed, asked, all_ended], return_when=asyncio.FIRST_COMPLETED)
        if not (ended.done() or failed.done() or asked.done()):
            await asyncio.wait(
                [ended, failed, asked],
                timeout=_LAUNCHER_LATE,
                return_when=asyncio.FIRST_COMPLETED,
            )
        hurry = self.asked.is_set() or self.supervisor.writer.problem is not None
        if self.failed.is_set() and not hurry:
            patience = _OTHERS_LOST if self.supervisor.host_lost else _OTHERS_FAIL
            await asyncio.wait(
                [ended, asked], timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
        # A network that is gone ends ranks with MPI's errors before a host is surely lost.
        while self.failed.is_set() and self.supervisor.in_doubt and not self.asked.is_set():
            await asyncio.sleep(0.1)
        for task in (ended, failed, asked, all_ended):
            task.cancel()

    async def end(self, launcher: asyncio.subprocess.Process) -> None:
        """End all agents wherever they are, then the launcher."""
        if launcher.returncode is not None:
            # Last words of agents may still be under way.
            await self.supervisor.all_gone(_LAUNCHER_ENDS)
        if self.asked_by is signal.SIGINT:
            await self.interrupt()
        grace = self.run.grace
        self.stopping = True
        self.supervisor.stop(grace)
        lost = self.supervisor.host_lost
        await self.supervisor.all_gone(grace + (_AGENTS_END_BUT_LOST if lost else _AGENTS_END))
        # One that has lost a host waits for it.
        if launcher.returncode is None and not lost:
            with contextlib.suppress(ProcessLookupError):
                launcher.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(launcher.wait(), _LAUNCHER_ENDS)
        await asyncio.to_thread(end_descendants)
        await launcher.wait()

    async def interrupt(self) -> None:
        """Have ranks end as by Ctrl-C, until they have, their time is over or a signal follows."""
        self.supervisor.interrupt()
        gone = asyncio.create_task(self.supervisor.all_gone(self.run.grace))
        again = asyncio.create_task(self.asked_again.wait())
        await asyncio.wait([gone, again], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        again.cancel()
        self.asked_again.set()

    def blame(self, launcher: int, number: int) -> int:
        """Say that the launcher was killed; what ranks tell then is a consequence."""
        name = signal.Signals(number).name
        _say(f"hvkit run: {self.run.launcher} (process {launcher}) was killed by {name}")
        return 128 + number

    def conclude(self, status: int | None) -> int:
        """Say what went wrong, and find the exit status.

        Args:
            status: with which the launcher ended; ``None`` if it did not by itself.
        """
        if self.asked_by is not None:
            _say(f"hvkit run: ended by {self.asked_by.name}")
            return 128 + self.asked_by
        if (problem := self.supervisor.writer.problem) is not None:
            return _unwritten(problem)
        failures = self.supervisor.failures
        if told := report(failures, self.supervisor.elsewhere):
            _say(told)
        if first := culprit(failures):
            return first.exit_status
        if status is None:
            return 0 if self.supervisor.all_ended.is_set() else 1
        if status != 0:
            started = self.supervisor.started
            _say(
                f"hvkit run: {self.run.launcher} ended with exit status {status}; "
                f"{started} of {self.run.size} ranks had started"
            )
        return status


async def _reap(launcher: int) -> None:
    """Forget processes that were adopted and have ended; never returns."""
    while True:
        await asyncio.sleep(1)
        reap_adopted(launcher)


def _unwritten(problem: OSError) -> int:
    """Say why output could not be written, and find the exit status."""
    if isinstance(problem, BrokenPipeError):
        # As of a program that writes into a pipe whose reader has seen enough.
        return 128 + signal.SIGPIPE
    where = f" to {problem.filename}" if problem.filename else ""
    _say(f"hvkit run: output cannot be written{where}: {problem.strerror}")
    return 1


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)
