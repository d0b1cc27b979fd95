"""``hvkit manifest``: reads the options of ``manifest_options``, and prints what they make."""

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvkit.cli.arguments import (
    COMMAND_BEGINS,
    COMMAND_MISSING,
    add_watching,
    watching,
)
from hvkit.cli.command_parser import CommandParser
from hvkit.cli.foreign_options import FOREIGN_IN_MANIFESTS
from hvkit.cli.manifest_options import SYSTEMS, Option, System, options_of
from hvkit.manifest import fields

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
            type=_argument_type(option.of[system.name]),
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
    parser.set_defaults(execute=_execute, system=system, refuse=parser.error)


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


def _argument_type(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type that reports the ``ValueError`` of ``check`` with its own message."""
    if check is Path:  # for which shells complete files
        return check

    def converted(text: str) -> Any:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


def _execute(args: argparse.Namespace) -> int:
    try:
        values = _values_of(args)
        text = args.system.write(values, values.pop("template"))
    except ValueError as error:
        args.refuse(str(error))
    ranks, hosts, slots = (values[name] for name in ("np", "hosts", "slots"))
    if idle := hosts * slots - ranks:
        print(
            f"hvkit: note: {ranks} ranks on {hosts} x {slots} slots; idle slots on the last host: "
            f"{idle}, with the resources that are reserved for them",
            file=sys.stderr,
        )
    print(text, end="")
    return 0


def _values_of(args: argparse.Namespace) -> dict[str, Any]:
    """What ``hvkit.manifest.systems`` takes; refuses arguments that do not go together."""
    values = {}
    for option in options_of(args.system):
        given, name = getattr(args, option.dest), option.name.split()[0]
        # Not by argparse, which would complain about a missing option before an unknown one.
        if option.required and given is None:
            raise ValueError(f"{name} is missing")
        if option.repeated is dict:
            for each, times in Counter(each for each, _ in given).items():
                if times > 1:
                    raise ValueError(f"argument {name}: {each} is set {times} times: set it once")
            given = dict(given)
        values[option.dest] = given
    # As with mpirun, the last host may run fewer ranks than the others. All of its slots still
    # reserve resources: Kubernetes and Slurm describe all hosts at once.
    ranks, slots = args.np, min(args.slots, args.np)
    values |= {"slots": slots, "hosts": -(-ranks // slots)}
    if args.system.starts_hvkit_run:
        for shown in args.show or ():
            if shown[-1] >= ranks:
                raise ValueError(
                    f"argument --show: there is no rank {shown[-1]}: ranks are numbered from 0 to "
                    f"{ranks - 1}"
                )
        values |= {"grace": args.grace, "max_restarts": args.max_restarts}
        values["run_options"] = tuple(map(fields.utf8, watching(args)))
    return {**values, "command": _command_of(args)}


def _command_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The command, without a ``--`` before it."""
    words: Sequence[str] = args.command
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise ValueError(COMMAND_MISSING)
    if not command[0] or command[0].startswith("-"):
        raise ValueError(f"{COMMAND_BEGINS}, got {command[0]!r}")
    return tuple(map(fields.utf8, command))
