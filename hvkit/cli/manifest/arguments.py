"""The arguments of ``hvkit manifest`` that are the same for every system."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from hvkit.cli.argument_types import positive
from hvkit.cli.run_arguments import add_watching, watching
from hvkit.manifest import Size, names

_T = TypeVar("_T")


def add_size(parser: argparse.ArgumentParser, host: str) -> None:
    """Add the numbers of ranks, and of ranks and GPUs of a host, which is called ``host``."""
    parser.add_argument("-np", type=positive, metavar="N", help="ranks (required)")
    parser.add_argument(
        "--slots",
        type=positive,
        metavar="N",
        help=f"ranks per {host}, at most; the last {host} may have fewer (required)",
    )
    parser.add_argument("--gpus", type=positive, default=0, metavar="N", help="GPUs for each rank")


def add_run(parser: argparse.ArgumentParser, manifest: str) -> None:
    """Add what ``hvkit run`` is told besides; ``manifest`` is the word for what is written."""
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        type=checked(names.assignment),
        metavar="NAME=VALUE",
        help=f"environment variable for all ranks, readable in the {manifest}: no secrets; "
        "may be repeated",
    )
    add_watching(parser)


def add_command(
    parser: argparse.ArgumentParser, rendered: Callable[[argparse.Namespace], str]
) -> None:
    """Add the command that ranks run; ``rendered`` makes the text that is to be written."""
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND ...",
        help="what every rank runs; options after it are its own",
    )
    parser.set_defaults(execute=_execute, rendered=rendered, refuse=parser.error)


def size_of(args: argparse.Namespace) -> Size:
    """The size of the run."""
    return Size.of(args.np, args.slots)


def variables_of(args: argparse.Namespace) -> dict[str, str]:
    """The environment variables for ranks.

    Raises:
        ValueError: one of them is there twice.
    """
    variables = dict(args.env)
    if len(variables) < len(args.env):
        raise ValueError("argument --env: a variable is there twice: name each once")
    return variables


def run_options_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The options that ``hvkit run`` gets as they are.

    Raises:
        ValueError: one of them is no text, or there is no rank that is to be shown.
    """
    for some in args.show or ():
        if some[-1] >= args.np:
            raise ValueError(
                f"argument --show: there is no rank {some[-1]}: they are numbered from 0 to "
                f"{args.np - 1}"
            )
    return tuple(map(names.unicode, watching(args)))


def command_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The command without the ``--`` that may stand before it.

    Raises:
        ValueError: there is none.
    """
    words: Sequence[str] = args.command
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise ValueError("COMMAND is missing: what every rank runs, such as `python script.py`")
    if not command[0] or command[0].startswith("-"):
        raise ValueError(
            f"COMMAND must begin with a program, such as `python script.py`, got {command[0]!r}"
        )
    return tuple(map(names.unicode, command))


def checked(check: Callable[[str], _T]) -> Callable[[str], _T]:
    """A type of arguments that says what ``check`` says when it refuses."""

    def converted(text: str) -> _T:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


def _execute(args: argparse.Namespace) -> int:
    try:
        _refuse_missing(args)
        text = args.rendered(args)
    except ValueError as error:
        args.refuse(str(error))
    size = size_of(args)
    if size.idle:
        print(
            f"hvkit: note: {size.hosts} x {size.slots} slots for {size.ranks} ranks: {size.idle} "
            "of the last stay idle, with what is reserved for them",
            file=sys.stderr,
        )
    print(text, end="")
    return 0


def _refuse_missing(args: argparse.Namespace) -> None:
    """Refuse what argparse would refuse, too, but before it names options that it does not know."""
    for option, name in (("--image", "image"), ("-np", "np"), ("--slots", "slots")):
        if getattr(args, name, "not an option") is None:
            raise ValueError(f"{option} is missing")
