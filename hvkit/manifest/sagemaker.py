"""A run as the request ``CreateTrainingJob`` of Amazon SageMaker.

SageMaker starts the same command on every host, and names the hosts in a file that ``hvkit run``
reads: on the first host it starts the ranks, on the others it waits. Hosts log in to each other
with a key that is in the image, which is built from this project's Dockerfile and adds one.
"""

import json
from collections.abc import Mapping
from typing import Any

from hvkit.manifest.fields import HvkitRun, folders

# What the service takes of arguments, and the length of each; and of a variable's value.
_MOST, _LONGEST, _LONGEST_VALUE = 100, 256, 512
# sshd goes on in the background, and ends with the container.
_START = 'hvkit-sshd & exec hvkit "$@"'
_DAY = 24 * 3600


def manifest(options: Mapping[str, Any], run: HvkitRun) -> str:
    """The request, as JSON for ``aws sagemaker create-training-job --cli-input-json``.

    Args:
        options: the values of ``hvkit manifest sagemaker``'s options, by name.
        run: what every host starts.

    Raises:
        ValueError: the command or a variable is longer than SageMaker takes, or two inputs have
            one name.
    """
    words = ["run", "-H", _hosts(run), *run.words(run.variables)[1:]]
    _check_lengths(words, run.variables)
    request: dict[str, Any] = {
        "TrainingJobName": options["name"],
        "RoleArn": options["role"],
        "AlgorithmSpecification": {
            "TrainingImage": options["image"],
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash", "-c", _START, "hvkit"],
            "ContainerArguments": words,
        },
        "Environment": dict(run.variables),
        "InputDataConfig": [
            {
                "ChannelName": name,
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "S3Prefix",
                        "S3Uri": place,
                        # Each rank takes its part of the same data itself.
                        "S3DataDistributionType": "FullyReplicated",
                    }
                },
            }
            for name, place in folders("input", options).items()
        ],
        "OutputDataConfig": {"S3OutputPath": options["output"]},
        "ResourceConfig": {
            "InstanceType": options["instance_type"],
            "InstanceCount": run.size.hosts,
            "VolumeSizeInGB": options["disk"],
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": options["time"] or _DAY},
    }
    kept = {name: value for name, value in request.items() if value not in ({}, [])}
    return json.dumps(kept, indent=2) + "\n"


def _hosts(run: HvkitRun) -> str:
    """The hosts of the job by the names that SageMaker gives them, with the ranks on each."""
    last = run.size.hosts
    slots = [run.size.slots] * (last - 1) + [run.size.slots - run.size.idle]
    return ",".join(f"algo-{number}:{some}" for number, some in enumerate(slots, 1))


def _check_lengths(words: list[str], variables: Mapping[str, str]) -> None:
    if len(words) > _MOST:
        raise ValueError(
            f"the command, with the options of `hvkit run`, has {len(words)} words, SageMaker "
            f"takes {_MOST}: put arguments into a file that the script reads"
        )
    for word in words:
        if len(word) > _LONGEST:
            raise ValueError(
                f"{word[:20]}... has {len(word)} characters, SageMaker takes {_LONGEST} of one "
                "word: put it into a file that the script reads"
            )
    for name, value in variables.items():
        if len(value) > _LONGEST_VALUE:
            raise ValueError(
                f"--env {name}: the value has {len(value)} characters, SageMaker takes "
                f"{_LONGEST_VALUE}: put it into a file that the script reads"
            )
