"""MPICH's ``mpirun``, Hydra."""

from hvkit.errors import LaunchError
from hvkit.launch.hostfile import hosts_option
from hvkit.launch.job import Job


def arguments(job: Job) -> list[str]:
    """Hydra's arguments for ``job``.

    Hydra sends all of its environment to the other hosts, even if ranks get a part of it only, so
    it has to be started with what is to be forwarded.

    Raises:
        LaunchError: the hosts reach each other over interfaces of different names, or a host has
            a user.
    """
    for host in job.hosts:
        if host.user is not None:
            raise LaunchError(
                f"{host.user}@{host.name}: MPICH's mpirun takes no users: set User {host.user} "
                "for this host in ~/.ssh/config"
            )
    # The ranks bind themselves, to an equal share of their host each.
    options = ["-np", str(job.size), "-hosts", hosts_option(job.hosts), "-bind-to", "none"]
    if len(job.interfaces) > 1:
        raise LaunchError(
            f"the hosts reach each other over {' and '.join(job.interfaces)}, but MPICH takes one "
            "name for all hosts: use Open MPI, or give all hosts' interfaces one name"
        )
    if job.interfaces:
        options += ["-iface", job.interfaces[0]]
    return [*options, *job.command]
