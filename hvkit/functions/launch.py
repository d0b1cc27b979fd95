"""``hvkit.launch``: runs a function on ranks, from a script or a notebook."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from hvkit.argument_checks import check_count, check_path
from hvkit.cli.command_line import CommandParser
from hvkit.cli.run import add_to, request_of
from hvkit.errors import UsageError
from hvkit.functions import supervised
from hvkit.functions.pickling import call_folder, check_environ, check_function
from hvkit.functions.rank import command_of_rank
from hvkit.launching.allocation import leave_to_first
from hvkit.launching.preflight import working_directory
from hvkit.launching.prepare import Request
from hvkit.log import logger

R = TypeVar("R")


def launch(
    function: Callable[..., R],
    /,
    *args: Any,
    np: int | None = None,
    hosts: str | Sequence[str] | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    options: str | Sequence[str] = (),
    env: Mapping[str, str] | None = None,
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
            default the batch system's, or this host.
        hostfile: a file of hosts, as ``--hostfile``.
        options: further options of ``hvkit run``: ``"--max-restarts 3 --prefix"``, or a list of
            words.
        env: environment variables of the ranks, besides this process's.
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
        SystemExit: SageMaker has started this script on another host than the first of its job,
            which starts the ranks, and that host has ended.
    """
    check_function("hvkit.launch", function, "hvkit.launch(train, np=2)")
    supervised.refuse_on_ranks("hvkit.launch")
    try:
        request = _request(function, np, hosts, hostfile, options)
    except UsageError as problem:
        if np is None and "num_proc" in kwargs:
            problem.add_note("num_proc= goes to the function; the number of ranks is np=")
        raise
    variables = {**request.variables, **check_environ("hvkit.launch", env)}
    if leave_to_first(request.system, request.hosts):
        logger.info("%s has ended, and with it the ranks: this script ends", request.hosts[0].name)
        raise SystemExit(0)
    working_directory()
    with call_folder(function, args, kwargs) as folder:
        process = supervised.begin(replace(request, variables=variables, call=folder), folder)
        supervised.follow(process)
        ended = supervised.outcome_of(process, folder)
        if (error := supervised.error_of(folder, ended)) is not None:
            raise error
        return supervised.results_of(folder, ended)


def _request(
    function: Callable[..., object],
    np: int | None,
    hosts: str | Sequence[str] | None,
    hostfile: str | os.PathLike[str] | None,
    options: str | Sequence[str],
) -> Request:
    arguments: dict[str, Any] = {}
    if np is not None:
        arguments["np"] = check_count("np", np)
    if hosts is not None:
        listed = [hosts] if isinstance(hosts, str) else _words("hosts", hosts, '"node1:4,node2:4"')
        arguments["hosts"] = ",".join(listed)
    if hostfile is not None:
        arguments["hostfile"] = check_path("hostfile", hostfile, 'hostfile="hosts"')
    args = _parsed(options)
    for name, value in arguments.items():
        if getattr(args, name) is not None:
            raise UsageError(
                f"hvkit.launch: {name}={value!r} and options={options!r} both say it: leave it out "
                "of options"
            )
        setattr(args, name, value)
    if args.hosts is not None and args.hostfile is not None:
        raise UsageError("hvkit.launch: hosts and hostfile exclude each other: pass one of them")
    args.from_python = True
    return request_of(args, command_of_rank(function))


def _parsed(options: str | Sequence[str]) -> Namespace:
    try:
        words = (
            shlex.split(options)
            if isinstance(options, str)
            else _words("options", options, '"--stall 60"')
        )
    except ValueError as problem:
        raise UsageError(
            f"hvkit.launch: options={options!r} cannot be divided into words ({problem}): close "
            "the quote, or pass a list of words"
        ) from problem
    parser: CommandParser = _Options(prog="hvkit.launch")
    add_to(parser.add_subparsers())
    args = parser.parse_args(["run", *words])
    if args.command or args.dry_run:
        wrong = "--dry-run" if args.dry_run else args.command[0]
        raise UsageError(
            "options of hvkit.launch are those of `hvkit run` before COMMAND, without --dry-run; "
            f"got {wrong!r}"
        )
    return args


def _words(name: str, value: object, example: str) -> list[str]:
    words: list[Any] = [*value] if isinstance(value, Iterable) else [value]
    if wrong := [word for word in words if not isinstance(word, str)]:
        raise TypeError(
            f"hvkit.launch: {name} must be a str or a list of them, got {wrong[0]!r}: "
            f"{name}={example}"
        )
    return words


class _Options(CommandParser):
    """The parser of ``hvkit run``'s options; wrong ones raise."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"hvkit.launch: {message}")

    def print_help(self, file: object = None) -> NoReturn:
        """Raise ``UsageError``: this is no command, whose help would end the process."""
        self.error("options has --help: `hvkit run --help` lists the options")
