"""``hvkit run``: start a command on every rank and watch it."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hvkit.cli.arguments import (
    COMMAND_BEGINS,
    COMMAND_MISSING,
    NUMBER_OF_RANKS,
    add_hosts_arguments,
    add_number_of_ranks,
    add_watching,
    hosts_of,
    refuse,
)
from hvkit.cli.command_parser import CommandParser
from hvkit.cli.foreign_options import FOREIGN
from hvkit.host.cpus import usable_cores
from hvkit.host.gpus import visible_gpus
from hvkit.launching.allocation import SAGEMAKER
from hvkit.launching.launchers import NAMES
from hvkit.launching.prepare import Request, prepared, shown
from hvkit.launching.rank_command import with_python
from hvkit.launching.sagemaker import are_of_a_job, leave_to_first
from hvkit.launching.start import start
from hvkit.launching.supervision.rank_output import Style
from hvkit.log import logger
from hvkit.wording import counted

# The most ranks on a host that -np starts without -H: a larger number is probably a typing error.
_MOST_RANKS = 16
_MOST_ON_A_CORE = 8


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
    add_hosts_arguments(where)
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
        choices=NAMES,
        default="mpirun",
        help="mpirun (default), horovodrun over MPI, or gloo, which needs no MPI on the hosts",
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
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND ...",
        help="a script, or a program with its arguments; options after it are its own",
    )
    parser.set_defaults(execute=_execute)


def _execute(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        args.refuse(COMMAND_MISSING)
    if not command[0]:
        args.refuse(f"{COMMAND_BEGINS}, got ''")
    request = request_of(args, command)
    if args.dry_run:
        print(shown(prepared(request, supervised=False)))
        return 0
    if leave_to_first(request.system, request.hosts):
        return 0
    return start(request).status


def request_of(args: argparse.Namespace, command: Sequence[str]) -> Request:
    """The request in the arguments, with hosts from the batch system if they name none.

    Args:
        args: what ``add_to``'s parser has found.
        command: the command of every rank; this Python comes before a script.

    Raises:
        LaunchError: the hosts or the number of ranks cannot be.
        HostfileError: the list or file of hosts is malformed.
    """
    if args.min_np is not None and args.np is not None and args.min_np > args.np:
        args.refuse(f"--min-np {args.min_np} is more than -np {args.np}")
    hosts, allocation = hosts_of(args, refuse)
    size = args.np if hosts else _number_here(args)
    system = None if allocation is None else allocation.system
    if allocation is None and hosts and are_of_a_job(hosts):
        system = SAGEMAKER
    return Request(
        command=with_python(command, _standard_input),
        hosts=hosts,
        system=system,
        size=size,
        launcher=args.launcher,
        variables=dict(args.variables),
        interfaces=args.interfaces,
        bind=args.bind == "cores",
        lost_after=args.lost_after,
        grace=args.grace,
        style=Style(args.prefix, args.timestamps, args.log_dir, args.show),
        verbose=args.verbose,
        stall=args.stall,
        timeline=args.timeline,
        max_restarts=args.max_restarts,
        min_size=args.min_np,
    )


def _number_here(args: argparse.Namespace) -> int:
    """The number of ranks for this host: ``-np``, or that of its GPUs."""
    cores = usable_cores()
    has = f"this host has {counted(cores, 'core')}"
    size: int | None = args.np
    if size is None:
        given = {name: value for name, value in args.variables if value is not None}
        if size := visible_gpus({**os.environ, **given}):
            logger.info("starts %s, one for each GPU", counted(size, "rank"))
            return size
        swallowed = any(word.partition("=")[0] in NUMBER_OF_RANKS for word in args.command)
        place = ", before COMMAND, which gets all options after it" if swallowed else ""
        args.refuse(
            f"-np is missing: {has} and no GPU; give the number of ranks{place}, "
            f"such as -np {max(2, cores)}"
        )
    most = max(_MOST_RANKS, _MOST_ON_A_CORE * cores)
    if size > most:
        args.refuse(
            f"-np {size} is too many: {has}; start at most -np {most}, or write "
            f"-H localhost:{size} if you mean it"
        )
    return size


def _standard_input() -> str:
    if not sys.stdin:
        return ""
    if sys.stdin.isatty():
        logger.info("reads the script from the terminal: Ctrl-D on a line of its own ends it")
    return sys.stdin.read()


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
