"""A run as a command job of Azure Machine Learning, whose service writes ``mpirun`` itself.

So the job's command is that of one rank, and neither ``hvkit run`` nor its options take part: Azure
starts the ranks with the Open MPI that is in the image, and ends them when one fails.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from hvkit.manifest.fields import HvkitRun
from hvkit.manifest.kubernetes import yaml_text

_SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
# A run's folders for inputs are in the place of ${{inputs.NAME}} in the command.
_FOLDER = "uri_folder"


def manifest(options: Mapping[str, Any], run: HvkitRun) -> str:
    """The job, as YAML for ``az ml job create --file``.

    Args:
        options: the values of ``hvkit manifest azureml``'s options, by name.
        run: the ranks and their command.

    Raises:
        ValueError: not all hosts have the same number of ranks, or two inputs have one name.
    """
    if run.size.idle:
        raise ValueError(
            f"-np {run.size.ranks} with --slots {run.size.slots}: Azure ML starts as many ranks on "
            f"each node: -np must be a multiple of --slots, such as "
            f"{run.size.hosts * run.size.slots}"
        )
    inputs = dict(options["input"])
    if len(inputs) < len(options["input"]):
        raise ValueError("argument --input: a name is used twice: give each input its own")
    seconds = options["time"]
    job: dict[str, Any] = {
        "$schema": _SCHEMA,
        "type": "command",
        "display_name": options["name"],
        "experiment_name": options["experiment"],
        "code": options["code"],
        # Azure replaces ${{inputs.NAME}}, which a shell must not see in quotes.
        "command": " ".join(map(_quoted, _with_python(run.command))),
        "inputs": {name: {"type": _FOLDER, "path": path} for name, path in inputs.items()},
        "environment": {"image": options["image"]},
        "environment_variables": dict(run.variables),
        "compute": f"azureml:{options['compute']}",
        "distribution": {"type": "mpi", "process_count_per_instance": run.size.slots},
        "resources": {
            "instance_count": run.size.hosts,
            "shm_size": options["shm_size"] and str(options["shm_size"]),
        },
        "limits": {"timeout": seconds} if seconds else None,
    }
    return yaml_text(_without_empty(job))


def _with_python(command: tuple[str, ...]) -> tuple[str, ...]:
    return ("python", *command) if command[0].endswith(".py") else command


def _quoted(word: str) -> str:
    return word if word.startswith("${{") and word.endswith("}}") else shlex.quote(word)


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value, at all depths."""
    kept = {
        name: _without_empty(value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    return {name: value for name, value in kept.items() if value not in (None, {}, [])}
