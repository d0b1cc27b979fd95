"""The process on a host that runs the command of one rank, and the guard above it.

The launcher starts ``python -m hvkit.launching.supervision.agent COMMAND...`` once per rank. That
process forks: the parent becomes the guard, the child the agent::

    launcher's process on this host (mpirun, prted, sshd, ...)
    └── guard           waits for the agent; ends what a killed agent leaves behind
        └── agent       runs the command, sends its output and exit status to the supervisor
            └── COMMAND

Guard and agent are in different process groups, so that a launcher that kills one group does not
kill the other. The agent is in a session of its own: if Linux divides CPU time among sessions
(``sched_autogroup_enabled``), a rank then has a share of its own, however many processes other
programs have. An agent ends its command when it loses its guard or its connection to the
supervisor.

If ranks run a function, an agent on another host than the supervisor's makes a folder for it,
copies the call into it, and sends back what the rank leaves there.
"""

import contextlib
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hvkit import threads
from hvkit.connections import ConnectionLost
from hvkit.host import hardware, run_reports
from hvkit.host.rank_variables import launched_rank
from hvkit.launching.supervision import processes, protocol
from hvkit.launching.supervision.protocol import AgentConnection, AgentSettings, Frame

# Seconds from SIGTERM to SIGKILL for processes that a command left behind when it ended by itself.
_LEFT_BEHIND = 1.0
# Seconds to send the last output and the exit status when the run is being stopped.
_LAST_OUTPUT = 1.0
# Seconds between two checks of the processes around this one.
_TICK = 0.2


def main(command: Sequence[str]) -> int:
    """Run ``command`` below this process and return its exit status as a shell would.

    Without a supervisor, for instance when somebody typed the line of a dry run, this process
    becomes ``command``.
    """
    if protocol.SUPERVISOR_VARIABLE not in os.environ:
        try:
            os.execvp(command[0], list(command))
        except OSError as error:
            return _refuse(f"cannot run {command[0]!r}: {error.strerror}", protocol.CANNOT_RUN)
    settings = AgentSettings(**json.loads(os.environ.pop(protocol.SUPERVISOR_VARIABLE)))
    key = os.environ.pop(protocol.KEY_VARIABLE)
    supervisor_is_here = socket.gethostname() == settings.host
    folder = None
    if settings.call is not None:
        shared = supervisor_is_here and os.access(protocol.call_in(Path(settings.call)), os.R_OK)
        if not shared:
            folder = Path(tempfile.mkdtemp(prefix=protocol.CALL_PREFIX))
        os.environ[protocol.CALL_VARIABLE] = settings.call if folder is None else str(folder)
    guard = _fork_below_guard(folder)
    if supervisor_is_here:
        os.environ.update(settings.variables)
    here = launched_rank(os.environ)
    if here is None:
        return _refuse(
            "the launcher set no rank variable (OMPI_*, PMI_*, HOROVOD_*): start the run with "
            "hvkit run"
        )
    if settings.bind:
        usable = os.sched_getaffinity(0)
        cpus = hardware.cpus_of_rank(hardware.cores(usable), here.local_rank, here.local_size)
        os.sched_setaffinity(0, cpus or usable)
    try:
        connection = AgentConnection.to_supervisor(settings, key, here.rank, folder is not None)
    except OSError as error:
        addresses = ", ".join(settings.addresses)
        return _refuse(
            f"rank {here.rank} on {socket.gethostname()} cannot reach `hvkit run` at {addresses}, "
            f"port {settings.port}: {error}. Every host must be able to open TCP connections to "
            "the host of `hvkit run`"
        )
    return _Agent(connection, command, settings, guard, here.rank, folder).run()


def _refuse(text: str, status: int = 1) -> int:
    print(f"hvkit: {text}", file=sys.stderr)
    return status


