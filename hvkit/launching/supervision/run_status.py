"""The newest state of ``hvkit run``, which ``hvkit top`` reads from a Unix socket.

``hvkit run`` keeps its state in a ``RunStatus`` from its first check of hosts to its end, over all
restarts. A thread serves it: the socket is ``PID`` in a folder that only this user can enter, and
a client that connects gets the state as JSON.

Ranks report where they are at each full second of the clock (``hvkit.watch.calls``), and so at
the same instant, as far as their hosts' clocks agree. The supervisor keeps the last reports of each
rank, and ``hvkit top`` shows all ranks at the newest second that all of them have reported. So a
rank whose report arrives first does not seem to be behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Required

from hvkit import threads
from hvkit.errors import HvkitError
from hvkit.host.run_reports import Whereabouts
from hvkit.launching.supervision.timeline import Timeline
from hvkit.log import logger

_ANSWERS_WITHIN = 5.0
# Seconds for which reports are kept; and after which a rank without a new report is not waited for.
_KEPT = 8
_SILENT_AFTER = 3.0
# Seconds until the thread accepts clients again, if this process has too many open files.
_PAUSE = 0.5


class RankReport(Whereabouts, total=False):
    """Where a rank is; moments are as of ``time.monotonic``."""

    moved: float  # when the first report with this step came
    at: float  # when it was there


class RankState(RankReport):
    """A rank, with its report of the second that is shown; without one before its first report."""

    rank: Required[int]
    host: Required[str]
    ended: Required[bool]
    speed: Required[float | None]  # samples a second, with ``hvkit.Monitor``


@dataclass(frozen=True)
class RunState:
    command: str = ""  # as a shell's line, without the folders of its program and script
    phase: str = "checks the hosts"  # while it has no ranks
    restarts: int = 0
    reason: str = ""  # why the ranks ended last; empty if they have not, or have ended well
    size: int | None = None  # the number of ranks to start; None before the hosts are chosen
    saved: int | None = None  # the step of the newest checkpoint
    ranks: Sequence[RankState] = ()


@dataclass
class RunStatus:
    """The newest state of this process's run, over all tries.

    One thread updates it. Each update puts a new ``RunState`` in the old one's place, so that the
    thread of ``serve`` may read at any time.
    """

    now: RunState = RunState()
    saved_in: dict[str, int] = field(default_factory=dict)  # the last steps, by directory
    timeline: Timeline | None = None  # gets the spans of all ranks
    begun: float = field(default_factory=time.monotonic)

    @property
    def last_saved(self) -> int | None:
        """The largest of the steps that were saved or resumed last; None for none."""
        return max(self.saved_in.values(), default=None)

    def update(self, **changes: Any) -> None:
        self.now = replace(self.now, **changes)

    def read(self) -> dict[str, Any]:
        """The state, the moment ``read_at``, and the ``seconds`` since the run began."""
        now = time.monotonic()
        return {**vars(self.now), "read_at": now, "seconds": now - self.begun}


class RankReports:
    """The last reports of one rank, each at a second of this host's clock."""

    def __init__(self) -> None:
        # A host's clock may differ: the smallest delay of the last reports is the difference.
        self._delays: deque[float] = deque(maxlen=_KEPT)
        self._kept: deque[tuple[int, RankReport]] = deque(maxlen=_KEPT)
        self._arrived = 0.0

    @property
    def newest(self) -> RankReport:
        """The last report; empty before the first."""
        return self._kept[-1][1] if self._kept else {}

    def take(self, report: RankReport, made: float, arrived: float, monotonic: float) -> None:
        """Keep a report, with its second as ``at``, as of ``time.monotonic``.

        ``made`` is by the clock of the rank's host, ``arrived`` by this one's; ``monotonic`` is the
        same moment, as of ``time.monotonic``.
        """
        self._delays.append(arrived - made)
        self._arrived = arrived
        second = round(made + min(self._delays))
        if self._kept and self._kept[-1][0] == second:
            self._kept.pop()
        self._kept.append((second, {**report, "at": monotonic - (arrived - second)}))

    def newest_second(self, now: float) -> int | None:
        """The second of the last report; None if the rank has been silent for some seconds."""
        return self._kept[-1][0] if self._kept and now - self._arrived < _SILENT_AFTER else None

    def at(self, second: int) -> RankReport:
        """The last report up to this second, or the oldest one that is kept."""
        before = [report for made, report in self._kept if made <= second]
        return before[-1] if before else self._kept[0][1] if self._kept else {}


def at_one_moment(running: Sequence[RankReports], now: float) -> list[RankReport]:
    """The reports of ranks at the newest second that all have reported.

    Ranks that have been silent for some seconds are not waited for. ``now`` is this host's clock.
    """
    newest = [second for each in running if (second := each.newest_second(now)) is not None]
    if not newest:
        return [each.newest for each in running]
    return [each.at(min(newest)) for each in running]


def folder() -> Path:
    """The folder with the sockets of all of this user's runs on this host."""
    return Path("/tmp", f"hvkit-{os.getuid()}")


@contextlib.contextmanager
def serve(state: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Within: answer clients with the state, which threads request.

    If the socket cannot be made, ``hvkit top`` does not show this run.
    """
    path = folder() / str(os.getpid())
    with contextlib.ExitStack() as at_end:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_own(path.parent)
            listener = at_end.enter_context(socket.socket(socket.AF_UNIX))
            # Renamed once it listens: a client that is refused takes a socket for a dead run's.
            hidden = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
            listener.bind(str(hidden))
            listener.listen()
            hidden.rename(path)
            at_end.callback(_remove, path, path.stat().st_ino)
            ended = threading.Event()
            at_end.callback(listener.shutdown, socket.SHUT_RDWR)  # wakes up accept
            at_end.callback(ended.set)
            threads.start("hvkit-top", _answer_all, listener, state, ended)
        except (OSError, HvkitError) as error:
            logger.debug("hvkit top will not find this run: %s", error)
        yield


def _answer_all(
    listener: socket.socket, state: Callable[[], dict[str, Any]], ended: threading.Event
) -> None:
    """Answer each client in a thread, so that one that does not read delays no other."""
    while not ended.is_set():
        try:
            client, _ = listener.accept()
        except OSError:  # the end, or too many open files
            ended.wait(_PAUSE)
            continue
        threads.start("hvkit-top", _answer, client, state)


def _answer(client: socket.socket, state: Callable[[], dict[str, Any]]) -> None:
    with client, contextlib.suppress(OSError):  # it does not read
        client.settimeout(_ANSWERS_WITHIN)
        client.sendall(json.dumps(state()).encode())


def _remove(path: Path, inode: int) -> None:
    """Delete this run's socket, unless a run in a container has one under the same process id."""
    with contextlib.suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()


def running() -> list[int]:
    """The process ids of the runs that answer, the newest first."""
    try:
        _require_own(folder())
        found = [each for each in folder().iterdir() if each.name.isdecimal()]
    except (OSError, HvkitError):
        return []
    begun = {}
    for each in filter(_answers, found):
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            begun[int(each.name)] = each.stat().st_mtime
    return sorted(begun, key=lambda process: -begun[process])


def read(process: int) -> dict[str, Any]:
    """The state of the run whose ``hvkit run`` has this process id."""
    path = folder() / str(process)
    try:
        _require_own(path.parent)
        with _connected(path) as connection:
            answer = b""
            while more := connection.recv(1 << 16):
                answer += more
        state = json.loads(answer)
    except (OSError, ValueError) as error:
        raise HvkitError(
            f"no `hvkit run` of yours with process id {process} answers on this host ({error}): "
            "name another one, or none to see the newest"
        ) from None
    if not isinstance(state, dict) or not RunStatus().read().keys() <= state.keys():
        raise HvkitError(
            f"process {process} answers with something else than a run's state: watch it with "
            "the version of hvkit that has started it"
        )
    return state


def _answers(path: Path) -> bool:
    try:
        _connected(path).close()
    except ConnectionRefusedError:  # left by a run that was killed
        path.unlink(missing_ok=True)
        return False
    except OSError:
        return False
    return True


def _connected(path: Path) -> socket.socket:
    with contextlib.ExitStack() as on_error:
        connection = on_error.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(_ANSWERS_WITHIN)
        connection.connect(str(path))
        on_error.pop_all()
    return connection


def _require_own(path: Path) -> None:
    """Refuse a folder that someone else has made under that name."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise HvkitError(f"{path} must be a folder of this user's that nobody else can enter")
