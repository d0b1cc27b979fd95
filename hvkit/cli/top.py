"""``hvkit top``: the ranks of a running ``hvkit run``, live in the terminal."""

import argparse
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hvkit.cli.arguments import positive
from hvkit.errors import HvkitError
from hvkit.launch.supervision import run_status
from hvkit.log import printable

_EVERY = 1.0
# Seconds in a wait that are worth a colour.
_LONG = 5.0
# Columns where there is no terminal.
_WIDTH = 160


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``hvkit top``."""
    parser = commands.add_parser(
        "top",
        help="watch the ranks of a running hvkit run",
        description="Show the ranks of a `hvkit run` of yours on this host, every second: their "
        "step, samples a second (with hvkit.Monitor), and in which call they wait. Ctrl-C ends "
        "this view, not the run.",
    )
    parser.add_argument(
        "process",
        type=positive,
        nargs="?",
        metavar="PID",
        help="process id of the hvkit run (default: the one started last)",
    )
    parser.add_argument("--once", action="store_true", help="print one view and end")
    parser.set_defaults(execute=_top)


def _top(args: argparse.Namespace) -> int:
    process = args.process
    if process is None:
        found = run_status.running()
        if not found:
            raise HvkitError("no `hvkit run` of yours is running on this host")
        process = found[0]
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_WIDTH)
    if args.once:
        console.print(view(process, run_status.read(process), {}))
        return 0
    before: dict[int, tuple[float, int]] = {}
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            try:
                state = run_status.read(process)
            except HvkitError:
                if not before:
                    raise
                break  # it has ended
            live.update(view(process, state, before), refresh=True)
            time.sleep(_EVERY)
    console.print(f"hvkit run {process} has ended")
    return 0


def view(process: int, state: Mapping[str, Any], before: dict[int, tuple[float, int]]) -> Group:
    """One picture of a run.

    Args:
        process: its id.
        state: as ``run_status.read`` returns it.
        before: by rank, the time and step of earlier looks; updated.
    """
    ranks = state.get("ranks", [])
    speeds = [each["speed"] for each in ranks if each.get("speed")]
    total = f"; {sum(speeds):,.0f} samples a second" if speeds else ""
    saved = state.get("saved")
    title = (
        f"hvkit run {process}: {len(ranks)} of {state.get('size')} ranks, "
        f"{state.get('seconds', 0):.0f} s, {state.get('restarts', 0)} restarts, "
        f"newest checkpoint: {'none' if saved is None else f'step {saved}'}{total}"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "step", "steps/s", "samples/s"):
        table.add_column(name, justify="right")
    for name in ("host", "call", "waits", "at"):
        table.add_column(name, no_wrap=True)
    now = time.monotonic()
    for each in ranks:
        rank, step = each["rank"], each.get("step", 0)
        then, done = before.setdefault(rank, (now, step))
        pace = (step - done) / (now - then) if now > then and step >= done else 0.0
        if now - then > 5 or step < done:
            before[rank] = now, step
        waits = each.get("waits") or 0
        state_of_it = "ended" if each.get("ended") else each.get("call") or "in the script"
        table.add_row(
            str(rank),
            f"{step:,}" if step else "",
            f"{pace:.1f}" if pace else "",
            f"{each['speed']:,.0f}" if each.get("speed") else "",
            Text(printable(each["host"])),
            Text(printable(state_of_it)),
            Text(f"{waits:.0f} s" if waits >= 1 else "", "red" if waits > _LONG else ""),
            Text(printable(each.get("where", ""))),
        )
    return Group(Text(title, "bold"), table)
