"""The ``hvkit`` command: a module for each subcommand, which reads arguments and calls the rest."""

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

from hvkit.cli import doctor, hosts, install_horovod, manifest, run
from hvkit.errors import HvkitError

# Each adds its subcommand to the parser, with the function that carries it out.
_COMMANDS = (doctor, hosts, install_horovod, manifest, run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``hvkit`` and return its exit status: 0, 1 for a failure, 2 for wrong arguments."""
    args = _parser().parse_args(arguments)
    try:
        status: int = args.execute(args)
    except HvkitError as error:
        print(f"hvkit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hvkit: interrupted", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvkit", description="Horovod's ring-allreduce for today's PyTorch and Keras."
    )
    parser.add_argument("--version", action="version", version=f"hvkit {metadata.version('hvkit')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser
