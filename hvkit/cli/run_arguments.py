"""The arguments of ``hvkit run`` that ``hvkit manifest`` takes, too, and hands on to it."""

import argparse
from pathlib import Path

from hvkit.cli.argument_types import ranks, ranks_text, seconds_between
from hvkit.launch.start import Request

_LOST_AFTER = Request.lost_after
_GRACE = Request.grace
_DAY = 86400.0


def add_watching(parser: argparse.ArgumentParser) -> None:
    """Add how ranks are watched, and how their output is shown."""
    parser.add_argument(
        "--lost-after",
        type=seconds_between(2, _DAY),
        default=_LOST_AFTER,
        metavar="SECONDS",
        help="end the run when a host gives no sign of life for so long "
        f"(default: {_LOST_AFTER:g})",
    )
    parser.add_argument(
        "--grace",
        type=seconds_between(0, _DAY),
        default=_GRACE,
        metavar="SECONDS",
        help="how long ranks have to end by themselves when SIGTERM or the failure of another rank "
        "ends the run; as long again when Ctrl-C does, which they get first. A further signal does "
        f"not wait (default: {_GRACE:g})",
    )
    parser.add_argument("--prefix", action="store_true", help="begin lines with rank and host")
    parser.add_argument("--timestamps", action="store_true", help="begin lines with the time")
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="also write each rank's output to a file there"
    )
    parser.add_argument(
        "--show",
        type=ranks,
        metavar="RANKS",
        help="show only what these ranks print, such as 0 or 0,4-7; what others print goes to "
        "--log-dir, and their last lines are shown if they fail (default: all)",
    )


def watching(args: argparse.Namespace) -> tuple[str, ...]:
    """The words for ``hvkit run`` that say the same as ``args``; none for what is its default."""
    words = []
    if args.lost_after != _LOST_AFTER:
        words += ["--lost-after", f"{args.lost_after:.15g}"]
    if args.grace != _GRACE:
        words += ["--grace", f"{args.grace:.15g}"]
    words += [f"--{name}" for name in ("prefix", "timestamps") if getattr(args, name)]
    if args.log_dir is not None:
        # In one word: the folder's name may begin with a dash.
        words.append(f"--log-dir={args.log_dir}")
    if args.show is not None:
        words += ["--show", ranks_text(args.show)]
    return tuple(words)
