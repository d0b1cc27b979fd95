"""A run as a TrainJob of the Kubeflow Trainer, version 2, with a TrainingRuntime of its own.

The Trainer makes of them what the MPI operator makes of an MPIJob (``mpijob``): one pod per host
that serves ssh, and one for ``hvkit run``; a key for all of them, and a hostfile. The runtime has
the pods, and the job the command. The Trainer puts the key only into containers that are named
``node``, so the launcher's has this name as well.

The pods need an image built from this project's Dockerfile.
"""

from collections.abc import Mapping
from typing import Any

from hvkit.manifest.fields import HvkitRun
from hvkit.manifest.kubernetes import check_hostname, check_variables, from_template, values_of

# What the resource definition allows of words, and of variables.
_MOST = 128


def manifest(options: Mapping[str, Any], run: HvkitRun) -> str:
    """The two Kubernetes resources, as YAML.

    Args:
        options: the values of ``hvkit manifest trainjob``'s options, by name.
        run: what the launcher starts.

    Raises:
        ValueError: the name is too long for this many workers, the shared memory is not less than
            the memory of a worker, two volumes have one path, something is set twice, the Trainer
            overwrites a variable, or the command has more words, or the job more variables, than
            the Trainer takes.
    """
    name, workers = options["name"], run.size.hosts
    # The JobSet below adds five letters to the name of a pod.
    pods = (f"{name}-launcher-0-0-xxxxx", f"{name}-node-0-{workers - 1}-xxxxx")
    check_hostname(name, max(pods, key=len))
    values = values_of(options, run)
    check_variables(values["variables"], "the Kubeflow Trainer")
    for what, given in (("command", values["run"]), ("--env", values["env"])):
        if len(given) > _MOST:
            raise ValueError(
                f"{what}: the Kubeflow Trainer takes at most {_MOST} words of a command, each -x "
                f"and its variable included, and {_MOST} variables, got {len(given)}: put them "
                "into a file that the script reads"
            )
    return from_template("trainjob.yaml", values)
