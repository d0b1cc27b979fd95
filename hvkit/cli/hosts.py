"""``hvkit hosts``: list the hosts of a hostfile or an allocation, and check them."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvkit.cli.arguments import hosts_of
from hvkit.cli.command_line import CommandParser, Terminal
from hvkit.errors import UsageError
from hvkit.launching.hosts import Host
from hvkit.launching.hosts_check import Checked, check
from hvkit.log import counted

_NONE = "-"


def add_to(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "hosts",
        help="list the hosts of a hostfile or an allocation, and check them",
        description="List the hosts of a hostfile in Open MPI's or MPICH's form, of -H, or else "
        "those that Slurm, PBS, LSF, SageMaker or the Kubernetes MPI operator has given to this "
        "job. With --check the exit status is 1 if there are problems.",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("hostfile", nargs="?", type=Path, metavar="FILE", help="hostfile")
    source.add_argument("-H", dest="hosts", metavar="HOST:SLOTS,...", help="hosts and slots")
    parser.add_argument(
        "--check",
        action="store_true",
        help="log in to every host, compare installed versions, and test the network between them",
    )
    parser.set_defaults(execute=_execute)


def _execute(args: argparse.Namespace) -> int:
    hosts, system = _hosts(args)
    # No highlighting: rich would colour every number.
    console = Terminal(highlight=False)
    if not args.check:
        show_table(console, ("host", "slots", "user", "ranks"), _rows(hosts))
        console.print(_total(hosts))
        return 0
    with Console(stderr=True).status("checking the hosts"):
        checked = check(hosts, system)
    _show_checked(console, checked)
    return 1 if checked.problems else 0


def _hosts(args: argparse.Namespace) -> tuple[tuple[Host, ...], str | None]:
    hosts, allocation = hosts_of(args)
    if allocation is not None:
        print(f"hvkit: hosts from {allocation.system} ({allocation.source})", file=sys.stderr)
    elif not hosts:
        raise UsageError(
            "no hosts: name a hostfile or -H HOST:SLOTS,..., or run this in a job of Slurm, PBS, "
            "LSF, SageMaker or the Kubernetes MPI operator"
        )
    return hosts, None if allocation is None else allocation.system


def _rows(hosts: Sequence[Host]) -> list[tuple[str, ...]]:
    """A row for each host with the ranks it gets, as far as the slots before it are known."""
    rows: list[tuple[str, ...]] = []
    first: int | None = 0
    for host in hosts:
        end = None if first is None or host.slots is None else first + host.slots
        ranks = _NONE if first is None else f"{first}-{'' if end is None else end - 1}"
        ranks = str(first) if end is not None and end - 1 == first else ranks
        rows.append((host.name, _slots(host), host.user or _NONE, ranks))
        first = end
    return rows


def _slots(host: Host) -> str:
    return "its cores" if host.slots is None else str(host.slots)


def _total(hosts: Sequence[Host]) -> str:
    slots = [host.slots for host in hosts]
    more = ", plus the cores of hosts without a slot count" if None in slots else ""
    return f"{counted(len(hosts), 'host')}, {counted(sum(filter(None, slots)), 'slot')}{more}"


def _show_checked(console: Terminal, checked: Checked) -> None:
    rows: list[tuple[str, ...]] = []
    for one in checked.examined:
        name, known = one.host.name, (_NONE, _NONE, _NONE)
        if one.report is not None:
            memory = one.report["memory"]["available"] / 2**30
            known = (str(one.cores), str(len(one.report["gpus"])), f"{memory:.1f} GiB")
        number = sum(name in problem.hosts for problem in checked.problems)
        result = counted(number, "problem") if number else "fine"
        rows.append((name, _slots(one.host), *known, checked.interfaces.get(name, _NONE), result))
    columns = ("host", "slots", "cores", "GPUs", "free memory", "interface", "result")
    show_table(console, columns, rows)
    for problem in checked.problems:
        console.show_line(f"problem: {problem}", "bold red")


def show_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, drawn on a terminal and as aligned text elsewhere.

    The first column is aligned left, the others right.
    """
    if not console.is_terminal:
        lines = [columns, *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for first, *others in lines:
            cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
            console.print(Text("  ".join(cells).rstrip()), soft_wrap=True)
        return
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
