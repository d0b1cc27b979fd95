"""The hosts that a batch system has given to this job, read from what it leaves behind.

Which variables count, and in which order, stands in the module of each system.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hvkit.launch.allocation import hostfile, lsf, pbs, slurm
from hvkit.launch.hosts import Host

# The hostfile last: a site can set its variable for all jobs of its batch system.
_SYSTEMS = (slurm, pbs, lsf, hostfile)

SLURM = slurm.NAME
HOSTFILE = hostfile.NAME


@dataclass(frozen=True)
class Allocation:
    """What a batch system has given to this job.

    Attributes:
        system: its name, ``SLURM``, ``HOSTFILE`` for a launcher's
            default hostfile, as of the Kubernetes MPI operator, or that of another batch system.
        source: the variable or the file that tells: ``SLURM_JOB_NODELIST``.
        hosts: each host once, with its slots.
    """

    system: str
    source: str
    hosts: tuple[Host, ...]


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation that this process is in, or ``None`` if there is none.

    Raises:
        LaunchError: a variable, or the file that it names, is not what that system writes.
    """
    for system in _SYSTEMS:
        found = system.hosts(environ)
        if found is not None:
            source, hosts = found
            return Allocation(system.NAME, source, hosts)
    return None
