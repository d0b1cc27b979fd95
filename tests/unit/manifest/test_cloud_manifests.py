"""What ``hvkit manifest`` writes for the Trainer, SageMaker and Azure ML is what they accept.

Each text is validated with the system's own schema. With another name of any field it is invalid.
"""

import copy
import json
import shlex
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from resource_definitions import METADATA, problems_of, read_definition, strict

from hvkit import cli

DATA = Path(__file__).parent / "data"
RUN = "-np 8 --slots 4 --env RATE=1e-3"
COMMAND = "train.py --epochs 2"
TRAINJOB = (
    f"manifest trainjob --image hvkit:1 --name digits --namespace ml {RUN} --gpus 1 --cpus 500m "
    "--memory 4Gi --shm-size 1Gi --volume d:/data --launcher-cpus 2 --launcher-memory 2Gi "
    "--retries 2 --grace 60 --prefix --pull-secret registry --node-label example.com/gpu=a100 "
    "--tolerate nvidia.com/gpu --tolerate pool=train:NoSchedule --queue training "
    "--secret-env TOKEN=tracker:api-token"
)
SAGEMAKER = (
    f"manifest sagemaker --image hvkit:1 --name digits {RUN} --instance-type ml.p4d.24xlarge "
    "--role arn:aws:iam::123456789012:role/train --output s3://bucket/out --disk 50 "
    "--input data=s3://bucket/mnist --time 1-02:00:00 --prefix "
    "--spot 2-00:00:00 --checkpoints s3://b/c --subnet subnet-1 --subnet subnet-2 "
    "--security-group sg-1 --output-key alias/results --disk-key 1234-ab"
)
AZUREML = (
    f"manifest azureml --image hvkit:1 --name digits {RUN} --compute gpus --code src "
    "--experiment e --shm-size 4Gi --time 02:00:00 --input data=azureml://datastores/d/paths/m "
    "--output model=azureml://datastores/d/paths/o "
    "--identity 01234567-89ab-cdef-0123-456789abcdef"
)

CHOSEN_BY_US = ("Environment", "environment_variables", "inputs", "outputs", "nodeSelector")


@cache
def validators():
    """The schema of each kind of document."""
    found = {}
    for kind, file in (("TrainingRuntime", "trainingruntimes"), ("TrainJob", "trainjobs")):
        schema = read_definition(f"trainer.kubeflow.org_{file}", "v1alpha1")
        top = schema["properties"]
        top["kind"]["const"] = kind
        top["metadata"] = METADATA
        if kind == "TrainingRuntime":
            # The metadata of pods: the definition leaves them open, and ours are labels.
            jobs = top["spec"]["properties"]["template"]["properties"]["spec"]["properties"]
            job = jobs["replicatedJobs"]["items"]["properties"]["template"]["properties"]
            job["metadata"] = {
                "type": "object",
                "properties": {"labels": {"additionalProperties": {"type": "string"}}},
                "additionalProperties": False,
            }
        found[kind] = strict(schema)
    for kind in ("sagemaker_create_training_job", "azureml_command_job"):
        found[kind] = Draft202012Validator(json.loads((DATA / f"{kind}.json").read_text()))
    return found


def problems(documents, kinds):
    return [
        problem
        for document, kind in zip(documents, kinds, strict=True)
        for problem in problems_of(validators()[kind], document)
    ]


SYSTEMS = [
    pytest.param(
        TRAINJOB,
        lambda text: list(yaml.safe_load_all(text)),
        ("TrainingRuntime", "TrainJob"),
        id="trainjob",
    ),
    pytest.param(
        SAGEMAKER,
        lambda text: [json.loads(text)],
        ("sagemaker_create_training_job",),
        id="sagemaker",
    ),
    pytest.param(
        AZUREML, lambda text: [yaml.safe_load(text)], ("azureml_command_job",), id="azureml"
    ),
]
Read = Callable[[str], list[Any]]


