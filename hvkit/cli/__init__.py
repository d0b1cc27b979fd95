"""The ``hvkit`` command: reads arguments and calls the rest of the package.

::

    main                    parses the command line, turns HvkitError into a line and status 1
    ├── run                 hvkit run               hvkit.launching.start
    ├── top                 hvkit top               hvkit.launching.supervision.run_status
    ├── saved_runs          hvkit report            hvkit.monitor.terminal_report
    │                       hvkit join-checkpoint   hvkit.checkpoint.saving
    ├── hosts               hvkit hosts             hvkit.launching.hosts_check and .hosts
    ├── installation        hvkit doctor            hvkit.doctor
    │                       hvkit install-horovod   hvkit.build
    ├── manifest            hvkit manifest ...      hvkit.manifest
    └── command_line        hvkit completion        shtab
    arguments               arguments and types that several of them have
    command_line            also the parser's class: errors, examples, hvkit's equivalents of
                            torchrun's, accelerate's and mpirun's options; standard output
"""

import os
import pwd
import sys
from collections.abc import Sequence
from importlib import metadata

from hvkit.cli import hosts, installation, manifest, run, saved_runs, top
from hvkit.cli.command_line import CommandParser, add_completion, all_written
from hvkit.errors import HvkitError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``hvkit`` and return its exit status: 0, 1 for a failure, 2 for wrong arguments.

    Without arguments it prints its help.
    """
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    with all_written():
        try:
            args = parser().parse_args(arguments)
            set_home()
            status: int = args.execute(args)
        except HvkitError as error:
            print(f"hvkit: {error}", file=sys.stderr)
            return error.exit_status
        except KeyboardInterrupt:
            print("hvkit: interrupted", file=sys.stderr)
            return 130
    return status


def set_home() -> None:
    """Set HOME if it is not: Open MPI's programs do not start without it.

    It is missing in some services and containers.
    """
    if os.environ.get("HOME"):
        return
    try:
        os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a user id without a name; container runtimes then set the same
        os.environ["HOME"] = "/"


def parser() -> CommandParser:
    """The parser of the command line, with all subcommands."""
    hvkit = CommandParser(
        prog="hvkit",
        description="Run a training script of PyTorch, Keras or JAX on several processes, here or "
        "on several hosts, and watch it.",
    )
    hvkit.add_argument(
        "-V", "--version", action="version", version=f"hvkit {metadata.version('hvkit')}"
    )
    commands = hvkit.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        run.add_to,
        top.add_to,
        saved_runs.add_report,
        saved_runs.add_join_checkpoint,
        hosts.add_to,
        installation.add_doctor,
        installation.add_install_horovod,
        manifest.add_to,
    ):
        add(commands)
    add_completion(commands, parser)
    return hvkit
