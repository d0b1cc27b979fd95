"""Finds ranks that wait for each other forever, and names the line of the script where each waits.

A collective returns when all ranks have called it. If one rank makes another call, all of them wait
forever, and neither Horovod nor MPI can name the lines of the script. So hvkit marks which of its
calls each rank is in. When a wait has lasted some seconds, a thread of that rank reports it to rank
0 over a socket, without any collective. Training steps take no longer for it::

    calls          this rank's current call, and whether it waits there; reports to `hvkit run`
    script_lines   at which lines of the script its threads are
    watcher        a thread on each rank: reports waits, and on rank 0 collects and judges them
    diagnosis      turns the reports of all ranks into a sentence, and decides whether the run ends
    preemption     after SIGTERM: all ranks save at the end of the same step, and end
    channel        authenticated sockets between rank 0 and the others
    rank_errors    one traceback from the rank that failed, one line from each of the others
    spans          when calls and waits began and ended, for monitors and timelines

From a wait to the last line: ``calls.waiting`` marks the wait. The rank's ``Reporter`` sends it to
rank 0's ``Hub``. ``diagnosis.diagnose`` finds that the ranks' calls do not match. Rank 0 prints the
sentence, sends it to all ranks, and shuts Horovod down. Every wait then raises
``hvkit.RankLostError`` with that sentence.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvkit import threads
from hvkit.watch import calls, channel, rank_errors
from hvkit.watch.diagnosis import Limits
from hvkit.watch.preemption import PREEMPTION
from hvkit.watch.rank_errors import SAME_CALLS
from hvkit.watch.watcher import Hub, Reporter


@contextmanager
def starting() -> Iterator[None]:
    """Wraps the start of Horovod, in which ranks cannot reach each other, only print their wait."""
    limits = Limits.from_environment()
    timers = [
        threads.later(limits.report, "hvkit-start", _report_start, limits.report, False),
        threads.later(limits.end, "hvkit-start", _report_start, limits.end, True),
    ]
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _report_start(seconds: float, ends: bool) -> None:
    now = calls.status()
    where = f"{now.call or 'its first call of hvkit'} ({now.where})"
    text = f"a rank waits in {where} for ranks that have not called hvkit for {seconds:g} s"
    os.write(2, f"hvkit: {text}: {SAME_CALLS}\n".encode())
    if ends:
        os._exit(1)


def start(
    rank: int,
    size: int,
    *,
    one_host: bool,
    from_rank_0: Callable[[bytes | None], bytes],
    shut_down: Callable[[], None],
) -> None:
    """Start watching the ranks, at least two; a collective.

    ``from_rank_0`` returns rank 0's bytes on every rank; the others pass None. ``shut_down`` ends
    all waits in Horovod, on all ranks.
    """
    limits = Limits.from_environment()
    watcher: Hub | Reporter
    if rank == 0:
        watcher = hub = Hub(size, limits, shut_down, one_host=one_host)
        from_rank_0(hub.endpoint.to_json().encode())
        hub.start()
    else:
        watcher = reporter = Reporter(rank, limits, shut_down)
        reporter.start(channel.Endpoint.from_json(bytes(from_rank_0(None))))
    rank_errors.install(watcher)
    threads.before_end.append(watcher.thread_failed)
    PREEMPTION.several_ranks()

    def end() -> None:
        rank_errors.note_uncaught()
        watcher.stop()

    # Registered after Horovod's own function, so it runs before: the others get the reason first.
    atexit.register(end)
