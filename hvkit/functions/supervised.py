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
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from hvkit.cli import set_home
from hvkit.errors import HvkitError, LaunchError, RankLostError
from hvkit.functions.outcomes import error_in, picklable, results_in
from hvkit.host.rank_variables import launched
from hvkit.launching.prepare import Request
from hvkit.launching.start import start
from hvkit.launching.supervision import run_status
from hvkit.launching.supervision.processes import ends_with_parent
from hvkit.launching.supervision.protocol import outcome_in, written
from hvkit.launching.supervision.supervised_run import Outcome, SupervisedRun, supervise
from hvkit.runtime import is_below_rank

# Files in the folder of the call: the ranks to start, and how they have ended.
_RUN, _ENDED = "run", "ended"


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
    """Start the process that runs these ranks; both of its streams are pipes."""
    (folder / _RUN).write_bytes(pickle.dumps(run))
    command = [sys.executable, "-P", "-m", "hvkit.functions.supervised"]
    # The process inherits that SIGINT waits, until ``main`` can handle it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [*command, str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C reaches the parent only, which passes it on
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
            ended = pickle.dumps(_run(pickle.loads((folder / _RUN).read_bytes())))
        except HvkitError as error:
            ended = picklable(error)
        with written(folder / _ENDED) as file:
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
    """How the ranks have ended; raises ``HvkitError`` if they could not be started."""
    try:
        ended: Outcome | HvkitError = pickle.loads((folder / _ENDED).read_bytes())
    except FileNotFoundError:
        how = process.returncode
        raise LaunchError(
            "the process that supervises the ranks has ended before them ("
            + (f"killed by {signal.Signals(-how).name}" if how < 0 else f"status {how}")
            + "): look for the reason above"
        ) from None
    if isinstance(ended, HvkitError):
        raise ended
    return ended


def error_of(folder: Path, ended: Outcome) -> BaseException | None:
    """Why there are no results: what the first failed rank has raised, or how it has ended."""
    if ended.status:
        if (error := raised_by_first(folder, ended)) is not None:
            return error
        reason = ended.reason or f"the ranks have ended with status {ended.status}"
        return LaunchError(reason) if ended.rank is None else RankLostError(reason)
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
    """By rank, what the function has returned, if ``error_of`` finds no error."""
    return results_in([outcome_in(folder, rank) for rank in range(ended.size)])


def follow(process: subprocess.Popen[bytes]) -> None:
    """Show what a process prints until it ends.

    A KeyboardInterrupt is passed on to the process as SIGINT, as often as it comes, and raised when
    the process has ended. After any other exception, such as one of a ``sys.stdout`` that cannot
    be written, the process gets SIGTERM.
    """
    interrupted: KeyboardInterrupt | None = None
    make = codecs.getincrementaldecoder("utf-8")
    decoders = {"stdout": make("replace"), "stderr": make("replace")}
    with selectors.DefaultSelector() as selector, process:
        for name in decoders:
            selector.register(getattr(process, name), selectors.EVENT_READ, name)
        try:
            while True:
                try:
                    for name, data in _pieces(selector):
                        text = decoders[name].decode(data, final=not data)
                        _print(getattr(sys, name), text)
                    process.wait()
                    break
                except KeyboardInterrupt as interrupt:
                    interrupted = interrupted or interrupt
                    process.send_signal(signal.SIGINT)
        except BaseException:
            process.terminate()
            deque(_pieces(selector), maxlen=0)  # reads on, so that the process can write and end
            raise
    if interrupted is not None:
        raise interrupted.with_traceback(None)


def _pieces(selector: selectors.BaseSelector) -> Iterator[tuple[str, bytes]]:
    """What comes from the streams, with their names, until both have ended; ends are empty."""
    while selector.get_map():
        for key, _ in selector.select():
            data = os.read(key.fd, 1 << 16)
            if not data:
                selector.unregister(key.fileobj)
            yield key.data, data


def _print(stream: TextIO | None, text: str) -> None:
    """Print to one of this process's streams: nothing to one that is closed, as ``print`` does."""
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:  # ranks may print what Latin-1, for instance, does not have
        stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
    stream.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
