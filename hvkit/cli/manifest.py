"""``hvkit manifest``: reads the options of ``manifest_options``, and prints what they make."""

import argparse
import sys
import textwrap
from collections.abc import Sequence

from hvkit.cli.arguments import (
    COMMAND_BEGINS,
    COMMAND_MISSING,
    add_watching,
    watching,
)
from hvkit.cli.command_parser import CommandParser, checked
from hvkit.cli.foreign_options import FOREIGN_IN_MANIFESTS
from hvkit.cli.manifest_options import SYSTEMS, Option, System, options_of
from hvkit.manifest import fields
from hvkit.manifest.fields import HvkitRun, Size

_COLUMNS = 80


def add_to(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "manifest",
        help="write what Kubernetes, Slurm, SageMaker or Azure ML needs to start a script on ranks",
        description="Write a description of a run to standard output.",
        allow_abbrev=False,
    )
    systems = parser.add_subparsers(title="systems", required=True, metavar="SYSTEM")
    for system in SYSTEMS:
        _add_system(systems, system)


def _add_system(systems: "argparse._SubParsersAction[CommandParser]", system: System) -> None:
    required = [option.name for option in options_of(system) if option.required]
    parser = systems.add_parser(
        system.name,
        help=system.help,
        usage=_wrapped(f"hvkit manifest {system.name} {' '.join(required)} [options] COMMAND ..."),
        description=system.description,
        foreign=FOREIGN_IN_MANIFESTS,
        allow_abbrev=False,
    )
    for option in options_of(system):
        name, metavar = option.name.split()
        parser.add_argument(
            name,
            *option.aliases,
            type=checked(option.of[system.name]),
            metavar=metavar,
            help=_help(option, system),
            default=[] if option.repeated else option.default,
            action="append" if option.repeated else "store",
        )
    if system.starts_hvkit_run:
        add_watching(parser)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND ...",
        help="a script, or a program with its arguments; options after it are its own",
    )
    parser.set_defaults(execute=_execute, system=system)


def _wrapped(usage: str) -> str:
    return textwrap.fill(
        usage, _COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _help(option: Option, system: System) -> str:
    text = option.help.format(host=system.host, noun=system.noun)
    if option.required:
        text += " (required)"
    if option.default is not None:
        text += f" (default: {option.default})"
    return text.strip() + ("; may be repeated" if option.repeated else "")


def _execute(args: argparse.Namespace) -> int:
    try:
        run = _run_of(args)
        text = args.system.write(vars(args), run)
    except ValueError as error:
        args.refuse(str(error))
    size = run.size
    if size.idle:
        print(
            f"hvkit: note: {size.ranks} ranks on {size.hosts} x {size.slots} slots; idle slots on "
            f"the last host: {size.idle}, with the resources that are reserved for them",
            file=sys.stderr,
        )
    print(text, end="")
    return 0


def _run_of(args: argparse.Namespace) -> HvkitRun:
    """The ``hvkit run`` that the arguments describe; refuses those that do not go together."""
    # Not by argparse, which would complain about a missing option before an unknown one.
    for name in (option.name.split()[0] for option in options_of(args.system) if option.required):
        if getattr(args, name.strip("-").replace("-", "_")) is None:
            raise ValueError(f"{name} is missing")
    return HvkitRun(
        size=Size.of(args.np, args.slots),
        command=_command_of(args),
        variables=_variables_of(args),
        options=_run_options_of(args),
    )


def _command_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The command, without a ``--`` before it."""
    words: Sequence[str] = args.command
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise ValueError(COMMAND_MISSING)
    if not command[0] or command[0].startswith("-"):
        raise ValueError(f"{COMMAND_BEGINS}, got {command[0]!r}")
    return tuple(map(fields.utf8, command))


def _variables_of(args: argparse.Namespace) -> dict[str, str]:
    """The environment variables for ranks; each may be set once."""
    variables: dict[str, str] = {}
    for name, value in args.env:
        if name in variables:
            raise ValueError(f"argument --env: {name} is set twice: set each variable once")
        variables[name] = value
    return variables


def _run_options_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The options for ``hvkit run``, one word each; refuses to show ranks that do not exist."""
    if not args.system.starts_hvkit_run:
        return ()
    for some in args.show or ():
        if some[-1] >= args.np:
            raise ValueError(
                f"argument --show: there is no rank {some[-1]}: ranks are numbered from 0 to "
                f"{args.np - 1}"
            )
    return tuple(map(fields.utf8, watching(args)))
