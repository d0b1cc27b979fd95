"""The parser of ``hvkit`` and its subcommands: errors with the subcommand's usage, and examples."""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser whose subcommands report wrong arguments themselves, below their own usage.

    argparse leaves unknown options to the main parser, which shows its own usage.

    Args:
        examples: command lines, each with what it does; shown below the options.
        foreign: by option of other launchers, what to write instead.
        kwargs: as for ``argparse.ArgumentParser``.
    """

    def __init__(
        self,
        *,
        examples: Mapping[str, str] | None = None,
        foreign: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.examples = dict(examples or {})
        super().__init__(
            **kwargs, epilog=_examples_text(self.examples), formatter_class=_HelpFormatter
        )
        for option, advice in (foreign or {}).items():
            self.add_argument(
                option,
                dest=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
                nargs="?",
                action=_Foreign,
                const=advice,
                help=argparse.SUPPRESS,
            )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments; an unknown one is an error."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._explained(unknown))
        return found, []

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an abbreviation may stand for.

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
        """Refuse it."""
        parser.error(f"{option_string} is not an option of {parser.prog}: {self.const}")


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of examples, and wraps other texts."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return super()._fill_text(text, width, indent)


def _examples_text(examples: Mapping[str, str]) -> str | None:
    if not examples:
        return None
    lines = (f"  {command}\n      {meaning}" for command, meaning in examples.items())
    return "\n".join(["examples:", *lines])
