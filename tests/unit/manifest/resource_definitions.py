"""Definitions of Kubernetes' resources as schemas that are stricter than a cluster is.

A cluster silently drops unknown fields. Here they are errors.
"""

import gzip
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {
            "properties": {"kueue.x-k8s.io/queue-name": {"type": "string"}},
            "additionalProperties": False,
        },
    },
    "required": ["name"],
    "additionalProperties": False,
}
"""What our manifests have of a resource's metadata, which no definition describes."""

_DATA = Path(__file__).parent / "data"


def read_definition(name, version):
    """The schema of a resource, from the file of its definition."""
    with gzip.open(_DATA / f"{name}.yaml.gz") as file:
        definition = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (found,) = (v for v in definition["spec"]["versions"] if v["name"] == version)
    schema = found["schema"]["openAPIV3Schema"]
    return schema


def strict(schema):
    """A validator that refuses unknown fields and repeated entries as well."""
    _close(schema)
    validator = extend(Draft202012Validator, {"x-kubernetes-list-map-keys": _refuse_repeated})
    return validator(schema)


def problems_of(validator, document):
    """The problems of a document; empty if it is valid."""
    errors = sorted(validator.iter_errors(document), key=lambda error: error.json_path)
    return [f"{error.json_path}: {error.message}" for error in errors]


def _close(schema):
    """Forbid unknown fields at any depth."""
    free = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and not free:
        schema["additionalProperties"] = False
    for field in schema.get("properties", {}).values():
        _close(field)
    for below in ("items", "additionalProperties"):
        if isinstance(schema.get(below), dict):
            _close(schema[below])


def _refuse_repeated(validator, keys, items, schema):
    """Require list entries to differ in the keys by which the cluster merges them."""
    defaults = {
        key: schema["items"]["properties"][key].get("default")
        for key in keys
        if key in schema["items"]["properties"]
    }
    found = [tuple(item.get(key, defaults.get(key)) for key in keys) for item in items]
    for values in {values for values in found if found.count(values) > 1}:
        yield ValidationError(f"{values} is there more than once")
