"""``hvkit report``: what a run's monitor has recorded, in the terminal and as an HTML page."""

import argparse
from pathlib import Path

from hvkit.cli.command_parser import CommandParser
from hvkit.cli.terminal import Terminal
from hvkit.errors import HvkitError

_PAGE = "report.html"


def add_to(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add ``hvkit report``."""
    parser = commands.add_parser(
        "report",
        help="show what hvkit.Monitor has recorded of a run",
        description="Print what hvkit.Monitor has recorded in FOLDER: metrics, speed, the parts of "
        "a step's time, slow ranks, and restarts. Write the same, with curves, as one page that "
        f"needs no network: FOLDER/{_PAGE}.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="as passed to hvkit.Monitor")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help=f"write the page here (default: FOLDER/{_PAGE})"
    )
    parser.set_defaults(execute=_report, refuse=parser.error)


def _report(args: argparse.Namespace) -> int:
    from hvkit.monitor import report
    from hvkit.monitor.recorded_run import read
    from hvkit.monitor.report_page import page

    if not args.folder.is_dir():
        args.refuse(f"argument FOLDER: {args.folder} is no folder: name that of hvkit.Monitor")
    run = read(args.folder)
    path = args.html or args.folder / _PAGE
    problem: OSError | None = None
    try:
        # First: whoever reads the terminal's text may end early, as head does.
        path.write_text(page(run), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        problem = error
    console = Terminal()
    report.show(run, console)
    if problem is not None:
        raise HvkitError(
            f"{path} cannot be written ({problem.strerror}): choose another file with --html"
        )
    console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    return 0
