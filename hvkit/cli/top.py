"""``hvkit top``: the ranks of a run of ``hvkit run``, live in the terminal."""

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hvkit.cli.arguments import positive
from hvkit.cli.command_line import CommandParser, Terminal
from hvkit.errors import HvkitError
from hvkit.launching.supervision import run_status
from hvkit.launching.supervision.run_status import RankState
from hvkit.log import counted, duration, printable, shortened

_EVERY = 1.0
# Seconds between the two readings of --once, over which it measures speeds.
_BETWEEN_READINGS = 2.0
# The most seconds over which a speed is measured; a rank whose last report is older is silent.
_PACE_OVER = 5.0
# Seconds without a step after which a rank's samples a second are not shown.
_STILL = 10.0
# Seconds after which a wait is shown in colour.
_LONG = 5.0
# Characters of a rank's command that are shown.
_COMMAND = 40
# Columns if there is no terminal.
_WIDTH = 160


def add_to(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add ``hvkit top``."""
    parser = commands.add_parser(
        "top",
        help="watch the ranks of a run, live",
        description="Show the ranks of your `hvkit run` on this host, every second: their "
        "step, samples a second (with hvkit.Monitor), and in which call they wait; between two "
        "tries, why they ended. Ctrl-C ends this view, not the run.",
    )
    parser.add_argument(
        "process",
        type=positive,
        nargs="?",
        metavar="PID",
        help="process id of the hvkit run (default: the one started last)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one view, after two seconds, and end (default without a terminal)",
    )
    parser.set_defaults(execute=_top)


def _top(args: argparse.Namespace) -> int:
    process, notes = _newest() if args.process is None else (args.process, [])
    on_terminal = sys.stdout.isatty()
    console = Terminal() if on_terminal else Console(width=_WIDTH)
    if args.once or not on_terminal:
        console.print(Group(*notes, _one_view(process)))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _follow(process, notes, console)
    return 0


def _newest() -> tuple[int, list[Text]]:
    """The newest run whose state can be read, and lines about this user's others."""
    states: dict[int, Mapping[str, Any]] = {}
    unreadable: dict[int, HvkitError] = {}
    for process in run_status.running():
        try:
            states[process] = run_status.read(process)
        except HvkitError as error:
            if not states:  # else it has just ended
                unreadable[process] = error
    if not states:
        nothing = HvkitError("no `hvkit run` of yours is running on this host")
        raise next(iter(unreadable.values()), nothing)
    newest, *others = states
    notes = [f"skipped {each}: {why}" for each, why in unreadable.items()]
    notes += [f"another run: {_named(each, states[each])}" for each in others]
    return newest, list(map(Text, notes))


def _named(process: int, state: Mapping[str, Any]) -> str:
    command = shortened(printable(state["command"]), _COMMAND)
    return f"{process} ({command})" if command else f"{process}"


def _one_view(process: int) -> Group:
    """A view with speeds, for which it reads the state twice."""
    before: dict[int, tuple[float, int]] = {}
    picture = view(process, run_status.read(process), before)
    if before:
        time.sleep(_BETWEEN_READINGS)
        with contextlib.suppress(HvkitError):  # it has ended
            picture = view(process, run_status.read(process), before)
    return picture


def _follow(process: int, notes: Sequence[Text], console: Console) -> None:
    """Show a run, and these lines above it, until it ends."""
    before: dict[int, tuple[float, int]] = {}
    state = run_status.read(process)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(Group(*notes, view(process, state, before)), refresh=True)
            time.sleep(_EVERY)
            try:
                state = run_status.read(process)
            except HvkitError:
                break
    console.print(f"hvkit run {process} has ended")


def view(process: int, state: Mapping[str, Any], before: dict[int, tuple[float, int]]) -> Group:
    """One picture of a run, as of the moment at which its state was read."""
    ranks, phase, reason = state["ranks"], state["phase"], printable(state["reason"])
    # Not the time of this view: this process may get no core for seconds after it has read.
    moment = state["read_at"]
    speeds = [speed for each in ranks if (speed := _speed(each, moment))]
    total = f"; {sum(speeds):,.0f} samples a second" if speeds else ""
    now = "no ranks" if phase else f"{len(ranks)} of {counted(state['size'], 'rank')}"
    saved = state["saved"]
    title = (
        f"hvkit run {_named(process, state)}, begun {duration(state['seconds'])} ago: {now}, "
        f"{counted(state['restarts'], 'restart')}, "
        f"newest checkpoint: {'none' if saved is None else f'step {saved}'}{total}"
    )
    lines = [Text(title, "bold")]
    if reason:
        lines.append(Text(f"{'the ranks have ended' if phase else 'last restart'}: {reason}"))
    if phase:
        before.clear()
        return Group(*lines, *(Text(printable(line)) for line in phase.split("\n")))
    return Group(*lines, _table(ranks, before, moment))


def _table(ranks: Sequence[RankState], before: dict[int, tuple[float, int]], now: float) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "step", "steps/s", "samples/s"):
        table.add_column(name, justify="right")
    for name in ("host", "call", "waits", "at"):
        table.add_column(name, no_wrap=True)
    for each in ranks:
        step, waits = each.get("step", 0), each.get("waits") or 0
        silent, speed = _silent(each, now), _speed(each, now)
        pace = 0.0 if silent else _pace(each, before)
        state_of_it = each.get("call") or "in the script"
        if each.get("ended"):
            state_of_it, waits = "ended", 0
        elif silent:
            state_of_it, waits = f"not answering for {silent:.0f} s", 0
        table.add_row(
            str(each["rank"]),
            f"{step:,}" if step else "",
            f"{pace:.1f}" if pace else "",
            f"{speed:,.0f}" if speed else "",
            Text(printable(each["host"])),
            Text(printable(state_of_it), "red" if silent else ""),
            Text(f"{waits:.0f} s" if waits >= 1 else "", "red" if waits > _LONG else ""),
            Text(printable(each.get("where", ""))),
        )
    return table


def _pace(each: RankState, before: dict[int, tuple[float, int]]) -> float:
    """Steps a second of a rank since an earlier report, some seconds ago; 0 if unknown."""
    if "at" not in each or each["ended"]:
        return 0.0
    rank, at, step = each["rank"], each["at"], each["step"]
    then, done = before.setdefault(rank, (at, step))
    if at - then > _PACE_OVER - 0.5 or step < done:  # reports are of full seconds
        before[rank] = at, step
    return (step - done) / (at - then) if at > then and step >= done else 0.0


def _speed(each: RankState, now: float) -> float:
    """Samples a second of a rank that makes steps; 0 if unknown."""
    moved = each.get("moved")
    still = moved is not None and now - moved > _STILL
    return 0.0 if each.get("ended") or still or _silent(each, now) else each.get("speed") or 0.0


def _silent(each: RankState, now: float) -> float:
    """Seconds since the last report of a rank; 0 if it reports, has ended or never reported."""
    if "at" not in each or each.get("ended"):
        return 0.0
    seconds: float = now - each["at"]
    return seconds if seconds > _PACE_OVER else 0.0
