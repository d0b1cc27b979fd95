"""``hvkit run``: start a command on every rank and watch it."""

import argparse
import sys
from pathlib import Path

from hvkit.cli.arguments import (
    COMMAND_MISSING,
    add_hosts_arguments,
    add_watching,
    hosts_of,
    positive,
    refuse,
)
from hvkit.launch.allocation import SAGEMAKER
from hvkit.launch.launchers import NAMES
from hvkit.launch.prepare import Request, prepared, shown
from hvkit.launch.rank_command import with_python
from hvkit.launch.sagemaker import are_of_a_job, follow, starts_ranks
from hvkit.launch.start import start
from hvkit.launch.supervision.output import Style


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "run",
        help="start a script on several ranks, here or on several hosts",
        usage="hvkit run -np N [--hostfile FILE | -H HOST:SLOTS,...] [options] COMMAND ...",
        description="Start COMMAND on every rank with the installed mpirun, watch all ranks, "
        "and end everything on all hosts when one fails. Without hosts it takes the allocation of "
        "Slurm, PBS, LSF, SageMaker or the Kubernetes MPI operator, or else starts all ranks on "
        "this host.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-np", type=positive, metavar="N", help="ranks (default: one in each slot of the hosts)"
    )
    add_hosts_arguments(parser)
    parser.add_argument(
        "--launcher",
        choices=NAMES,
        default="mpirun",
        help="mpirun (default), horovodrun over MPI, or gloo, which needs no MPI on the hosts",
    )
    parser.add_argument(
        "-x",
        dest="variables",
        action="append",
        default=[],
        type=_variable,
        metavar="NAME[=VALUE]",
        help="pass this environment variable to ranks on other hosts, too; may be repeated",
    )
    parser.add_argument(
        "--interfaces",
        type=_interfaces,
        default=(),
        metavar="NAME,...",
        help="interfaces or networks (10.0.0.0/24) to use between hosts (default: found by itself)",
    )
    parser.add_argument(
        "--bind",
        choices=("cores", "none"),
        default="cores",
        help="bind each rank to an equal share of its host's cores (default), or to none",
    )
    add_watching(parser)
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write what all ranks do, and where they wait, as a Chrome trace for ui.perfetto.dev",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="print the exact command and the variables that each rank sets, with reasons",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the hosts and print the exact command, but start nothing",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...")
    parser.set_defaults(execute=_execute, refuse=parser.error)


def _execute(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        args.refuse(COMMAND_MISSING)
    if args.min_np is not None and args.np is not None and args.min_np > args.np:
        args.refuse(f"--min-np {args.min_np} is more than -np {args.np}")
    hosts, allocation = hosts_of(args, refuse)
    if not hosts and args.np is None:
        args.refuse("-np is missing: give the number of ranks, or hosts with their slots")
    system = None if allocation is None else allocation.system
    if allocation is None and hosts and are_of_a_job(hosts):
        system = SAGEMAKER
    if system == SAGEMAKER and not args.dry_run and not starts_ranks(hosts):
        follow(hosts[0])
        return 0
    request = Request(
        command=with_python(command, _standard_input),
        hosts=hosts,
        system=system,
        size=args.np,
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
    if args.dry_run:
        print(shown(prepared(request, supervised=False)))
        return 0
    return start(request)


def _standard_input() -> str:
    return sys.stdin.read() if sys.stdin else ""


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
