"""Which of the ways to other hosts is taken."""

from hvkit.launch.allocation import SLURM
from hvkit.launch.srun import srun
from hvkit.launch.ssh import SSH, RemoteShell


def shell_of(system: str | None) -> RemoteShell:
    """What takes commands to hosts: in Slurm, whose sites may forbid ssh, its own ``srun``.

    Args:
        system: the batch system that gave the hosts, as in ``Allocation``; ``None`` for none.
    """
    return (srun() if system == SLURM else None) or SSH
