"""What a TrainJob, a job of SageMaker and one of Azure ML run, and what they cannot."""

import json
import shlex
import subprocess

import pytest
from manifest_lines import AZUREML, COMMAND, SAGEMAKER, TRAINJOB


def test_a_trainjob_starts_hvkit_run_in_the_launcher_alone(documents):
    runtime, job = documents(f"{TRAINJOB} {COMMAND}")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "digits"
    assert runtime["metadata"]["namespace"] == job["metadata"]["namespace"] == "ml"
    trainer = job["spec"]["trainer"]
    assert [*trainer["command"], *trainer["args"]] == shlex.split(
        "hvkit run -np 8 -x RATE -x TOKEN --lost-after 7.5 --grace 60 --prefix --timestamps "
        f"--log-dir=/out/logs --show 0,4-7 {COMMAND}"
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
    assert of_node["resources"]["limits"] == {"cpu": "2000m", "memory": "6Gi", "nvidia.com/gpu": 4}


def test_sagemaker_starts_the_same_on_every_host_and_ranks_by_slots(written):
    request = json.loads(written(f"{SAGEMAKER.replace('-np 8', '-np 7')} {COMMAND}"))
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


def test_azure_starts_one_command_on_each_rank(documents):
    words = [
        *("train.py", "${{inputs.data}}/a b", "--out=${{outputs.model}}", "two words", ""),
        "${{outputs.model}} $(rm) ${{inputs.data}}",
    ]
    (job,) = documents(f"{AZUREML} {shlex.join(words)}")
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
        (f"{TRAINJOB} --secret-env RATE=a:b", "--secret-env: --env sets RATE, too: set it once"),
        (f"{TRAINJOB} --secret-env TOKEN=value", "must be NAME=SECRET:KEY, such as TOKEN=tracker"),
        (f"{TRAINJOB} --secret-env OMPI_MCA_plm_rsh_args=a:b", "sets this variable"),
        (f"{TRAINJOB} --node-label gpu", "must be KEY=VALUE, such as topology.kubernetes.io/zone"),
        (f"{TRAINJOB} --tolerate gpu:Never", "with one of the effects NoSchedule"),
        (f"{TRAINJOB} --queue 'a b'", "argument --queue: must be at most 63 lower-case"),
        (f"{TRAINJOB} --env OMPI_MCA_plm_rsh_args=1", "the Kubeflow Trainer sets this variable"),
        (f"{SAGEMAKER} --input data=/mnist", "an S3 URI such as s3://bucket/folder"),
        (f"{SAGEMAKER} --input data=s3://b", "argument --input: data is set 2 times"),
        (f"{SAGEMAKER} --time 30", "must be HH:MM:SS"),
        (f"{AZUREML} --slots 3", "must be a multiple of --slots, such as 9"),
        (f"{AZUREML} a.py '${{{{inputs.mnist}}}}'", "names no folder of this job (${{"),
        (f"{AZUREML} --output model=x", "argument --output: model is set 2 times"),
        (f"{AZUREML} --identity me", "argument --identity: must be user (whoever submits"),
        (f"{AZUREML} --prefix", "unrecognized arguments: --prefix"),
        (f"{AZUREML} --shm-size 1.5Gi", "must be a whole number and Mi or Gi, such as 2Gi"),
        (f"{AZUREML} --compute 'a b'", "argument --compute: must be 1 to 255 letters"),
    ],
)
def test_values_that_a_system_would_refuse_are_refused(refusal, line, complaint):
    assert complaint in refusal(f"{line} {COMMAND}")