@dataclass
class _Agent:
    connection: AgentConnection
    command: Sequence[str]
    settings: AgentSettings
    guard: int
    number: int
    folder: Path | None  # for the call, if this host does not share the supervisor's
    stopping: threading.Event = field(default_factory=threading.Event)
    deadline: float = math.inf
    interrupted: bool = False
    lost: bool = False
    guard_lost: bool = False
    ended_at: float = field(default_factory=time.monotonic)
    listener: threading.Thread | None = None
    child: "subprocess.Popen[bytes] | None" = None
    reports: int = -1
    # The process that trains, once it has reported: the command may be a shell that started it.
    rank: int | None = None

    def run(self) -> int:
        processes.adopt_orphans()
        for number in processes.END_SIGNALS:
            signal.signal(number, self.stop_for_launcher)
        for number in processes.COMMAND_SIGNALS:
            signal.signal(number, self.signal_command)
        try:
            if self.folder is not None:
                self.connection.receive_call(protocol.call_in(self.folder))
            child = self.start_command()
        except ConnectionLost:
            self.connection.send(Frame.STOPPED, protocol.packed(0))
            self.report_end({"status": 1, "stopped": True})
            return 1
        except OSError as error:
            self.listener = threads.start("hvkit-requests", self.listen)
            problem = f"cannot run {self.command[0]!r}: {error.strerror}"
            self.report_end({"status": protocol.CANNOT_RUN, "problem": problem})
            return protocol.CANNOT_RUN
        self.child = child
        self.listener = threads.start("hvkit-requests", self.listen)
        streams = {Frame.STDOUT: child.stdout, Frame.STDERR: child.stderr}
        pumps = [threads.start("hvkit-output", self.pump, *each) for each in streams.items()]
        pumps.append(threads.start("hvkit-reports", self.pass_reports_on))
        return self.finish(child, self.wait(child), pumps)

    def start_command(self) -> "subprocess.Popen[bytes]":
        self.reports, reports = os.pipe()
        os.set_inheritable(reports, True)
        with_reports = {run_reports.VARIABLE: run_reports.address_of(reports)}
        try:
            return subprocess.Popen(
                self.command,
                # For rank 0, the launcher's is a pipe that Open MPI never closes.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # MPICH's ranks reach their launcher through an inherited file descriptor.
                close_fds=False,
                env={"PYTHONUNBUFFERED": "1", **os.environ, **with_reports},
                preexec_fn=processes.ends_with_parent(signal.SIGKILL),
            )
        finally:
            os.close(reports)

    def wait(self, child: "subprocess.Popen[bytes]") -> bool:
        """Wait until the command ends or must be ended; return whether it ended by itself."""
        process = os.pidfd_open(child.pid)
        try:
            while not self.stopping.is_set():
                if select.select([process], [], [], _TICK)[0]:
                    self.ended_at = time.monotonic()
                    # A launcher that ends a rank signals command and agent at the same time. Wait a
                    # moment for the agent's signal.
                    return child.wait() >= 0 or not self.stopping.wait(_TICK)
                processes.reap_adopted(child.pid)
                if os.getppid() != self.guard and not self.interrupted:
                    self.guard_lost = not self.stopping.is_set()
                    self.stop_within(self.settings.grace)
        finally:
            os.close(process)
        return False

    def finish(
        self, child: "subprocess.Popen[bytes]", by_itself: bool, pumps: Sequence[threading.Thread]
    ) -> int:
        """End what is left of the command, report how it ended, and return its exit status."""
        if by_itself:
            self.deadline = min(self.deadline, time.monotonic() + _LEFT_BEHIND)
        elif not self.guard_lost:
            self.connection.send(Frame.STOPPED, protocol.packed(0))
        processes.end_descendants(lambda: self.deadline - time.monotonic(), self.rank)
        status = child.wait()
        if self.lost:
            if socket.gethostname() != self.settings.host:
                processes.end_remote_launcher(self.guard)
            # Not sys.exit: threads may be stuck in sending over the lost connection.
            os._exit(1)
        for pump in pumps:
            self.join(pump)
        self.join(threads.start("hvkit-outcome", self.send_outcome))
        if self.guard_lost and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        how: dict[str, Any] = {"status": status, "ago": time.monotonic() - self.ended_at}
        if self.guard_lost:
            how["problem"] = "its guard, the process between the launcher and the rank, was killed"
        self.report_end({**how, "stopped": not by_itself and not self.guard_lost})
        return status if status >= 0 else 128 - status

    def report_end(self, how: Mapping[str, Any]) -> None:
        """Send how the command ended, after all of its output."""
        self.connection.send_json(Frame.ENDED, how)
        self.connection.finish()
        if self.listener is not None:
            self.join(self.listener)

    def join(self, thread: threading.Thread) -> None:
        """Wait for a thread: as long as it takes while the run goes on, then for a moment."""
        while thread.is_alive() and not self.stopping.is_set():
            thread.join(timeout=_TICK)
        thread.join(timeout=_LAST_OUTPUT)

    def pump(self, stream: Frame, pipe: IO[bytes]) -> None:
        while data := os.read(pipe.fileno(), protocol.PIECE):
            self.connection.send_output(stream, data)

    def send_outcome(self) -> None:
        """Send what the function has returned or raised, if this host has a folder of its own."""
        if self.folder and (file := protocol.outcome_in(self.folder, self.number)).exists():
            self.connection.send_outcome(file)

    def pass_reports_on(self) -> None:
        with open(self.reports, "rb") as lines:
            for line in lines:
                if len(line) > run_reports.LONGEST:
                    continue  # no report: the script has written to hvkit's pipe
                line = line.rstrip(b"\n")
                if line.startswith(b'{"spans"'):  # many: no faster than the supervisor reads them
                    self.connection.send_output(Frame.SPANS, line)
                    continue
                with contextlib.suppress(ValueError):  # the supervisor logs what is no report
                    (pid,) = protocol.fields(line, pid=int)
                    self.rank = self.rank if pid is None else pid
                self.connection.send(Frame.REPORT, line)

    def listen(self) -> None:
        """Carry out the supervisor's requests until the connection is lost."""
        try:
            while True:
                match self.connection.receive():
                    case Frame.STOP, milliseconds:
                        self.stop_within(milliseconds / 1000)
                    case Frame.INTERRUPT, _:
                        # The signal of Ctrl-C. The supervisor decides what follows, and when.
                        self.interrupted = True
                        if self.child is not None:
                            processes.interrupt(self.child.pid)
                    case Frame.SIGNAL, number:
                        self.signal_command(number)
                    case Frame.ASK, number:
                        now = {"number": number, "now": time.monotonic()}
                        self.connection.send_json(Frame.CLOCK, now)
        except ConnectionLost:
            self.lost = True
            self.stop_within(0)

    def stop_within(self, seconds: float) -> None:
        """End the command, by force after so many seconds."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)
        self.stopping.set()

    def stop_for_launcher(self, *_: object) -> None:
        """Handle a signal with which the launcher ends this rank."""
        # After an interrupt, ignore it: launchers end all ranks as soon as the first has ended.
        if not self.interrupted:
            self.stop_within(self.settings.grace)

    def signal_command(self, number: int, _: object = None) -> None:
        if self.child is not None:
            self.child.send_signal(number)


def _fork_below_guard(folder: Path | None) -> int:
    """Continue in a child of this process, which becomes the guard; return the guard's id.

    The guard removes the folder at the end.
    """
    guard, launcher = os.getpid(), os.getppid()
    processes.adopt_orphans()
    agent = os.fork()
    if agent == 0:
        os.setsid()
        return guard
    status = _guard(agent, launcher)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


def _guard(agent: int, launcher: int) -> int:
    """Wait for the agent, end what it left behind, and return its exit status."""

    def pass_on(number: int, _: object = None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, number)

    # Those of the launcher.
    for number in (*processes.END_SIGNALS, *processes.COMMAND_SIGNALS):
        signal.signal(number, pass_on)
    process = os.pidfd_open(agent)
    while not select.select([process], [], [], _TICK)[0]:
        processes.reap_adopted(agent)
        if os.getppid() != launcher:  # The launcher has died.
            pass_on(signal.SIGTERM)
            launcher = os.getppid()
    status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    processes.end_descendants()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(protocol.command_of_agent(sys.argv[1:])))
