"""What is rendered is a valid MPIJob, and would not be if any field had another name or type."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from mpijob_schema import problems
from mpijobs import full_job, job, read

Path = tuple[str | int, ...]


def nodes(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything in a document below its top, and where it is."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in items:
        yield (*path, key), below
        if isinstance(below, dict | list):
            yield from nodes(below, (*path, key))


FULL = read(full_job())
NODES = list(nodes(FULL))
FIELDS = [path for path, _ in NODES if isinstance(path[-1], str)]
# These may be numbers and texts.
EITHER = {"limits", "sizeLimit", "port"}
LEAVES = [
    path for path, value in NODES if not isinstance(value, dict | list) and EITHER.isdisjoint(path)
]
AMOUNTS = [path for path, _ in NODES if "limits" in path[:-1] or path[-1] == "sizeLimit"]


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def parent(document: Any, path: Path) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


@pytest.mark.parametrize("document", [read(job()), FULL], ids=["minimal", "full"])
def test_it_is_valid(document: dict[str, Any]) -> None:
    assert problems(document) == []


def test_there_are_fields_to_rename() -> None:
    assert len(FIELDS) > 80
    assert len(LEAVES) > 50


@pytest.mark.parametrize("path", FIELDS, ids=dotted)
def test_another_name_of_a_field_is_not_valid(path: Path) -> None:
    document = copy.deepcopy(FULL)
    fields = parent(document, path)
    fields[f"{path[-1]}s"] = fields.pop(path[-1])
    assert problems(document) != []


@pytest.mark.parametrize("path", LEAVES, ids=dotted)
def test_another_type_of_a_value_is_not_valid(path: Path) -> None:
    document = copy.deepcopy(FULL)
    place = parent(document, path)
    place[path[-1]] = 7 if isinstance(place[path[-1]], str | bool) else "7"
    assert problems(document) != []


@pytest.mark.parametrize("path", AMOUNTS, ids=dotted)
def test_an_amount_that_is_none_is_not_valid(path: Path) -> None:
    document = copy.deepcopy(FULL)
    parent(document, path)[path[-1]] = "4 GB"
    assert problems(document) != []


def test_a_repeated_variable_is_not_valid() -> None:
    document = copy.deepcopy(FULL)
    replica = document["spec"]["mpiReplicaSpecs"]["Launcher"]
    variables = replica["template"]["spec"]["containers"][0]["env"]
    variables.append(dict(variables[0]))
    assert problems(document) != []
