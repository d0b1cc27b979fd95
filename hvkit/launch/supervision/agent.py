"""Runs the command of one rank, and tells the supervisor what it prints and how it ends.

``python -m hvkit.launch.supervision.agent COMMAND...``, started by the launcher on every host.

A process above an agent, which ends what an agent leaves behind that is killed itself.

The two are in different process groups, so that a launcher which kills the one does not kill the
other: an agent whose guard has gone ends its command.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO, Any

from hvkit.host import cpus
from hvkit.host.rank_variables import place
from hvkit.launch.supervision.processes import (
    adopt_orphans,
    end_descendants,
    end_way_here,
    ends_with_parent,
    interrupt,
    reap_adopted,
)
from hvkit.launch.supervision.protocol import (
    KEY_VARIABLE,
    SUPERVISOR_VARIABLE,
    Connection,
    ConnectionLost,
    Kind,
    Supervised,
    packed,
)

# Seconds between SIGTERM and SIGKILL for what a command leaves behind that has ended by itself.
_LEFT_BEHIND = 1.0
# Seconds that the last words have to get through when told to end.
_LAST_WORDS = 1.0
# Bytes; several reads are under way at once.
_READ = 1 << 14

# What a shell returns for a command that it cannot run.
_CANNOT_RUN = 127


def main(command: Sequence[str]) -> int:
    """Run ``command`` below this process; returns its exit status as a shell would.

    Without a supervisor, as where the line of a dry run was typed, it becomes ``command``.
    """
    if SUPERVISOR_VARIABLE not in os.environ:
        try:
            os.execvp(command[0], list(command))
        except OSError as error:
            print(f"hvkit: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
            return _CANNOT_RUN
    supervised = Supervised.from_json(os.environ.pop(SUPERVISOR_VARIABLE))
    key = os.environ.pop(KEY_VARIABLE)
    guard = go_below_guard()
    if socket.gethostname() == supervised.host:
        os.environ.update(supervised.variables)
    here = place(os.environ)
    if here is None:
        print("hvkit: started by a launcher that tells no rank", file=sys.stderr)
        return 1
    if supervised.bind:
        usable = os.sched_getaffinity(0)
        share = cpus.share(cpus.cores(usable), here.local_rank, here.local_size)
        os.sched_setaffinity(0, share or usable)
    try:
        connection = Connection.to_supervisor(supervised, key, here.rank)
    except OSError as error:
        places = ", ".join(supervised.addresses)
        print(
            f"hvkit: rank {here.rank} on {socket.gethostname()} cannot reach `hvkit run` at "
            f"{places}, port {supervised.port}: {error}. Hosts must be able to open TCP "
            "connections to the host that starts the ranks",
            file=sys.stderr,
        )
        return 1
    return _Agent(connection, command, supervised, guard).run()


class _Agent:
    def __init__(
        self, connection: Connection, command: Sequence[str], supervised: Supervised, guard: int
    ) -> None:
        self.connection = connection
        self.command = command
        self.supervised = supervised
        self.guard = guard
        self.stopping = threading.Event()
        self.deadline = float("inf")
        self.interrupted = False
        self.lost = False
        self.unguarded = False
        self.ended_at = time.monotonic()
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        adopt_orphans()
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, self.asked)
        for each in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(each, self.hand_on)
        try:
            child = subprocess.Popen(
                self.command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # MPICH's ranks talk to their launcher through an inherited file.
                close_fds=False,
                env={"PYTHONUNBUFFERED": "1", **os.environ},
                preexec_fn=ends_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            self.listener.start()
            problem = f"cannot run {self.command[0]!r}: {error.strerror}"
            self.tell_end({"status": _CANNOT_RUN, "problem": problem})
            return _CANNOT_RUN
        self.child = child
        self.listener.start()
        assert child.stdout is not None
        assert child.stderr is not None
        streams = ((Kind.STDOUT, child.stdout), (Kind.STDERR, child.stderr))
        pumps = [threading.Thread(target=self.pump, args=stream, daemon=True) for stream in streams]
        for pump in pumps:
            pump.start()
        return self.ended(child, self.wait(child), pumps)

    def wait(self, child: "subprocess.Popen[bytes]") -> bool:
        """Wait for the command's end; whether it came by itself."""
        watched = os.pidfd_open(child.pid)
        try:
            while not self.stopping.is_set():
                if select.select([watched], [], [], 0.2)[0]:
                    self.ended_at = time.monotonic()
                    # A launcher that ends a rank signals its command and this process at once.
                    return child.wait() >= 0 or not self.stopping.wait(0.2)
                reap_adopted(child.pid)
                if os.getppid() != self.guard and not self.interrupted:
                    self.unguarded = not self.stopping.is_set()
                    self.stop_within(self.supervised.grace)
        finally:
            os.close(watched)
        return False

    def ended(
        self, child: "subprocess.Popen[bytes]", by_itself: bool, pumps: Sequence[threading.Thread]
    ) -> int:
        """End what is left of the command, and tell."""
        if by_itself:
            self.deadline = min(self.deadline, time.monotonic() + _LEFT_BEHIND)
        elif not self.unguarded:
            self.connection.send(Kind.ASKED, packed(0))
        end_descendants(lambda: self.deadline - time.monotonic())
        status = child.wait()
        if self.lost:
            if socket.gethostname() != self.supervised.host:
                end_way_here(self.guard)
            # Threads may be stuck in a connection that leads nowhere.
            os._exit(1)
        for pump in pumps:
            self.wait_for(pump)
        how: dict[str, Any] = {"status": status, "ago": time.monotonic() - self.ended_at}
        if self.unguarded:
            how["problem"] = "its process below the launcher was killed"
        self.tell_end({**how, "asked": not by_itself and not self.unguarded})
        return status if status >= 0 else 128 - status

    def tell_end(self, how: Mapping[str, Any]) -> None:
        """The last word, after everything that was printed."""
        self.connection.send_json(Kind.ENDED, how)
        self.connection.finish()
        self.wait_for(self.listener)

    def wait_for(self, thread: threading.Thread) -> None:
        """Wait until all was read, however slowly; but not for long when told to end."""
        while thread.is_alive() and not self.stopping.is_set():
            thread.join(timeout=0.2)
        thread.join(timeout=_LAST_WORDS)

    def pump(self, kind: Kind, stream: IO[bytes]) -> None:
        """Hand on what the command prints."""
        while data := os.read(stream.fileno(), _READ):
            self.connection.send_output(kind, data)

    def listen(self) -> None:
        """Do what the supervisor says, until it is lost."""
        try:
            while True:
                kind, value = self.connection.receive()
                if kind is Kind.STOP:
                    self.stop_within(value / 1000)
                elif kind is Kind.INTERRUPT:
                    self.interrupt()
                elif kind is Kind.SIGNAL:
                    self.hand_on(value)
        except ConnectionLost:
            self.lost = True
            self.stop_within(0)

    def stop_within(self, seconds: float) -> None:
        """End the command; by force once so many seconds have gone."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)
        self.stopping.set()

    def interrupt(self) -> None:
        """Send the command what Ctrl-C sends. How long it has is the supervisor's decision."""
        self.interrupted = True
        if self.child is not None:
            interrupt(self.child.pid)

    def asked(self, number: int, frame: FrameType | None) -> None:
        """A launcher ends this rank."""
        # It does so as soon as the first of the interrupted ranks has ended.
        if not self.interrupted:
            self.stop_within(self.supervised.grace)

    def hand_on(self, number: int, frame: FrameType | None = None) -> None:
        """A signal that is meant for the command."""
        if self.child is not None:
            self.child.send_signal(number)


PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals of a launcher that reach the agent."""


def go_below_guard() -> int:
    """Go on in a child of this process, which itself becomes the child's guard: its process id."""
    guard, launcher = os.getpid(), os.getppid()
    adopt_orphans()
    agent = os.fork()
    if agent == 0:
        os.setpgid(0, 0)
        return guard
    os._exit(_guarded(agent, launcher))


def _guarded(agent: int, launcher: int) -> int:
    """Wait for the agent's end; its exit status."""

    def tell(number: int, _: object = None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, number)

    for number in PASSED_ON:
        signal.signal(number, tell)
    watched = os.pidfd_open(agent)
    while not select.select([watched], [], [], 0.2)[0]:
        reap_adopted(agent)
        if os.getppid() != launcher:
            tell(signal.SIGTERM)
            launcher = os.getppid()
    status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    end_descendants()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
