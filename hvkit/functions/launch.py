"""``hvkit.launch``: runs a function on ranks, from a script or a notebook."""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hvkit.argument_checks import check_count, check_path
from hvkit.cli.command_parser import CommandParser
from hvkit.cli.run import add_to, request_of
from hvkit.errors import HvkitError, LaunchError, RankLostError, UsageError
from hvkit.functions import starter
from hvkit.functions.outcomes import error_in, result_in
from hvkit.functions.pickling import write_call
from hvkit.functions.streams import follow
from hvkit.host.call_folder import PREFIX, call_in, outcome_in
from hvkit.host.launcher_variables import launched
from hvkit.launching.prepare import Request
from hvkit.launching.supervision.supervised_run import Outcome
from hvkit.runtime import is_below_rank

R = TypeVar("R")

_EXAMPLE = "hvkit.launch(train, np=2)"


def launch(
    function: Callable[..., R],
    /,
    *args: Any,
    np: int | None = None,
    hosts: str | Sequence[str] | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    options: str | Sequence[str] = (),
    **kwargs: Any,
) -> list[R]:
    """Run a function on several ranks, and return what it returns on each.

    Each rank is a new process that calls ``function(*args, **kwargs)``. Output is shown as it is
    printed, an exception is raised here with its own type, and Ctrl-C, or a notebook's stop button,
    ends all ranks. This process itself trains nothing, and does not touch GPUs.

    Functions, classes, arguments and results travel by cloudpickle: they may come from a notebook's
    cells. What they take from modules is imported on the ranks. Tensors on GPUs come back in host
    memory.

    Args:
        function: the function, not its result.
        *args: arguments of the function.
        np: the number of ranks; by default one in each slot of the hosts, or for each GPU of this
            host.
        hosts: as ``-H`` of ``hvkit run``: ``"node1:4,node2:4"``, or a list of such hosts; by
            default those of the batch system, or this host.
        hostfile: a file of hosts, as ``--hostfile``.
        options: further options of ``hvkit run``: ``"--max-restarts 3 --prefix"``, or a list of
            words.
        **kwargs: named arguments of the function. For one with a name of those above, pass
            ``functools.partial(function, np=...)``.

    Returns:
        By rank, what the function has returned there.

    Raises:
        Exception: what the function has raised on the rank that failed first; a note has the
            traceback of that rank.
        TypeError: the function, an argument or a result cannot be pickled.
        RankLostError: a rank was killed, or has ended without returning.
        LaunchError: the ranks cannot be started; this process is a rank itself.
        HostfileError: the hosts are malformed.
    """
    if not callable(function):
        raise TypeError(
            f"hvkit.launch needs a function, got {function!r}: pass the function itself, not its "
            f"result: {_EXAMPLE}"
        )
    _refuse_on_ranks()
    request = _request(function, np, hosts, hostfile, options)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with call_in(folder).open("wb") as file:
            write_call(file, function, args, kwargs)
        ended = _run(request, folder)
        if (error := _error(folder, ended)) is not None:
            raise error
        return [_result(folder, rank) for rank in range(ended.size)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_on_ranks() -> None:
    found = launched(os.environ)
    # A notebook's server may be the only task of an srun.
    is_rank = found is not None and (found.size, found.launcher) != (1, "srun")
    if is_rank or is_below_rank():
        raise LaunchError(
            "hvkit.launch was called on a rank: it starts ranks itself. Call it in a script that "
            'you start with python, under if __name__ == "__main__", or in a notebook; on a rank, '
            "call the function directly"
        )


class _Options(CommandParser):
    """The parser of ``hvkit run``'s options; wrong ones raise."""

    def error(self, message: str) -> NoReturn:
        """Raise ``UsageError``."""
        raise UsageError(f"hvkit.launch: {message}")


def _request(
    function: Callable[..., object],
    np: int | None,
    hosts: str | Sequence[str] | None,
    hostfile: str | os.PathLike[str] | None,
    options: str | Sequence[str],
) -> Request:
    """The request that ``hvkit run`` would make of these."""
    words = shlex.split(options) if isinstance(options, str) else [*options]
    if np is not None:
        words += ["-np", str(check_count("np", np))]
    if hosts is not None:
        words += ["-H", hosts if isinstance(hosts, str) else ",".join(hosts)]
    if hostfile is not None:
        words += ["--hostfile", str(check_path("hostfile", hostfile, 'hostfile="hosts"'))]
    parser: CommandParser = _Options(prog="hvkit.launch")
    add_to(parser.add_subparsers())
    args = parser.parse_args(["run", *words])
    if args.command or args.dry_run:
        wrong = "--dry-run" if args.dry_run else args.command[0]
        raise UsageError(
            "options of hvkit.launch are those of `hvkit run` before COMMAND, without --dry-run; "
            f"got {wrong!r}"
        )
    name = getattr(function, "__name__", "")  # for hvkit top
    named = [name] if name.isidentifier() else []
    command = [sys.executable, "-P", "-m", "hvkit.functions.rank", *named]
    return request_of(args, command)


def _run(request: Request, folder: Path) -> Outcome:
    """Start the ranks in ``starter``, and show what they print until they have ended."""
    starter.request_in(folder).write_bytes(pickle.dumps(request))
    command = [sys.executable, "-P", "-m", "hvkit.functions.starter", str(folder)]
    process = subprocess.Popen(
        [*command, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C in a terminal, or a notebook's, must reach this process only, which passes it on.
        process_group=0,
    )
    follow(process)
    try:
        ended = pickle.loads(starter.ended_in(folder).read_bytes())
    except FileNotFoundError:
        how = process.returncode
        how = f"killed by {signal.Signals(-how).name}" if how < 0 else f"status {how}"
        raise LaunchError(
            f"the process that supervises the ranks has ended before them ({how}): look for the "
            "reason above"
        ) from None
    if isinstance(ended, HvkitError):
        raise ended
    outcome: Outcome = ended
    return outcome


def _error(folder: Path, ended: Outcome) -> Exception | None:
    """Why there are no results: what the first failed rank has raised, or how it has ended."""
    first = outcome_in(folder, -1 if ended.rank is None else ended.rank)
    if ended.status and first.exists():
        with first.open("rb") as file:
            if (error := error_in(file)) is not None:
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


def _result(folder: Path, rank: int) -> Any:
    with outcome_in(folder, rank).open("rb") as file:
        return result_in(file, rank)
