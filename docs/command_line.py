"""Writes docs/cli.md, the page about the command line, from hvkit's parsers.

python docs/command_line.py
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from hvkit.cli import parser

PAGE = Path(__file__).parent / "cli.md"

BEGIN = """# Command line

`hvkit` and `python -m hvkit` are the same. The exit status is 0 if all went well, 1
after a failure or if there are problems, 2 for wrong arguments, 130 after Ctrl-C, and
141 if the program that reads the output, such as `head`, has ended.

The exit status of `hvkit run` is that of the rank that failed first. It is 127 if a
host lacks the command, 126 if a host cannot start it, and 128 plus a signal's number
after that signal.

<!-- python docs/command_line.py writes this page. -->
"""

END = """
Next: [Several hosts](hosts.md), [When ranks die](restarts.md),
[Installation](install.md).
"""


def page() -> str:
    """The text of the page."""
    hvkit = parser()
    rows = (f"| {link} | {text} |" for link, text in _helps(hvkit))
    sections = "".join(_section(each) for each in _commands(hvkit))
    return "\n".join([BEGIN, "| Command | |", "|---|---|", *rows, ""]) + sections + END


def _helps(hvkit: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """A link to each command, and its line in ``hvkit --help``."""
    for group in hvkit._actions:
        if isinstance(group, argparse._SubParsersAction):
            for choice in group._choices_actions:
                first = next(_commands(group.choices[choice.dest]))
                link = f"[`{hvkit.prog} {choice.dest}`](#{_anchor(first.prog)})"
                yield link, _text(choice.help)


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands, except parsers that only have subcommands."""
    nested = [
        each for each in parser._actions if isinstance(each, argparse._SubParsersAction)
    ]
    if not nested:
        yield parser
    for each in nested:
        for command in each.choices.values():
            yield from _commands(command)


def _section(command: argparse.ArgumentParser) -> str:
    lines = ["", f"## {command.prog}", "", _text(command.description), "", "```text"]
    lines += [command.usage or _usage(command), "```"]
    if examples := getattr(command, "examples", {}):
        width = max(map(len, examples))
        lines += [
            "",
            "```sh",
            *(f"{line:{width}}  # {text}" for line, text in examples.items()),
        ]
        lines += ["```"]
    for group in command._action_groups:
        if rows := [_row(action) for action in group._group_actions if _shown(action)]:
            title = {"positional arguments": "arguments"}.get(
                group.title or "", group.title
            )
            lines += ["", f"| {_text(title).capitalize()} | |", "|---|---|", *rows]
    return "\n".join([*lines, ""])


def _usage(command: argparse.ArgumentParser) -> str:
    positionals = [action for action in command._actions if not action.option_strings]
    forms = {"?": "[{}]", "+": "{} ..."}
    words = (forms.get(str(a.nargs), "{}").format(a.metavar) for a in positionals)
    return " ".join([command.prog, "[options]", *words])


def _shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not isinstance(
        action, argparse._HelpAction
    )


def _row(action: argparse.Action) -> str:
    value = action.metavar or "|".join(map(str, action.choices or ()))
    if not value and action.nargs != 0:
        value = action.dest.upper()
    names = ", ".join(action.option_strings)
    return f"| `{_cell(f'{names} {value}'.strip())}` | {_cell(_text(action.help))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _text(text: str | None) -> str:
    # `<` would start an HTML tag.
    return (text or "").replace("<", "&lt;")


def _anchor(name: str) -> str:
    return re.sub(r"\W+", "-", name)


if __name__ == "__main__":
    PAGE.write_text(page())
