"""Watches ranks that wait for each other, and names the ones that do not come.

Horovod reduces what every rank sends. A rank that makes another call than the others leaves all of
them waiting, and neither Horovod nor MPI knows where the scripts are. Here each rank knows which
call of hvkit it is in and for how long it has waited there, and a thread of each rank reports that
to rank 0 over a socket of its own, once a wait has lasted some seconds. No collective, and nothing
else that a training step would notice, is involved::

    calls.py     what this rank is doing: the call, whether it waits, the line of the script
    verdict.py   from the reports of all ranks to a sentence, and whether the run must end
    channel.py   authenticated sockets between rank 0 and the others
    watcher.py   the thread: reports, questions, and the end of a run that cannot go on
    rank_errors.py  how a rank ends: one traceback from the rank that failed, a line from the others

From the first wait to the last line: ``calls.waiting`` marks a wait, the rank's ``Watcher`` reports
it, rank 0's gathers the reports, ``verdict.decide`` finds that they do not match, rank 0 prints the
sentence, sends it to all ranks and shuts Horovod down; every wait then ends with
:class:`hvkit.RankLostError`, which carries the sentence.
"""

from __future__ import annotations

import atexit
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvkit.watch import calls, rank_errors
from hvkit.watch.verdict import SAME_CALLS
from hvkit.watch.watcher import Hub, Limits, Reporter


@contextmanager
def starting() -> Iterator[None]:
    """Around the start of Horovod, for which every rank has to come.

    No rank can reach another one yet, so each one can only say that it waits.

    Raises:
        LaunchError: ``HVKIT_STALL_SECONDS`` or ``HVKIT_STALL_LIMIT_SECONDS`` is no positive number.
    """
    limits = Limits.from_environment()
    timers = [
        threading.Timer(limits.report, _say_that_it_starts, [limits.report]),
        threading.Timer(limits.end, _end_the_start, [limits.end]),
    ]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _say_that_it_starts(seconds: float) -> None:
    now = calls.status()
    where = f"{now.call or 'its first call of hvkit'} ({now.where})"
    text = f"a rank waits in {where} for ranks that have not called hvkit for {seconds:g} s"
    os.write(2, f"hvkit: {text}: {SAME_CALLS}\n".encode())


def _end_the_start(seconds: float) -> None:
    _say_that_it_starts(seconds)
    os._exit(1)


def start(
    rank: int,
    size: int,
    *,
    one_host: bool,
    from_rank_0: Callable[[bytes | None], bytes],
    shut_down: Callable[[], None],
) -> None:
    """Watch the ranks from now on; a collective.

    Args:
        rank: this rank.
        size: the number of ranks, at least two.
        one_host: whether all ranks are on one host.
        from_rank_0: returns rank 0's bytes on every rank; the others pass None.
        shut_down: ends all waits in Horovod, on all ranks.

    Raises:
        LaunchError: ``HVKIT_STALL_SECONDS`` or ``HVKIT_STALL_LIMIT_SECONDS`` is no positive number.
    """
    limits = Limits.from_environment()
    watcher: Hub | Reporter
    if rank == 0:
        watcher = hub = Hub(size, limits, shut_down, one_host=one_host)
        from_rank_0(pickle.dumps(hub.meeting))
        hub.start()
    else:
        watcher = reporter = Reporter(rank, limits, shut_down)
        reporter.start(pickle.loads(from_rank_0(None)))
    rank_errors.install(watcher)
    # Registered after Horovod's own, so called before it: the others hear why Horovod ends.
    atexit.register(_end, watcher)


def _end(watcher: Hub | Reporter) -> None:
    rank_errors.note_uncaught()
    watcher.stop()
