"""A run as the request ``CreateTrainingJob`` of Amazon SageMaker.

SageMaker starts the same command on every host, and names the hosts ``algo-1``, ``algo-2``, ...
The command writes a hostfile with their slots, since a list of many hosts is longer than the words
that SageMaker takes. On the first host ``hvkit run`` starts the ranks, on the others it waits.
Hosts log in to each other with a key that is in the image, which is built from this project's
Dockerfile and adds one.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hvkit.manifest.fields import HvkitRun, folders, without_empty

# What the service takes of arguments, and the length of each; and of a variable's value.
_MOST, _LONGEST, _LONGEST_VALUE = 100, 256, 512
_HOSTFILE = "/tmp/hosts"
_DAY = 24 * 3600


def manifest(options: Mapping[str, Any], run: HvkitRun) -> str:
    """The request, as JSON for ``aws sagemaker create-training-job --cli-input-json``.

    Args:
        options: the values of ``hvkit manifest sagemaker``'s options, by name.
        run: what every host starts.

    Raises:
        ValueError: the command or a variable is longer than SageMaker takes, two inputs have one
            name, or options do not go together.
    """
    words = ["run", "--hostfile", _HOSTFILE, *run.words(run.variables)[1:]]
    _check_lengths(words, run.variables)
    request: dict[str, Any] = {
        "TrainingJobName": options["name"],
        "RoleArn": options["role"],
        "AlgorithmSpecification": {
            "TrainingImage": options["image"],
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash", "-c", _start(run), "hvkit"],
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
        "OutputDataConfig": {
            "S3OutputPath": options["output"],
            "KmsKeyId": options["output_key"],
        },
        "ResourceConfig": {
            "InstanceType": options["instance_type"],
            "InstanceCount": run.size.hosts,
            "VolumeSizeInGB": options["disk"],
            "VolumeKmsKeyId": options["disk_key"],
        },
        "VpcConfig": _network(options["subnet"], options["security_group"]),
        "EnableManagedSpotTraining": True if options["spot"] else None,
        "CheckpointConfig": {"S3Uri": options["checkpoints"]},
        "StoppingCondition": _times(options["time"] or _DAY, options["spot"]),
    }
    return json.dumps(without_empty(request), indent=2) + "\n"


def _start(run: HvkitRun) -> str:
    """The shell's script before the arguments of ``hvkit``, on one line."""
    hosts = f"printf 'algo-%s slots={run.size.slots}\\n' $(seq {run.size.hosts})"
    # sshd goes on in the background, and ends with the container.
    return f'{hosts} > {_HOSTFILE}; hvkit-sshd & exec hvkit "$@"'


def _network(subnets: Sequence[str], groups: Sequence[str]) -> dict[str, Sequence[str]]:
    if bool(subnets) != bool(groups):
        raise ValueError("--subnet and --security-group belong together: give both or neither")
    return {"Subnets": subnets, "SecurityGroupIds": groups}


def _times(longest: int, spot: int | None) -> dict[str, int | None]:
    """The limits in seconds; ``spot`` includes the waits for instances."""
    if spot is not None and spot < longest:
        raise ValueError(
            f"--spot: SageMaker takes no wait ({spot} s) shorter than the job's time limit, --time "
            f"({longest} s): raise --spot or lower --time"
        )
    return {"MaxRuntimeInSeconds": longest, "MaxWaitTimeInSeconds": spot}


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
        if "\n" in word:
            raise ValueError(
                f"{word[:20]!r}... has several lines, SageMaker takes one line in a word: put it "
                "into a file that the script reads"
            )
    for name, value in variables.items():
        if len(value) > _LONGEST_VALUE:
            raise ValueError(
                f"--env {name}: the value has {len(value)} characters, SageMaker takes "
                f"{_LONGEST_VALUE}: put it into a file that the script reads"
            )
