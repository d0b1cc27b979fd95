"""The schema of an MPIJob, stricter than a cluster is.

A cluster silently drops unknown fields, and checks some words and names only when it uses them.
Here all of these are errors.
"""

import gzip
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

_DEFINITION = Path(__file__).parent / "data" / "kubeflow.org_mpijobs.yaml.gz"

# Kubernetes and the operator check these in code; the resource definition only describes them.
_METADATA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "namespace": {"type": "string"}},
    "required": ["name"],
}
_AMOUNTS = {"propertyNames": {"enum": ["cpu", "memory", "nvidia.com/gpu"]}}


def problems(document: Any) -> list[str]:
    """The problems of an MPIJob; empty if it is valid."""
    errors = sorted(_validator().iter_errors(document), key=lambda error: error.json_path)
    return [f"{error.json_path}: {error.message}" for error in errors]


@cache
def _validator() -> Draft202012Validator:
    with gzip.open(_DEFINITION) as file:
        definition = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (v for v in definition["spec"]["versions"] if v["name"] == "v2beta1")
    schema = version["schema"]["openAPIV3Schema"]
    _complete(schema)
    _close(schema)
    strict = extend(Draft202012Validator, {"x-kubernetes-list-map-keys": _refuse_repeated})
    return strict(schema)


def _complete(schema: dict[str, Any]) -> None:
    """Add to the schema the rules that it only describes in words."""
    top = schema["properties"]
    top["apiVersion"]["const"] = "kubeflow.org/v2beta1"
    top["kind"]["const"] = "MPIJob"
    top["metadata"] = _METADATA
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
    container["resources"]["properties"]["limits"].update(_AMOUNTS)


def _close(schema: dict[str, Any]) -> None:
    """Forbid unknown fields at any depth."""
    free = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and not free:
        schema["additionalProperties"] = False
    for field in schema.get("properties", {}).values():
        _close(field)
    for below in ("items", "additionalProperties"):
        if isinstance(schema.get(below), dict):
            _close(schema[below])


def _refuse_repeated(
    validator: Any, keys: list[str], items: Any, schema: dict[str, Any]
) -> Iterator[ValidationError]:
    """Require list entries to differ in the keys by which the cluster merges them."""
    defaults = {
        key: schema["items"]["properties"][key].get("default")
        for key in keys
        if key in schema["items"]["properties"]
    }
    found = [tuple(item.get(key, defaults.get(key)) for key in keys) for item in items]
    for values in {values for values in found if found.count(values) > 1}:
        yield ValidationError(f"{values} is there more than once")
