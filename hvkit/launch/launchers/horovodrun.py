"""``horovodrun``, over MPI or with Gloo alone.

With Gloo it puts what it forwards on the command lines of ssh, where everybody on these hosts can
read it while the job runs; the key with which ranks show that they are of this run, too.
"""

from collections.abc import Callable

from hvkit.launch.hostfile import hosts_option
from hvkit.launch.job import Job


def arguments(controller: str) -> Callable[[Job], list[str]]:
    """What makes arguments for ``--mpi`` or ``--gloo``.

    horovodrun sends all of its environment to the other hosts, so it has to be started with what
    is to be forwarded.
    """

    def arguments_of(job: Job) -> list[str]:
        options = [controller, "-np", str(job.size), "-H", hosts_option(job.hosts)]
        if job.interfaces:
            options += ["--network-interfaces", ",".join(job.interfaces)]
        return [*options, *job.command]

    return arguments_of
