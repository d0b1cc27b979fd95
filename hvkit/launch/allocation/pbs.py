"""PBS (Torque, PBS Pro, OpenPBS): the file ``PBS_NODEFILE`` has a line for each slot.

In PBS Pro a chunk has as many lines as its ``mpiprocs``, one if that is not asked for.
"""

from collections.abc import Mapping

from hvkit.launch.allocation.counting import Found, hosts_of_file

NAME = "PBS"

_FILE = "PBS_NODEFILE"


def hosts(environ: Mapping[str, str]) -> Found | None:
    """The hosts of the job and the variable that names them; ``None`` outside of PBS.

    Raises:
        LaunchError: the file cannot be read, or is not what PBS writes.
    """
    return (_FILE, hosts_of_file(environ, _FILE)) if _FILE in environ else None
