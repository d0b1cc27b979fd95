"""``horovodrun``, over MPI or with Gloo alone.

With Gloo it puts what it forwards on the command lines of ssh, where everybody on these hosts can
read it while the job runs; the key with which ranks show that they are of this run, too.
"""

from collections.abc import Callable

from hvkit.errors import LaunchError
from hvkit.host import mca
from hvkit.host.commands import program
from hvkit.launch.hostfile import hosts_option
from hvkit.launch.job import Job


def arguments(controller: str) -> Callable[[Job], list[str]]:
    """What makes arguments for ``--mpi`` or ``--gloo``.

    horovodrun sends all of its environment to the other hosts, so it has to be started with what
    is to be forwarded. Over MPI they raise LaunchError where the user or the site has set Open
    MPI's interfaces, which horovodrun always sets by itself.
    """

    def arguments_of(job: Job) -> list[str]:
        options = [controller, "-np", str(job.size), "-H", hosts_option(job.hosts)]
        if job.interfaces:
            if controller == "--mpi":
                _refuse_set_interfaces(job)
            options += ["--network-interfaces", ",".join(job.interfaces)]
        return [*options, *job.command]

    return arguments_of


def _refuse_set_interfaces(job: Job) -> None:
    mpirun = program("mpirun")
    if job.networks_asked_for:
        mca.refuse_exclusion(mca.RANKS, job.environ, mpirun)
    elif place := mca.place_set(mca.RANKS, job.environ, mpirun):
        raise LaunchError(
            f"{place} sets Open MPI's interfaces, and horovodrun sets them, too: name them with "
            "--interfaces instead, or leave --launcher away to use mpirun"
        )
