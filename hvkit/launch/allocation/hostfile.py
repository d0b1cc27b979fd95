"""A hostfile that stands ready: that of the Kubernetes MPI operator, or of a site.

The operator tells MPI where it is by a variable, which depends on the MPI that its job names, and
mounts it at ``/etc/mpi/hostfile``; in Kubernetes it is looked for there without a variable, too.
"""

from collections.abc import Mapping
from pathlib import Path

from hvkit.errors import HostfileError, LaunchError
from hvkit.launch.allocation.counting import Found
from hvkit.launch.hostfile import read_hostfile

NAME = "hostfile"

_VARIABLES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
)
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"
_OF_OPERATOR = Path("/etc/mpi/hostfile")


def hosts(environ: Mapping[str, str]) -> Found | None:
    """The hosts of the file and what names it; ``None`` if there is no such file.

    Raises:
        LaunchError: the file cannot be read, or is not a hostfile.
    """
    for variable in _VARIABLES:
        if value := environ.get(variable):
            try:
                return variable, read_hostfile(Path(value))
            except HostfileError as error:
                raise LaunchError(f"{variable} names a hostfile that is wrong: {error}") from None
    if _IN_KUBERNETES in environ and _OF_OPERATOR.is_file():
        try:
            return str(_OF_OPERATOR), read_hostfile(_OF_OPERATOR)
        except HostfileError as error:
            raise LaunchError(f"the hostfile of the MPI operator is wrong: {error}") from None
    return None
