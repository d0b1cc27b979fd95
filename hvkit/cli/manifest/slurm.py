"""``hvkit manifest slurm``."""

import argparse

from hvkit.cli.argument_types import positive
from hvkit.cli.manifest.arguments import (
    add_command,
    add_run,
    add_size,
    checked,
    command_of,
    run_options_of,
    size_of,
    variables_of,
)
from hvkit.manifest import SlurmJob, names, quantity


def add_to(systems: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand."""
    parser = systems.add_parser(
        "slurm",
        help="a batch script for Slurm",
        usage="hvkit manifest slurm -np N --slots N [options] COMMAND ...",
        description="Write a script for `sbatch` that runs COMMAND on every rank, in the folder "
        "that it is submitted from and with the Python environment of this hvkit.",
        allow_abbrev=False,
    )
    add_size(parser, "host")
    parser.add_argument(
        "--job-name",
        type=checked(names.slurm_name),
        default="hvkit",
        metavar="NAME",
        help="(default: hvkit)",
    )
    parser.add_argument("--cpus", type=positive, metavar="N", help="cores for each rank")
    parser.add_argument(
        "--memory",
        type=checked(quantity.slurm_memory),
        metavar="AMOUNT",
        help="memory for each rank, such as 16G",
    )
    parser.add_argument(
        "--time", type=checked(names.duration), metavar="HH:MM:SS", help="time limit"
    )
    parser.add_argument(
        "--partition", type=checked(names.slurm_names), metavar="NAME", help="where to run"
    )
    parser.add_argument(
        "--account", type=checked(names.slurm_name), metavar="NAME", help="who pays"
    )
    parser.add_argument(
        "--sbatch",
        dest="sbatch_options",
        action="append",
        default=[],
        type=checked(names.sbatch_option),
        metavar="OPTION",
        help="a further option of sbatch, with an equals sign: `--sbatch=--qos=high`; "
        "may be repeated",
    )
    add_run(parser, "script")
    add_command(parser, _rendered)


def _rendered(args: argparse.Namespace) -> str:
    return SlurmJob(
        command=command_of(args),
        size=size_of(args),
        name=args.job_name,
        gpus=args.gpus,
        cpus=args.cpus,
        memory=args.memory,
        time=args.time,
        partition=args.partition,
        account=args.account,
        variables=variables_of(args),
        sbatch_options=tuple(args.sbatch_options),
        run_options=run_options_of(args),
    ).script()
