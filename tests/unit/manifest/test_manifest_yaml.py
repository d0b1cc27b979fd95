"""YAML is read alike by readers of all versions of YAML."""

import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hvkit.manifest.yaml_text import dumped


class LenientLoader(yaml.SafeLoader):
    """Takes as numbers and truth also what PyYAML does not, and other readers do."""


LenientLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z"),
    list("-+.0123456789"),
)
LenientLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0o[0-7_]+|0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)\Z"),
    list("-+0123456789"),
)
LenientLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"[yYnN]\Z"), list("yYnN"))


def read(text: str, loader: type[yaml.SafeLoader]) -> Any:
    return yaml.load(text, Loader=loader)


def test_other_readers_would_misread_what_pyyaml_leaves_plain() -> None:
    assert yaml.safe_dump("1e-3").startswith("1e-3")
    assert read("1e-3", LenientLoader) == 0.001


WORDS = [
    *(
        "1e-3",
        "1e3",
        "-1e5",
        ".5",
        "0o17",
        "0x1f",
        "1_000",
        "12:30",
        "2024-01-01",
        "8",
        "-np",
        "inf",
    ),
    *("y", "N", "no", "on", "null", "~", "true", "", " ", "=", "<<", "# no", "a: b", "a\nb", "a\n"),
    *(
        "\tb",
        "ü",
        "\x07",
        "\u2028",
        "- x",
        "{}",
        "[1]",
        "*a",
        "&a",
        "!a",
        "%a",
        "@a",
        "`a",
        "?",
        "|",
    ),
]


@pytest.mark.parametrize("loader", [yaml.SafeLoader, LenientLoader])
@pytest.mark.parametrize("word", WORDS)
def test_words_stay_words(word: str, loader: type[yaml.SafeLoader]) -> None:
    assert read(dumped({"args": [word], "key": word}), loader) == {"args": [word], "key": word}


@settings(deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_stays_that_text(text: str) -> None:
    assert read(dumped({"args": [text]}), LenientLoader) == {"args": [text]}


@settings(deadline=None)
@given(st.text(alphabet="0123456789.eE+-_xob:yn ", max_size=6))
def test_what_resembles_a_number_stays_text(text: str) -> None:
    assert read(dumped({"args": [text]}), LenientLoader) == {"args": [text]}


def test_numbers_and_truth_stay_what_they_are() -> None:
    document = {"replicas": 2, "suspend": False, "list": [1, "1"]}
    assert read(dumped(document), LenientLoader) == document


def test_fields_keep_their_order_and_lines_are_not_folded() -> None:
    assert dumped({"b": "word " * 40, "a": 1}) == f"b: '{'word ' * 40}'\na: 1\n"
