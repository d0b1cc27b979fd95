"""``hvkit join-checkpoint``: makes plain files of a sharded checkpoint."""

import argparse
from pathlib import Path

from hvkit.cli.command_parser import CommandParser
from hvkit.cli.terminal import Terminal
from hvkit.errors import HvkitError


def add_to(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add ``hvkit join-checkpoint``."""
    parser = commands.add_parser(
        "join-checkpoint",
        help="make plain files of a checkpoint that was saved with sharded=True",
        description="Write the plain files of a sharded checkpoint into OUT/step-..., model.pt and "
        "so on, which torch.load reads where hvkit is not installed. They are those that "
        "hvkit.Checkpoint writes without sharded=True, and a run resumes from OUT. Needs disk "
        "for twice the checkpoint, and little memory.",
        examples={
            "hvkit join-checkpoint runs/a plain/a": "the newest checkpoint of a run",
            "hvkit join-checkpoint runs/a/step-000000500 plain/a": "one of them",
        },
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="the checkpoint's folder, or the run's directory for its newest",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="another directory of checkpoints")
    parser.set_defaults(execute=_join, refuse=parser.error)


def _join(args: argparse.Namespace) -> int:
    from hvkit.checkpoint.saving import join

    if not args.checkpoint.is_dir():
        args.refuse(f"argument CHECKPOINT: {args.checkpoint} is not a folder")
    try:
        folder = join(args.checkpoint, args.out)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise HvkitError(f"{where}{error.strerror or error}") from error
    Terminal().print(f"wrote {folder}", highlight=False, markup=False, soft_wrap=True)
    return 0
