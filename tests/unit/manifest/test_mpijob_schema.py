"""The document is a valid MPIJob; with another name or type of any field it is not."""

import copy

import pytest
from mpijob_schema import problems
from mpijobs import full_job, job, read

Path = tuple[str | int, ...]


def nodes(value, path=()):
    """Every value in a document with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in items:
        yield (*path, key), below
        if isinstance(below, dict | list):
            yield from nodes(below, (*path, key))


FULL = read(full_job())
NODES = list(nodes(FULL))
# But for labels of nodes, whose names the user chooses.
FIELDS = [p for p, _ in NODES if isinstance(p[-1], str) and "nodeSelector" not in p[:-1]]
# Numbers and text are both valid here.
EITHER = {"limits", "sizeLimit", "port"}
LEAVES = [
    path for path, value in NODES if not isinstance(value, dict | list) and EITHER.isdisjoint(path)
]
AMOUNTS = [path for path, _ in NODES if "limits" in path[:-1] or path[-1] == "sizeLimit"]


def dotted(path):
    return ".".join(map(str, path))


def parent(document, path):
    for key in path[:-1]:
        document = document[key]
    return document


@pytest.mark.parametrize("document", [read(job()), FULL], ids=["minimal", "full"])
def test_the_document_is_valid(document):
    assert problems(document) == []


def test_there_are_fields_to_rename():
    assert len(FIELDS) > 80
    assert len(LEAVES) > 50


@pytest.mark.parametrize("path", FIELDS, ids=dotted)
def test_a_misspelt_field_is_invalid(path):
    document = copy.deepcopy(FULL)
    fields = parent(document, path)
    fields[f"{path[-1]}s"] = fields.pop(path[-1])
    assert problems(document) != []


@pytest.mark.parametrize("path", LEAVES, ids=dotted)
def test_a_value_of_another_type_is_invalid(path):
    document = copy.deepcopy(FULL)
    place = parent(document, path)
    place[path[-1]] = 7 if isinstance(place[path[-1]], str | bool) else "7"
    assert problems(document) != []


@pytest.mark.parametrize("path", AMOUNTS, ids=dotted)
def test_a_malformed_amount_is_invalid(path):
    document = copy.deepcopy(FULL)
    parent(document, path)[path[-1]] = "4 GB"
    assert problems(document) != []


def test_a_repeated_variable_is_invalid():
    document = copy.deepcopy(FULL)
    replica = document["spec"]["mpiReplicaSpecs"]["Launcher"]
    variables = replica["template"]["spec"]["containers"][0]["env"]
    variables.append(dict(variables[0]))
    assert problems(document) != []
