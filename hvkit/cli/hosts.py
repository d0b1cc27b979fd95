"""``hvkit hosts``."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from hvkit.cli.hosts_arguments import hosts_of, refuse
from hvkit.cli.table import show
from hvkit.errors import LaunchError
from hvkit.launch.check import Checked, check, counted
from hvkit.launch.hosts import Host
from hvkit.launch.launchers import write_horovodrun, write_mpich, write_openmpi

_NONE = "-"

_FORMS: Mapping[str, Callable[[Sequence[Host]], str]] = {
    "openmpi": write_openmpi,
    "mpich": write_mpich,
    "horovodrun": write_horovodrun,
}


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "hosts",
        help="say what a hostfile means, and check its hosts",
        description="List the hosts of a hostfile in Open MPI's or MPICH's form, of -H, or else "
        "those that Slurm, PBS, LSF or the Kubernetes MPI operator has given to this job. With "
        "--check the exit status is 1 if there are problems.",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("hostfile", nargs="?", type=Path, metavar="FILE", help="hostfile")
    source.add_argument("-H", dest="hosts", metavar="HOST:SLOTS,...", help="hosts and slots")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--as",
        dest="form",
        choices=_FORMS,
        help="print the hosts as this launcher wants them; only Open MPI's form keeps max_slots",
    )
    action.add_argument(
        "--check",
        action="store_true",
        help="log in to every host, compare what is installed, and try the ways between them",
    )
    parser.set_defaults(execute=_execute)


def _execute(args: argparse.Namespace) -> int:
    hosts, system = _hosts(args)
    if args.form is not None:
        print(_FORMS[args.form](hosts), end="")
        return 0
    # What is piped to a file has no need for the colours of numbers.
    console = Console(highlight=False)
    if not args.check:
        show(console, ("host", "slots", "max", "user", "ranks"), _meanings(hosts))
        console.print(_total(hosts))
        return 0
    with Console(stderr=True).status("asking the hosts"):
        checked = check(hosts, system)
    _show_checked(console, checked)
    return 1 if checked.problems else 0


def _hosts(args: argparse.Namespace) -> tuple[tuple[Host, ...], str | None]:
    """The hosts, and the batch system that gave them."""
    # Hosts that `hvkit run` would refuse are not ready.
    hosts, allocation = hosts_of(args, refuse if args.check else _tell)
    if allocation is not None:
        print(f"hvkit: hosts from {allocation.system} ({allocation.source})", file=sys.stderr)
    elif not hosts:
        raise LaunchError(
            "no hosts: name a hostfile or -H HOST:SLOTS,..., or call this in a job of Slurm, PBS, "
            "LSF or the Kubernetes MPI operator"
        )
    return hosts, None if allocation is None else allocation.system


def _tell(repeat: str) -> None:
    print(f"hvkit: {repeat}, or `hvkit run` refuses it; they are added here", file=sys.stderr)


def _meanings(hosts: Sequence[Host]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    first: int | None = 0
    for host in hosts:
        last = None if first is None or host.slots is None else first + host.slots - 1
        rows.append(
            (
                host.name,
                "its cores" if host.slots is None else str(host.slots),
                _NONE if host.max_slots is None else str(host.max_slots),
                host.user or _NONE,
                _range(first, last),
            )
        )
        first = None if last is None else last + 1
    return rows


def _range(first: int | None, last: int | None) -> str:
    if first is None:
        return _NONE
    if last is None:
        return f"{first}-"
    return str(first) if first == last else f"{first}-{last}"


def _total(hosts: Sequence[Host]) -> str:
    slots = [host.slots for host in hosts]
    known = sum(number for number in slots if number is not None)
    more = " and the cores of hosts that name none" if None in slots else ""
    return f"{counted(len(hosts), 'host')}, {counted(known, 'slot')}{more}"


def _show_checked(console: Console, checked: Checked) -> None:
    rows: list[tuple[str, ...]] = []
    for one in checked.examined:
        host, facts = one.host, one.facts
        number = sum(host.name in problem.hosts for problem in checked.problems)
        rows.append(
            (
                host.name,
                "its cores" if host.slots is None else str(host.slots),
                *(
                    (_NONE, _NONE, _NONE)
                    if facts is None
                    else (str(facts.cores), str(facts.gpus), f"{facts.memory / 2**30:.1f} GiB")
                ),
                checked.interfaces.get(host.name, _NONE),
                counted(number, "problem") if number else "fine",
            )
        )
    columns = ("host", "slots", "cores", "GPUs", "free memory", "interface", "result")
    show(console, columns, rows)
    for problem in checked.problems:
        console.print(f"problem: {problem}", style="bold red", markup=False, soft_wrap=True)
