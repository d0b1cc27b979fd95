"""Hostfiles and lists of hosts: reading Open MPI's and MPICH's form strictly, and writing them.

What is not surely meant is an error that names file and line, :class:`hvkit.errors.HostfileError`.
"""

from hvkit.launch.hostfile.entries import Entry, merged, repeated
from hvkit.launch.hostfile.option import hosts_option, read_hosts_option
from hvkit.launch.hostfile.reading import parse_hostfile, read_entries, read_hostfile
from hvkit.launch.hostfile.writing import write_horovodrun, write_mpich, write_openmpi

__all__ = [
    "Entry",
    "hosts_option",
    "merged",
    "parse_hostfile",
    "read_entries",
    "read_hostfile",
    "read_hosts_option",
    "repeated",
    "write_horovodrun",
    "write_mpich",
    "write_openmpi",
]
