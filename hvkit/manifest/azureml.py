"""A run as a command job of Azure Machine Learning, whose service writes ``mpirun`` itself.

So the job's command is that of one rank, and neither ``hvkit run`` nor its options take part: Azure
starts the ranks with the Open MPI that is in the image, and ends them when one fails.
"""

import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from hvkit.manifest.fields import HvkitRun, folders, without_empty
from hvkit.manifest.kubernetes import yaml_text

_SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
_FOLDER = "uri_folder"
# Azure puts a shell variable with the folder in the place of each of these.
_EXPRESSION = re.compile(r"(\$\{\{[^{}]*\}\})")


def manifest(options: Mapping[str, Any], run: HvkitRun) -> str:
    """The job, as YAML for ``az ml job create --file``.

    Args:
        options: the values of ``hvkit manifest azureml``'s options, by name.
        run: the ranks and their command.

    Raises:
        ValueError: not all hosts have the same number of ranks, two inputs or outputs have one
            name, or the command names one that is not there.
    """
    if run.size.idle:
        raise ValueError(
            f"-np {run.size.ranks} with --slots {run.size.slots}: Azure ML starts as many ranks on "
            f"each node: -np must be a multiple of --slots, such as "
            f"{run.size.hosts * run.size.slots}"
        )
    inputs, outputs = folders("input", options), folders("output", options)
    expressions = {f"${{{{inputs.{name}}}}}" for name in inputs}
    expressions |= {f"${{{{outputs.{name}}}}}" for name in outputs}
    words = [_quoted(word, expressions) for word in _with_python(run.command)]
    seconds = options["time"]
    job: dict[str, Any] = {
        "$schema": _SCHEMA,
        "type": "command",
        "display_name": options["name"],
        "experiment_name": options["experiment"],
        "code": options["code"],
        "command": " ".join(words),
        "inputs": {name: {"type": _FOLDER, "path": path} for name, path in inputs.items()},
        "outputs": {name: {"type": _FOLDER, "path": path} for name, path in outputs.items()},
        "identity": options["identity"],
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
    return yaml_text(without_empty(job))


def _with_python(command: tuple[str, ...]) -> tuple[str, ...]:
    return ("python", *command) if command[0].endswith(".py") else command


def _quoted(word: str, expressions: Collection[str]) -> str:
    """The word for a shell, which must not see Azure's expressions in quotes."""
    parts = _EXPRESSION.split(word)
    for expression in parts[1::2]:
        if expression not in expressions:
            known = ", ".join(sorted(expressions)) or "none"
            raise ValueError(
                f"{expression} in COMMAND names no folder of this job ({known}): add it with "
                "--input or --output"
            )
    parts[::2] = [part and shlex.quote(part) for part in parts[::2]]
    return "".join(parts) or "''"
