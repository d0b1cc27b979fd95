"""The parser of ``hvkit`` and its subcommands: errors with the subcommand's usage, and examples.

Also ``hvkit completion``, which reads the parser.
"""

import argparse
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvkit.errors import HvkitError

SHELLS = ("bash", "zsh", "tcsh", "fish")


class CommandParser(argparse.ArgumentParser):
    """A parser whose subcommands report wrong arguments themselves, below their own usage.

    argparse leaves unknown options to the main parser, which shows its own usage. A command may end
    with such an error, too: ``args.refuse(message)``. ``examples`` are command lines, with what
    each does; ``foreign`` says what to write instead of an option of other launchers.
    """

    def __init__(
        self,
        *,
        examples: Mapping[str, str] | None = None,
        foreign: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.examples = dict(examples or {})
        lines = (f"  {command}\n      {meaning}" for command, meaning in self.examples.items())
        epilog = "\n".join(["examples:", *lines]) if self.examples else None
        super().__init__(**kwargs, epilog=epilog, formatter_class=_HelpFormatter)
        self.set_defaults(refuse=self.error)
        hidden: Any = dict.fromkeys(("dest", "default", "help"), argparse.SUPPRESS)
        for option, advice in (foreign or {}).items():
            self.add_argument(option, **hidden, nargs="?", action=_Foreign, const=advice)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments; an unknown one is an error."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._explained(unknown))
        return found, []

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """The options that an abbreviation may stand for.

        argparse completes options with one dash even without ``allow_abbrev``. Here it completes
        none of the hidden ones, but ``-N2`` still is ``-N 2``.
        """
        return [
            found
            for found in super()._get_option_tuples(option_string)
            if not isinstance(found[0], _Foreign) or found[1] == option_string[:2]
        ]

    def _explained(self, unknown: Sequence[str]) -> str:
        known = [
            option
            for action in self._actions
            if action.help is not argparse.SUPPRESS
            for option in action.option_strings
        ]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1, cutoff=0.75)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"unrecognized arguments: {' '.join(unknown)}{hint}"


class _Foreign(argparse.Action):
    """An option of another launcher; its ``const`` is what to write instead."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string} is not an option of {parser.prog}: {self.const}")


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of examples, and wraps other texts."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def checked(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type that reports the ``ValueError`` of ``check`` with its own message."""

    def converted(text: str) -> Any:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


def add_completion(
    commands: "argparse._SubParsersAction[CommandParser]", whole: Callable[[], CommandParser]
) -> None:
    """Add ``hvkit completion``."""
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
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
