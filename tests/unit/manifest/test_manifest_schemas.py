"""Manifests are valid by each system's own schema; with another name of any field they are not.

A cluster silently drops unknown fields, and checks some words and names only when it uses them.
The schemas here refuse all of these.
"""

import copy
import gzip
import json
from functools import cache
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from manifest_lines import AZUREML, COMMAND, MPIJOB, SAGEMAKER, TRAINJOB

DATA = Path(__file__).parent / "data"
LABELS = {"properties": {"kueue.x-k8s.io/queue-name": {"type": "string"}}}
METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {**LABELS, "additionalProperties": False},
    },
    "required": ["name"],
    "additionalProperties": False,
}
"""What our manifests have of a resource's metadata, which no definition describes."""
# Our pods have nothing but labels.
METADATA_OF_PODS = {
    "type": "object",
    "properties": {"labels": {"additionalProperties": {"type": "string"}}},
    "additionalProperties": False,
}


def definition(name, version, kind):
    """The schema of a resource, from the file of its definition."""
    with gzip.open(DATA / f"{name}.yaml.gz") as file:
        read = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (found,) = (v for v in read["spec"]["versions"] if v["name"] == version)
    schema = found["schema"]["openAPIV3Schema"]
    schema["properties"]["kind"]["const"] = kind
    schema["properties"]["metadata"] = METADATA
    return schema


def mpijob():
    """What Kubernetes and the operator check in code, and their definition only describes."""
    schema = definition("kubeflow.org_mpijobs", "v2beta1", "MPIJob")
    top = schema["properties"]
    top["apiVersion"]["const"] = "kubeflow.org/v2beta1"
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    spec = top["spec"]["properties"]
    spec["launcherCreationPolicy"]["enum"] = ["AtStartup", "WaitForWorkersReady"]
    spec["runPolicy"]["properties"]["cleanPodPolicy"]["enum"] = ["None", "Running", "All"]
    replicas = spec["mpiReplicaSpecs"]
    replicas.update(propertyNames={"enum": ["Launcher", "Worker"]}, required=["Launcher", "Worker"])
    replica = replicas["additionalProperties"]
    replica["required"] = ["replicas", "restartPolicy", "template"]
    replica["properties"]["restartPolicy"]["enum"] = ["Never", "OnFailure"]
    pod = replica["properties"]["template"]["properties"]["spec"]["properties"]
    pod["volumes"]["items"]["properties"]["emptyDir"]["properties"]["medium"]["enum"] = ["Memory"]
    container = pod["containers"]["items"]["properties"]
    amounts = {"enum": ["cpu", "memory", "nvidia.com/gpu"]}
    container["resources"]["properties"]["limits"]["propertyNames"] = amounts
    return schema


def training_runtime():
    schema = definition("trainer.kubeflow.org_trainingruntimes", "v1alpha1", "TrainingRuntime")
    template = schema["properties"]["spec"]["properties"]["template"]["properties"]
    job = template["spec"]["properties"]["replicatedJobs"]["items"]["properties"]["template"]
    job["properties"]["metadata"] = METADATA_OF_PODS
    return schema


@cache
def validator(kind):
    if kind.islower():
        return Draft202012Validator(json.loads((DATA / f"{kind}.json").read_text()))
    schema = {
        "MPIJob": mpijob,
        "TrainingRuntime": training_runtime,
        "TrainJob": lambda: definition("trainer.kubeflow.org_trainjobs", "v1alpha1", "TrainJob"),
    }[kind]()
    forbid_unknown_fields(schema)
    keys = {"x-kubernetes-list-map-keys": refuse_repeated}
    return extend(Draft202012Validator, keys)(schema)


def forbid_unknown_fields(schema):
    free = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and not free:
        schema["additionalProperties"] = False
    below = [schema.get("items"), schema.get("additionalProperties")]
    for field in (*schema.get("properties", {}).values(), *below):
        if isinstance(field, dict):
            forbid_unknown_fields(field)


def refuse_repeated(validator, keys, items, schema):
    """Require list entries to differ in the keys by which the cluster merges them."""
    known = schema["items"]["properties"]
    defaults = {key: known[key].get("default") for key in keys if key in known}
    found = [tuple(item.get(key, defaults.get(key)) for key in keys) for item in items]
    for values in {values for values in found if found.count(values) > 1}:
        yield ValidationError(f"{values} is there more than once")


def is_valid(documents, kinds):
    return all(validator(k).is_valid(d) for d, k in zip(documents, kinds, strict=True))


CHOSEN_BY_US = ("Environment", "environment_variables", "inputs", "outputs", "nodeSelector")


def fields(value, path=()):
    """The path of every named field whose name the system chooses."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in items:
        chosen_by_us = path and path[-1] in CHOSEN_BY_US
        if isinstance(key, str) and not chosen_by_us and "labels" not in path:
            yield (*path, key)
        if isinstance(below, dict | list):
            yield from fields(below, (*path, key))


@pytest.mark.parametrize(
    ("line", "kinds", "at_least"),
    [
        (MPIJOB, ["MPIJob"], 80),
        (TRAINJOB, ["TrainingRuntime", "TrainJob"], 80),
        (SAGEMAKER, ["sagemaker_create_training_job"], 25),
        (AZUREML, ["azureml_command_job"], 15),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_the_text_is_valid_and_with_any_other_field_it_is_not(documents, line, kinds, at_least):
    found = documents(f"{line} {COMMAND}")  # JSON is YAML, too
    assert [
        str(e) for d, k in zip(found, kinds, strict=True) for e in validator(k).iter_errors(d)
    ] == []
    paths = list(fields(found))
    assert len(paths) > at_least
    accepted = []
    for path in paths:
        # Quantities of a TrainJob are by resource: any name would do.
        if "limits" in path[:-1] and line is TRAINJOB:
            continue
        changed = copy.deepcopy(found)
        parent = changed
        for key in path[:-1]:
            parent = parent[key]
        parent[f"{path[-1]}s"] = parent.pop(path[-1])
        if is_valid(changed, kinds):
            accepted.append(path)
    assert accepted == []


def test_the_shortest_mpijob_is_valid(documents):
    assert is_valid(documents("mpijob --image a -np 8 --slots 4 a.py"), ["MPIJob"])


def test_sagemaker_takes_hundreds_of_hosts(documents):
    found = documents(f"{SAGEMAKER.replace('-np 8', '-np 2048')} {COMMAND}")
    assert is_valid(found, ["sagemaker_create_training_job"])
