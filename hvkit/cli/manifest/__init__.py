"""``hvkit manifest``: a module for each system."""

import argparse

from hvkit.cli.manifest import mpijob, slurm


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "manifest",
        help="write what Kubernetes or Slurm needs to start a script on several ranks",
        description="Write a description of a run to standard output.",
        allow_abbrev=False,
    )
    systems = parser.add_subparsers(title="systems", required=True, metavar="SYSTEM")
    mpijob.add_to(systems)
    slurm.add_to(systems)
