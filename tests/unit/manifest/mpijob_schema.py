"""The schema of an MPIJob, stricter than a cluster is.

A cluster silently drops unknown fields, and checks some words and names only when it uses them.
Here all of these are errors.
"""

from functools import cache

from resource_definitions import METADATA, problems_of, read_definition, strict

# Kubernetes and the operator check these in code; the resource definition only describes them.
_AMOUNTS = {"propertyNames": {"enum": ["cpu", "memory", "nvidia.com/gpu"]}}


def problems(document):
    """The problems of an MPIJob; empty if it is valid."""
    return problems_of(_validator(), document)


@cache
def _validator():
    schema = read_definition("kubeflow.org_mpijobs", "v2beta1")
    _complete(schema)
    return strict(schema)


def _complete(schema):
    """Add to the schema the rules that it only describes in words."""
    top = schema["properties"]
    top["apiVersion"]["const"] = "kubeflow.org/v2beta1"
    top["kind"]["const"] = "MPIJob"
    top["metadata"] = METADATA
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
