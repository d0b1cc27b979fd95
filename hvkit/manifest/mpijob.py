"""A run as an MPIJob of the Kubeflow MPI operator: the values for ``mpijob.yaml``.

The operator starts one pod per host (the workers) and one pod for ``hvkit run`` (the launcher). It
mounts an ssh key into all pods and the list of workers into the launcher. Variables that only Open
MPI 4 reads (``OMPI_MCA_orte_...``) point to that list, so a plain ``mpirun`` of Open MPI 5 would
not find the workers; ``hvkit run`` reads the variables.

The pods need an image built from this project's Dockerfile.
"""

from collections.abc import Mapping
from typing import Any

from hvkit.manifest.fields import HvkitRun
from hvkit.manifest.kubernetes import check_hostname, check_variables, from_template, values_of

# The operator sets these on the launcher, too.
_OPERATORS_OWN = ("K_MPI_JOB_ROLE", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")


def manifest(options: Mapping[str, Any], run: HvkitRun) -> str:
    """The Kubernetes resource, as YAML.

    Args:
        options: the values of ``hvkit manifest mpijob``'s options, by name.
        run: what the launcher starts.

    Raises:
        ValueError: the name is too long for this many workers, the shared memory is not less than
            the memory of a worker, two volumes have one path, something is set twice, or the
            operator overwrites a variable.
    """
    name, workers = options["name"], run.size.hosts
    check_hostname(name, max(f"{name}-launcher", f"{name}-worker-{workers - 1}", key=len))
    values = values_of(options, run)
    check_variables(values["variables"], "the MPI operator", _OPERATORS_OWN)
    return from_template("mpijob.yaml", values)
