"""The arguments that name hosts, and what they mean."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hvkit.errors import HostfileError
from hvkit.launch.allocation import Allocation, allocation
from hvkit.launch.hostfile import read_entries
from hvkit.launch.hosts import Entry, Host, merged, read_hosts_option, repeated


def add_hosts_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--hostfile`` and ``-H``, which exclude each other."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--hostfile", type=Path, metavar="FILE", help="hosts and slots, as for mpirun"
    )
    group.add_argument("-H", dest="hosts", metavar="HOST:SLOTS,...", help="hosts and slots")


def hosts_of(
    args: argparse.Namespace, repeats: Callable[[str], None]
) -> tuple[tuple[Host, ...], Allocation | None]:
    """The hosts that the arguments name, or else those of the batch system, and its allocation.

    There are no hosts if neither names any.

    Args:
        args: with ``hostfile`` and ``hosts``, the text of ``-H``.
        repeats: is told of each host that is named twice, which mpirun takes in some forms and not
            in others: :func:`refuse`, or what says so and goes on with the sum of its slots.

    Raises:
        HostfileError: the file or the list is wrong.
        LaunchError: what the batch system left in the environment is wrong.
    """
    if args.hostfile is not None:
        return _named(read_entries(args.hostfile), str(args.hostfile), repeats), None
    if args.hosts is not None:
        return _named(read_hosts_option(args.hosts), "-H", repeats), None
    found = allocation(os.environ)
    return ((), None) if found is None else (found.hosts, found)


def refuse(repeat: str) -> None:
    """Take no host that is named twice.

    Raises:
        HostfileError: always.
    """
    raise HostfileError(repeat)


def _named(entries: Sequence[Entry], name: str, repeats: Callable[[str], None]) -> tuple[Host, ...]:
    hosts = merged(entries, name)
    slots = {host.name: host.slots for host in hosts}
    for host, places in repeated(entries).items():
        repeats(
            f"{name}: {places[1]}: {host} is named again after {places[0]}: name it once, with "
            f"all its slots ({slots[host]})"
        )
    return hosts