def written(capsys, line):
    assert cli.main(shlex.split(f"{line} {COMMAND}")) == 0
    return capsys.readouterr().out


def fields(value, path=()):
    """The path of every named field whose name the system chooses."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in items:
        chosen_by_us = path and path[-1] in CHOSEN_BY_US
        if isinstance(key, str) and not chosen_by_us and "labels" not in path:
            yield (*path, key)
        if isinstance(below, dict | list):
            yield from fields(below, (*path, key))


def test_sagemaker_takes_hundreds_of_hosts(capsys):
    documents = [json.loads(written(capsys, SAGEMAKER.replace("-np 8", "-np 2048")))]
    assert problems(documents, ("sagemaker_create_training_job",)) == []


@pytest.mark.parametrize(("line", "read", "kinds"), SYSTEMS)
def test_the_text_is_valid_and_with_any_other_field_it_is_not(capsys, line, read, kinds):
    documents = read(written(capsys, line))
    assert problems(documents, kinds) == []
    paths = list(fields(documents))
    assert len(paths) > 15
    accepted = []
    for path in paths:
        # Quantities are by resource: any name would do, and none of ours is another's.
        if "limits" in path[:-1] and line is TRAINJOB:
            continue
        changed = copy.deepcopy(documents)
        parent = changed
        for key in path[:-1]:
            parent = parent[key]
        parent[f"{path[-1]}s"] = parent.pop(path[-1])
        if not problems(changed, kinds):
            accepted.append(path)
    assert accepted == []


def test_a_trainjob_starts_hvkit_run_in_the_launcher_alone(capsys):
    runtime, job = yaml.safe_load_all(written(capsys, TRAINJOB))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "digits"
    assert runtime["metadata"]["namespace"] == job["metadata"]["namespace"] == "ml"
    trainer = job["spec"]["trainer"]
    assert [*trainer["command"], *trainer["args"]] == shlex.split(
        "hvkit run -np 8 -x RATE -x TOKEN --grace 60 --prefix train.py --epochs 2"
    )
    reference = {"secretKeyRef": {"name": "tracker", "key": "api-token"}}
    assert trainer["env"] == [
        {"name": "RATE", "value": "1e-3"},
        {"name": "TOKEN", "valueFrom": reference},
    ]
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "training"}
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    node, launcher = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = [each["template"]["spec"]["template"]["spec"] for each in (node, launcher)]
    assert pods[0]["nodeSelector"] == {"example.com/gpu": "a100"}
    assert "nodeSelector" not in pods[1]
    for pod in pods:
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists"},
            {"key": "pool", "operator": "Equal", "value": "train", "effect": "NoSchedule"},
        ]
    of_node, of_launcher = (pod["containers"][0] for pod in pods)
    assert of_node["command"] == ["hvkit-sshd"]
    assert "command" not in of_launcher
    # The Trainer puts the key into containers of this name only.
    assert of_node["name"] == of_launcher["name"] == "node"
    assert of_node["resources"]["limits"] == {"cpu": "2000m", "memory": "16Gi", "nvidia.com/gpu": 4}


def test_sagemaker_starts_the_same_on_every_host_and_ranks_by_slots(capsys):
    request = json.loads(written(capsys, SAGEMAKER.replace("-np 8", "-np 7")))
    algorithm = request["AlgorithmSpecification"]
    assert algorithm["ContainerArguments"] == shlex.split(
        "run --hostfile /tmp/hosts -np 7 -x RATE --prefix train.py --epochs 2"
    )
    *bash, script, name = algorithm["ContainerEntrypoint"]
    assert (bash, name) == (["bash", "-c"], "hvkit")
    hosts, start = script.split(" > /tmp/hosts; ")
    listed = subprocess.run(["bash", "-c", hosts], capture_output=True, text=True, timeout=60)
    assert listed.stdout == "algo-1 slots=4\nalgo-2 slots=4\n"
    assert start == 'hvkit-sshd & exec hvkit "$@"'
    assert request["ResourceConfig"]["InstanceCount"] == 2
    limits = {"MaxRuntimeInSeconds": 26 * 3600, "MaxWaitTimeInSeconds": 48 * 3600}
    assert request["StoppingCondition"] == limits
    assert request["EnableManagedSpotTraining"] is True
    assert request["Environment"] == {"RATE": "1e-3"}


def test_azure_starts_one_command_on_each_rank(capsys):
    words = [
        *("train.py", "${{inputs.data}}/a b", "--out=${{outputs.model}}", "two words", ""),
        "${{outputs.model}} $(rm) ${{inputs.data}}",
    ]
    assert cli.main([*shlex.split(AZUREML), *words]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    assert job["command"] == (
        "python train.py ${{inputs.data}}'/a b' --out=${{outputs.model}} 'two words' '' "
        "${{outputs.model}}' $(rm) '${{inputs.data}}"
    )
    assert job["resources"] == {"instance_count": 2, "shm_size": "4g"}
    assert job["distribution"] == {"type": "mpi", "process_count_per_instance": 4}
    assert job["limits"] == {"timeout": 7200}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (f"{TRAINJOB} --name {'x' * 50}", "is too long: the hostname"),
        (f"{TRAINJOB} --secret-env RATE=a:b", "--secret-env: RATE is set 2 times: set it once"),
        (f"{TRAINJOB} --secret-env TOKEN=value", "must be NAME=SECRET:KEY, such as TOKEN=tracker"),
        (f"{TRAINJOB} --secret-env OMPI_MCA_plm_rsh_args=a:b", "sets this variable"),
        (f"{TRAINJOB} --node-label gpu", "must be KEY=VALUE, such as topology.kubernetes.io/zone"),
        (f"{TRAINJOB} --tolerate gpu:Never", "with one of the effects NoSchedule"),
        (f"{TRAINJOB} --queue 'a b'", "argument --queue: must be at most 253 lower-case"),
        (f"{TRAINJOB} --env OMPI_MCA_plm_rsh_args=1", "the Kubeflow Trainer sets this variable"),
        (f"{SAGEMAKER} --role me", "must be a role such as arn:aws:iam::123456789012:role/"),
        (f"{SAGEMAKER} --input data=/mnist", "must be an S3 URI such as s3://bucket/folder"),
        (f"{SAGEMAKER} --input data=s3://b", "argument --input: a name is used twice"),
        (f"{SAGEMAKER} --env A={'x' * 513}", "the value has 513 characters, SageMaker takes 512"),
        (f"{SAGEMAKER} {'x' * 257}", "has 257 characters, SageMaker takes 256 of one word"),
        (f"{SAGEMAKER} 'a\nb'", "has several lines, SageMaker takes one line in a word"),
        (f"{SAGEMAKER} --time 30", "must be HH:MM:SS"),
        (f"{SAGEMAKER} --spot 26:00:00 --time 27:00:00", "raise --spot or lower --time"),
        (SAGEMAKER.replace("--security-group sg-1", ""), "belong together: give both or neither"),
        (f"{AZUREML} --slots 3", "must be a multiple of --slots, such as 9"),
        (f"{AZUREML} a.py '${{{{inputs.mnist}}}}'", "names no folder of this job (${{"),
        (f"{AZUREML} --output model=x", "argument --output: a name is used twice"),
        (f"{AZUREML} --identity me", "argument --identity: must be user (whoever submits"),
        (f"{AZUREML} --prefix", "unrecognized arguments: --prefix"),
        (f"{AZUREML} --shm-size 1.5Gi", "must be a whole number and Mi or Gi, such as 2Gi"),
        (f"{AZUREML} --compute 'a b'", "argument --compute: must be 1 to 255 letters"),
    ],
)
def test_what_a_system_would_refuse_is_refused_here(capsys, line, complaint):
    with pytest.raises(SystemExit) as caught:
        cli.main(shlex.split(f"{line} {COMMAND}"))
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
