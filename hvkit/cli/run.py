"""``hvkit run``: start a command on every rank and watch it."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from hvkit.cli.arguments import (
    add_command,
    add_number_of_ranks,
    add_watching,
    command_of,
    hosts_of,
)
from hvkit.cli.command_line import FOREIGN, CommandParser
from hvkit.errors import UsageError
from hvkit.launching.allocation import SAGEMAKER, are_of_a_job, leave_to_first
from hvkit.launching.prepare import LAUNCHERS, Request, prepared, shown
from hvkit.launching.start import start
from hvkit.launching.supervision.rank_output import Style


def add_to(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "run",
        help="start a script on several ranks, here or on several hosts",
        usage="hvkit run [-np N] [-H HOST:SLOTS,... | --hostfile FILE] [options] COMMAND ...",
        description="Start COMMAND on every rank with the installed mpirun, watch all ranks, "
        "and end everything on all hosts when one fails. A script such as train.py runs with "
        "hvkit's Python. Without hosts, take the allocation of Slurm, PBS, LSF, SageMaker or the "
        "Kubernetes MPI operator, or else start all ranks on this host.",
        examples={
            "hvkit run -np 4 train.py --epochs 3": "four ranks on this host",
            "hvkit run -H node1:4,node2:4 train.py": "eight ranks on two hosts",
            "hvkit run -np 4 --max-restarts 3 train.py": "go on after a failure",
            "hvkit run -np 2 --dry-run train.py": "check everything and print the command",
        },
        foreign=FOREIGN,
        allow_abbrev=False,
    )
    where = parser.add_argument_group("ranks and hosts")
    add_number_of_ranks(
        where,
        "default: one in each slot of the hosts, or one for each GPU of this host",
    )
    hosts = where.add_mutually_exclusive_group()
    hosts.add_argument(
        "--hostfile", type=Path, metavar="FILE", help="hosts and slots, as for mpirun"
    )
    hosts.add_argument("-H", dest="hosts", metavar="HOST:SLOTS,...", help="hosts and slots")
    where.add_argument(
        "--bind",
        choices=("cores", "none"),
        default="cores",
        help="bind each rank to an equal share of its host's cores (default), or to none",
    )
    where.add_argument(
        "-x",
        dest="variables",
        action="append",
        default=[],
        type=_variable,
        metavar="NAME[=VALUE]",
        help="pass this environment variable to ranks on other hosts, too; may be repeated",
    )
    where.add_argument(
        "--interfaces",
        type=_interfaces,
        default=(),
        metavar="NAME,...",
        help="interfaces or networks (10.0.0.0/24) to use between hosts (default: detected)",
    )
    where.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default="mpirun",
        help="mpirun (default), or gloo: horovodrun --gloo, which needs no MPI on the hosts",
    )
    add_watching(parser)
    looking = parser.add_argument_group("looking closer")
    looking.add_argument(
        "--dry-run",
        action="store_true",
        help="check the hosts and print the exact command, but start nothing",
    )
    looking.add_argument(
        "--verbose",
        action="store_true",
        help="print the exact command, the variables that each rank sets, with reasons, and what "
        "TensorFlow and JAX print on each rank though nothing is wrong",
    )
    looking.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write what all ranks do, and where they wait, as a Chrome trace for ui.perfetto.dev",
    )
    add_command(parser)
    parser.set_defaults(execute=_execute)


def _execute(args: argparse.Namespace) -> int:
    command = command_of(args)
    try:
        request = request_of(args, command)
    except UsageError as error:
        args.refuse(str(error))
    if command[0].endswith(".py"):
        request = replace(request, command=(sys.executable, *command))
    if args.dry_run:
        print(shown(prepared(request, supervised=False)))
        return 0
    if leave_to_first(request.system, request.hosts):
        return 0
    return start(request).status


def request_of(args: argparse.Namespace, command: Sequence[str]) -> Request:
    """The request in the arguments, with hosts from the batch system if they name none."""
    hosts, allocation = hosts_of(args)
    system = None if allocation is None else allocation.system
    if allocation is None and hosts and are_of_a_job(hosts):
        system = SAGEMAKER
    names = {each.name for each in fields(Request)} & vars(args).keys()
    found = {name: getattr(args, name) for name in names}
    found |= {"command": tuple(command), "hosts": hosts, "system": system}
    found["variables"] = dict(args.variables)
    found["style"] = Style(args.prefix, args.timestamps, args.log_dir, args.show)
    return Request(**found).checked()


def _variable(text: str) -> tuple[str, str | None]:
    name, sign, value = text.partition("=")
    if not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be NAME or NAME=VALUE, got {text!r}")
    return name, value if sign else None


def _interfaces(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"must be names separated by commas, got {text!r}")
    return names
