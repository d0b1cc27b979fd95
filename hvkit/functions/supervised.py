"""Ranks under a process that supervises them: its start, its end, and what the ranks have returned.

``hvkit.functions.starter`` and ``hvkit.spark.starter`` are such processes.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvkit.cli import set_home
from hvkit.errors import HvkitError, LaunchError, RankLostError
from hvkit.functions.outcomes import error_in, picklable, results_in
from hvkit.host.call_folder import outcome_in, written
from hvkit.host.launcher_variables import launched
from hvkit.launching.supervision.processes import ends_with_parent
from hvkit.launching.supervision.supervised_run import Outcome
from hvkit.runtime import is_below_rank


def refuse_on_ranks(user: str) -> None:
    """Raise ``LaunchError`` if this process is a rank, or one has started it.

    Args:
        user: what would start ranks, for the error.
    """
    found = launched(os.environ)
    # A notebook's server may be the only task of an srun.
    is_rank = found is not None and (found.size, found.launcher) != (1, "srun")
    if is_rank or is_below_rank():
        raise LaunchError(
            f"{user} was called on a rank: it starts ranks itself. Call it in a script that you "
            'start with python, under if __name__ == "__main__", or in a notebook; on a rank, call '
            "the function directly"
        )


def begin(module: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the module's process, which calls ``supervise_below``; both streams are pipes."""
    # The process inherits that SIGINT waits, until ``supervise_below`` can handle it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C in a terminal, or a notebook's, must reach this process only, which passes it
            # on.
            process_group=0,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def supervise_below(folder: Path, parent: int, run: Callable[[], Outcome]) -> None:
    """In that process: run the ranks to their end, and leave their outcome in the folder.

    The ranks end, and the folder is removed, when the parent ends before.

    Args:
        folder: of the call.
        parent: the process that has called ``begin``.
        run: runs the ranks; may raise ``HvkitError``.
    """
    try:
        if os.getppid() != parent:
            return
        # Before ``run`` handles Ctrl-C there is nothing to end but this process.
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        ends_with_parent(signal.SIGTERM, parent)()
        set_home()
        try:
            ended = pickle.dumps(run())
        except HvkitError as error:
            ended = picklable(error)
        with written(_ended_in(folder)) as file:
            file.write(ended)
    finally:
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)


def outcome_of(process: subprocess.Popen[bytes], folder: Path) -> Outcome:
    """How the ranks have ended; the process has ended, too.

    Raises:
        HvkitError: they could not be started.
    """
    try:
        ended = pickle.loads(_ended_in(folder).read_bytes())
    except FileNotFoundError:
        how = process.returncode
        raise LaunchError(
            "the process that supervises the ranks has ended before them ("
            + (f"killed by {signal.Signals(-how).name}" if how < 0 else f"status {how}")
            + "): look for the reason above"
        ) from None
    if isinstance(ended, HvkitError):
        raise ended
    outcome: Outcome = ended
    return outcome


def error_of(folder: Path, ended: Outcome) -> BaseException | None:
    """Why there are no results: what the first failed rank has raised, or how it has ended."""
    if ended.status and (error := raised_by_first(folder, ended)) is not None:
        return error
    if ended.status and ended.rank is not None:
        return RankLostError(ended.reason)
    if ended.status:
        return LaunchError(ended.reason or f"the ranks have ended with status {ended.status}")
    for rank in range(ended.size):
        if not outcome_in(folder, rank).exists():
            return RankLostError(
                f"rank {rank} has ended with status 0, but its function has not returned: it has "
                "called os._exit, or replaced its process"
            )
    return None


def raised_by_first(folder: Path, ended: Outcome) -> BaseException | None:
    """What the function has raised on the rank that failed first; None if it was not that."""
    if ended.rank is None or not outcome_in(folder, ended.rank).exists():
        return None
    with outcome_in(folder, ended.rank).open("rb") as file:
        return error_in(file)


def results_of(folder: Path, ended: Outcome) -> list[Any]:
    """By rank, what the function has returned, if ``error_of`` finds no error.

    Raises:
        HvkitError: a result cannot be unpickled here; the message says where all are kept.
    """
    return results_in([outcome_in(folder, rank) for rank in range(ended.size)])


def _ended_in(folder: Path) -> Path:
    return folder / "ended"
