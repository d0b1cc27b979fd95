"""``hvkit completion``: what a shell needs to complete the arguments of ``hvkit``."""

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from hvkit.cli.command_parser import CommandParser
from hvkit.errors import HvkitError

SHELLS = ("bash", "zsh", "tcsh", "fish")


def add_to(
    commands: "argparse._SubParsersAction[CommandParser]", whole: Callable[[], CommandParser]
) -> None:
    """Add ``hvkit completion``.

    Args:
        commands: those of ``hvkit``.
        whole: returns the parser of ``hvkit``.
    """
    parser = commands.add_parser(
        "completion",
        help="print what a shell needs to complete hvkit's arguments",
        description="Print a script with which a shell completes the commands and options of "
        "hvkit. It needs shtab: `pip install shtab`.",
        examples={
            'eval "$(hvkit completion bash)"': "for this shell (in ~/.bashrc: for all)",
            'hvkit completion zsh > "${fpath[1]}/_hvkit"': "for every zsh",
        },
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"{', '.join(SHELLS)}")
    parser.set_defaults(execute=functools.partial(_completion, whole))


def _completion(whole: Callable[[], CommandParser], args: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError:
        raise HvkitError(
            "there is no shtab, which writes completions: `pip install shtab`"
        ) from None
    hvkit = whole()
    for action in _actions(hvkit):
        if action.type is Path or action.nargs == argparse.REMAINDER:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(hvkit, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The actions of a parser and its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
