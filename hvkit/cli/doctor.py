"""``hvkit doctor``."""

import argparse
import json

from rich.console import Console

from hvkit.doctor.report import examine, show


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine and say what to mend",
        description="Check frameworks, Horovod, MPI, memory, GPUs and network of this machine, try "
        "an allreduce on two ranks, and say what to mend. The exit status is 1 if there are "
        "problems; notes are none. The report holds no environment values but numbers of threads, "
        "and no user name.",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--no-self-test",
        dest="self_test",
        action="store_false",
        help="start no ranks; takes seconds",
    )
    parser.set_defaults(execute=_execute)


def _execute(args: argparse.Namespace) -> int:
    with Console(stderr=True).status("looking at this machine"):
        report = examine(args.self_test)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show(report, Console(highlight=False))
    return 1 if report["problems"] else 0
