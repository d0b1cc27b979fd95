"""Open MPI's ``mpirun``, versions 4 and 5."""

import os
from collections.abc import Callable, Sequence

from hvkit.errors import LaunchError
from hvkit.host import mca
from hvkit.launch.hostfile import hosts_option
from hvkit.launch.job import Job


def arguments(major: int, mpirun: str) -> Callable[[Job], list[str]]:
    """What makes arguments for ``mpirun`` of this major version, 4 or newer.

    They raise LaunchError for hosts that reach each other over IPv6 alone, and for interfaces that
    were asked for against what a file of Open MPI's says.
    """

    def arguments_of(job: Job) -> list[str]:
        options = ["-np", str(job.size), "--host", hosts_option(job.hosts)]
        # The ranks bind themselves, to an equal share of their host each: left alone, Open MPI
        # would give a rank a single core.
        options += ["--map-by", "slot", "--bind-to", "none"]
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
        options += _between(mca.daemons(major), job.daemon_networks, job, mpirun)
        options += _between(mca.RANKS, job.networks, job, mpirun)
        if any("." in host.name for host in job.hosts):
            # Else node1.rack1 and node1.rack2 are one host to it.
            options += [*_keep_full_names(major), "1"]
        if job.crowded:
            # A rank that waits would keep the core from the one that it waits for.
            options += ["--mca", "mpi_yield_when_idle", "1"]
        for name in job.forwarded:
            options += ["-x", name]
        return [*options, *job.command]

    return arguments_of


def _between(
    setting: mca.InterfaceSetting, networks: Sequence[str], job: Job, mpirun: str
) -> list[str]:
    """The option that names networks, unless the user or the site has made that setting."""
    if not networks:
        return []
    if job.networks_asked_for:
        mca.refuse_exclusion(setting, job.environ, mpirun)
    elif mca.place_set(setting, job.environ, mpirun):
        return []
    if six := [network for network in networks if ":" in network]:
        raise LaunchError(
            f"the hosts reach each other over {six[0]}, and Open MPI is built without IPv6: "
            "give them IPv4 addresses too, or use --launcher gloo"
        )
    return [*setting.option, ",".join(networks)]


def _keep_full_names(major: int) -> tuple[str, str]:
    """The option, but for its value, that has names not cut off at their first dot."""
    if major >= 5:
        return "--prtemca", "prte_keep_fqdn_hostnames"
    return "--mca", "orte_keep_fqdn_hostnames"
