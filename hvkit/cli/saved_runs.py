"""``hvkit report`` and ``hvkit join-checkpoint``: show and convert what runs have saved."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvkit.cli.command_line import CommandParser, Terminal
from hvkit.errors import HvkitError

_PAGE = "report.html"
_COMPARISON = "comparison.html"


def add_report(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add ``hvkit report``."""
    parser = commands.add_parser(
        "report",
        help="show what hvkit.Monitor has recorded of a run, or compare runs",
        description="Print what hvkit.Monitor has recorded in FOLDER: metrics, speed, the parts of "
        "a step's time, slow ranks, and restarts. Write the same, with curves, as one page that "
        f"needs no network: FOLDER/{_PAGE}. Of several folders, print their numbers side by side, "
        f"and write {_COMPARISON} here, with the curves of all runs on each chart.",
    )
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="FOLDER", help="as passed to hvkit.Monitor"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help=f"write the page here (default: FOLDER/{_PAGE}; of several, {_COMPARISON})",
    )
    parser.set_defaults(execute=_report)


def _report(args: argparse.Namespace) -> int:
    from hvkit.monitor import terminal_report
    from hvkit.monitor.recorded_run import read
    from hvkit.monitor.report_page import page, page_of_several

    # With `hvkit report *`, FOLDER is also the comparison.html of the last time.
    folders = [each for each in args.folders if not os.path.isfile(each)] or args.folders
    for each in folders:
        if not os.path.isdir(each):  # Path's would raise for a name that is too long
            args.refuse(f"argument FOLDER: {each} is not a folder: name that of hvkit.Monitor")
    try:
        names = _distinct_names(folders)
    except ValueError as error:
        args.refuse(f"argument FOLDER: {error}")
    runs = [replace(read(each), name=name) for each, name in zip(folders, names, strict=True)]
    single = len(runs) == 1
    path = args.html or (folders[0] / _PAGE if single else Path(_COMPARISON))
    problem = None
    try:
        # Write the page first: a reader of the terminal's text, such as head, may end early.
        text = page(runs[0]) if single else page_of_several(runs)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        problem = error.strerror or str(error)
    console = Terminal()
    if single:
        terminal_report.show(runs[0], console)
    else:
        terminal_report.show_several(runs, console)
    if problem is not None:
        raise HvkitError(f"{path} cannot be written ({problem}): choose another file with --html")
    console.show_line(f"wrote {path}")
    return 0


def add_join_checkpoint(commands: "argparse._SubParsersAction[CommandParser]") -> None:
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
    parser.set_defaults(execute=_join)


def _join(args: argparse.Namespace) -> int:
    from hvkit.checkpoint.saving import join

    if not os.path.isdir(args.checkpoint):
        args.refuse(f"argument CHECKPOINT: {args.checkpoint} is not a folder")
    try:
        folder = join(args.checkpoint, args.out)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise HvkitError(f"{where}{error.strerror or error}") from error
    Terminal().show_line(f"wrote {folder}")
    return 0


def _distinct_names(folders: Sequence[Path]) -> list[str]:
    """Names of folders: as many parts from the ends of their paths as it takes."""
    paths = [folder.resolve() for folder in folders]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ValueError(f"{folders[number]} is named twice: name each run once")
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names
