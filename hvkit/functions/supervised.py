"""The process that supervises the ranks of a function: ``python -m hvkit.functions.supervised``.

It starts the ranks as ``hvkit run`` does; for ``hvkit.spark.run``, Spark starts them. Supervision
handles signals, for which the main thread of a notebook's kernel is not free. A notebook also
replaces ``sys.stdout`` and ``sys.stderr``, and has no terminal that the process could write to:
``follow`` shows there what the process prints.
"""

from __future__ import annotations

import codecs
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from hvkit.cli import set_home
from hvkit.errors import HvkitError, LaunchError, RankLostError
from hvkit.functions.outcomes import error_in, picklable, results_in
from hvkit.host.call_folder import outcome_in, written
from hvkit.host.rank_variables import launched
from hvkit.launching.prepare import Request
from hvkit.launching.start import start
from hvkit.launching.supervision import run_status
from hvkit.launching.supervision.processes import ends_with_parent
from hvkit.launching.supervision.supervised_run import Outcome, SupervisedRun, supervise
from hvkit.runtime import is_below_rank

_THIS = "hvkit.functions.supervised"
_READ = 1 << 16


def refuse_on_ranks(user: str) -> None:
    """Raise ``LaunchError``, for this user, if this process is a rank, or one has started it."""
    found = launched(os.environ)
    # A notebook's server may be the only task of an srun.
    is_rank = found is not None and (found.size, found.launcher) != (1, "srun")
    if is_rank or is_below_rank():
        raise LaunchError(
            f"{user} was called on a rank: it starts ranks itself. Call it in a script that you "
            'start with python, under if __name__ == "__main__", or in a notebook; on a rank, call '
            "the function directly"
        )


def begin(run: Request | SupervisedRun, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that runs these ranks; both of its streams are pipes.

    Args:
        run: the ranks to start; or those that somebody else starts, and how to supervise them.
        folder: of the call.
    """
    _run_in(folder).write_bytes(pickle.dumps(run))
    # The process inherits that SIGINT waits, until ``main`` can handle it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", _THIS, str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C in a terminal, or a notebook's, must reach this process only, which passes it
            # on.
            process_group=0,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main(folder: Path, parent: int) -> None:
    """In that process: run the ranks to their end, and leave their outcome in the folder.

    The ranks end, and the folder is removed, when the parent ends before.
    """
    try:
        if os.getppid() != parent:
            return
        # Before the run handles Ctrl-C there is nothing to end but this process.
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        ends_with_parent(signal.SIGTERM, parent)()
        set_home()
        try:
            ended = pickle.dumps(_run(pickle.loads(_run_in(folder).read_bytes())))
        except HvkitError as error:
            ended = picklable(error)
        with written(_ended_in(folder)) as file:
            file.write(ended)
    finally:
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)


def _run(run: Request | SupervisedRun) -> Outcome:
    if isinstance(run, Request):
        return start(run)
    with run_status.serve(run.status.read):
        return supervise(run)


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
    """The exception of the function on the rank that failed first; None if there was none."""
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


def _run_in(folder: Path) -> Path:
    return folder / "run"


def _ended_in(folder: Path) -> Path:
    return folder / "ended"


def follow(process: subprocess.Popen[bytes]) -> None:
    """Show what a process prints until it ends.

    A KeyboardInterrupt is passed on to the process as SIGINT, as often as it comes, and raised when
    the process has ended. After any other exception, such as one of a ``sys.stdout`` that cannot
    be written, the process gets SIGTERM.

    Args:
        process: with pipes as both streams.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    interrupted: KeyboardInterrupt | None = None
    make = codecs.getincrementaldecoder("utf-8")
    decoders = {"stdout": make("replace"), "stderr": make("replace")}
    with selectors.DefaultSelector() as selector, process:
        selector.register(process.stdout, selectors.EVENT_READ, "stdout")
        selector.register(process.stderr, selectors.EVENT_READ, "stderr")
        try:
            while True:
                try:
                    _show(selector, decoders)
                    process.wait()
                    break
                except KeyboardInterrupt as interrupt:
                    interrupted = interrupted or interrupt
                    process.send_signal(signal.SIGINT)
        except BaseException:
            process.terminate()
            _drop(selector)
            raise
    if interrupted is not None:
        raise interrupted.with_traceback(None)


def _show(
    selector: selectors.BaseSelector, decoders: Mapping[str, codecs.IncrementalDecoder]
) -> None:
    while selector.get_map():
        for key, _ in selector.select():
            data = os.read(key.fd, _READ)
            _print(getattr(sys, key.data), decoders[key.data].decode(data, final=not data))
            if not data:
                selector.unregister(key.fileobj)


def _print(stream: TextIO | None, text: str) -> None:
    """Print to one of this process's streams: nothing to one that is closed, as ``print`` does."""
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:  # ranks may print what Latin-1, for instance, does not have
        stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
    stream.flush()


def _drop(selector: selectors.BaseSelector) -> None:
    """Read both streams to their ends, so that the process can write and end."""
    while selector.get_map():
        for key, _ in selector.select():
            if not os.read(key.fd, _READ):
                selector.unregister(key.fileobj)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
