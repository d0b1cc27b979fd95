"""Arguments that several subcommands take, and the types that check them."""

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hvkit.launching.allocation import Allocation, allocation
from hvkit.launching.hosts import Host, read_hostfile, read_hosts_option
from hvkit.launching.prepare import NUMBER_OF_RANKS, Request

_LOST_AFTER = Request.lost_after
_GRACE = Request.grace
_DAY = 86400.0


def add_number_of_ranks(parser: argparse._ActionsContainer, default: str) -> None:
    """Add ``-np`` under all of its names; ``default`` describes the default."""
    parser.add_argument(
        *NUMBER_OF_RANKS, type=number_of_ranks, metavar="N", help=f"ranks ({default})"
    )


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND ...",
        help="a script, or a program with its arguments; options after it are its own",
    )


def command_of(args: argparse.Namespace) -> list[str]:
    """The words of the command, of which there must be one."""
    words: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        args.refuse(
            "COMMAND is missing: give the script or program that every rank runs, such as "
            "`script.py`"
        )
    if not words[0] or words[0].startswith("-"):
        args.refuse(
            f"COMMAND must begin with a script or program, such as `script.py`, got {words[0]!r}"
        )
    return words


def hosts_of(args: argparse.Namespace) -> tuple[tuple[Host, ...], Allocation | None]:
    """The hosts in the arguments, or else the batch system's, with its allocation; or none."""
    if args.hostfile is not None:
        return read_hostfile(args.hostfile), None
    if args.hosts is not None:
        return read_hosts_option(args.hosts), None
    found = allocation(os.environ)
    return ((), None) if found is None else (found.hosts, found)


def add_watching(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hvkit run`` that manifests accept and pass on: watching and output."""
    failing = parser.add_argument_group("when something fails")
    failing.add_argument(
        "--max-restarts",
        type=whole,
        default=0,
        metavar="R",
        help="start the ranks again after a failure, from the newest checkpoint, up to R times "
        "in a row without a newer one (default: 0)",
    )
    failing.add_argument(
        "--min-np",
        type=positive,
        metavar="M",
        help="leave out hosts that are not ready, and go on with as few as M ranks "
        "(default: all of them, on other hosts that have slots)",
    )
    failing.add_argument(
        "--stall",
        type=seconds_between(5, _DAY),
        metavar="SECONDS",
        help="end the run when others have waited this long in a call that a rank has not reached, "
        "and show where it is (default: 1800)",
    )
    failing.add_argument(
        "--lost-after",
        type=seconds_between(2, _DAY),
        default=_LOST_AFTER,
        metavar="SECONDS",
        help=f"end the run when a host has not answered for this long (default: {_LOST_AFTER:g})",
    )
    failing.add_argument(
        "--grace",
        type=seconds_between(0, _DAY),
        default=_GRACE,
        metavar="SECONDS",
        help="time that ranks have to end after SIGTERM, sent when hvkit run gets it or another "
        "rank fails. Ctrl-C sends SIGINT first and waits as long again. A further signal cuts the "
        f"wait short (default: {_GRACE:g})",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--prefix", action="store_true", help="begin lines with rank and host")
    output.add_argument("--timestamps", action="store_true", help="begin lines with the time")
    output.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="also write each rank's output to a file there"
    )
    output.add_argument(
        "--show",
        type=ranks,
        metavar="RANKS",
        help="show the output of these ranks only, such as 0 or 0,4-7; the output of the others "
        "goes to --log-dir, and their last lines are shown if they fail (default: all)",
    )


def watching(args: argparse.Namespace) -> tuple[str, ...]:
    """The words that pass these options on to ``hvkit run``; none for a default."""
    words = []
    defaults = {"lost-after": _LOST_AFTER, "grace": _GRACE, "stall": None}
    for option, default in {**defaults, "max-restarts": 0, "min-np": None}.items():
        value = getattr(args, option.replace("-", "_"))
        if value != default:
            words += [f"--{option}", f"{value:.15g}" if isinstance(value, float) else f"{value}"]
    words += [f"--{name}" for name in ("prefix", "timestamps") if getattr(args, name)]
    if args.log_dir is not None:
        # One word: the folder's name may begin with a dash.
        words.append(f"--log-dir={args.log_dir}")
    if args.show is not None:
        words += ["--show", _ranks_text(args.show)]
    return tuple(words)


def _integer(text: str, least: int, accepted: str, given: str | None = None) -> int:
    """The integer in a text, which may be a part of what was given."""
    # int() refuses very long numbers; nothing here is as large as a billion.
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"must be {accepted}, got {given or text!r}")
    return int(text)


def positive(text: str) -> int:
    return _integer(text, 1, "a positive integer")


def number_of_ranks(text: str) -> int:
    """A positive integer, also after a ``p``: for argparse, ``-np2`` is ``-n p2``."""
    return positive(text.removeprefix("p"))


def whole(text: str) -> int:
    return _integer(text, 0, "a whole number, such as 0 or 3")


def ranks(text: str) -> tuple[range, ...]:
    """Ranks and ranges of ranks, separated by commas."""
    found = []
    for part in text.split(","):
        words = part.split("-", 1)
        ends = [_integer(word, 0, "ranks, such as 0 or 0,4-7", text) for word in words]
        if ends[-1] < ends[0]:
            raise argparse.ArgumentTypeError(
                f"a range must begin with its smaller rank, got {part!r}"
            )
        found.append(range(ends[0], ends[-1] + 1))
    return tuple(found)


def _ranks_text(found: Sequence[range]) -> str:
    """The inverse of ``ranks``."""
    return ",".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in found)


def seconds_between(least: float, most: float) -> Callable[[str], float]:
    """A type for a number of seconds from ``least`` to ``most``, both included."""

    def seconds(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (value := float(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds from {least:g} to {most:g}, got {text!r}"
        )

    return seconds
