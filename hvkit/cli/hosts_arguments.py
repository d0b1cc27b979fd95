"""The arguments that name hosts, and what they mean."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from hvkit.errors import HostfileError
from hvkit.launch.allocation import allocation
from hvkit.launch.hostfile import Entry, merged, read_entries, read_hosts_option, repeated
from hvkit.launch.hosts import Host


def add_hosts_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--hostfile`` and ``-H``, which exclude each other."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--hostfile", type=Path, metavar="FILE", help="hosts and slots, as for mpirun"
    )
    group.add_argument("-H", dest="hosts", metavar="HOST:SLOTS,...", help="hosts and slots")


def hosts_of(args: argparse.Namespace) -> tuple[tuple[Host, ...], str | None]:
    """The hosts that the arguments name, else the batch system's, and that system's name.

    There are no hosts if neither names any.

    Raises:
        HostfileError: the file or the list is wrong, or names a host twice.
        LaunchError: what the batch system left in the environment is wrong.
    """
    if args.hostfile is not None:
        return _once(read_entries(args.hostfile), str(args.hostfile)), None
    if args.hosts is not None:
        return _once(read_hosts_option(args.hosts), "-H"), None
    found = allocation(os.environ)
    return ((), None) if found is None else (found.hosts, found.system)


def _once(entries: Sequence[Entry], name: str) -> tuple[Host, ...]:
    """Refuse a host that is named twice, which mpirun takes in some forms and not in others."""
    for host, places in repeated(entries).items():
        same = (entry.host for entry in entries if entry.host.name.lower() == host.lower())
        total = sum(one.slots or 1 for one in same)
        raise HostfileError(
            f"{name}: {places[1]}: {host} is named again after {places[0]}: name it once, with "
            f"all its slots ({total})"
        )
    return merged(entries, name)
