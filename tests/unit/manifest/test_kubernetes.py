"""The text of Kubernetes' resources means the same to every reader."""

import re

import pytest
import yaml
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from hvkit.manifest.kubernetes import literal, yaml_text


def expanded(text, variables):
    """Arguments and values after Kubernetes has expanded variables."""
    escape_or_reference = re.compile(r"\$\$|\$\(([^)]*)\)")
    return escape_or_reference.sub(
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), text
    )


@settings(max_examples=50)
@given(st.text(alphabet="$()A {}"))
def test_kubernetes_expands_nothing_in_escaped_text(text):
    assert expanded(literal(text), {"A": "replaced", "": "replaced"}) == text


class LenientLoader(yaml.SafeLoader):
    """Reads numbers and booleans that PyYAML takes for text and other readers do not."""


for tag, pattern, first in (
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z", "-+.0123456789"),
    ("int", r"[-+]?(0o[0-7_]+|0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)\Z", "-+0123456789"),
    ("bool", r"[yYnN]\Z", "yYnN"),
):
    resolved = f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first)
    LenientLoader.add_implicit_resolver(*resolved)


def loaded(text):
    return yaml.load(text, Loader=LenientLoader)


def test_without_quotes_other_yaml_readers_would_find_a_number():
    assert yaml.safe_dump("1e-3").startswith("1e-3")
    assert loaded("1e-3") == 0.001


NUMBERS = "1e-3 1e3 -1e5 .5 0o17 0x1f 1_000 12:30 2024-01-01 8 -np inf"
AMBIGUOUS = (
    *NUMBERS.split(" "),
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
)


def test_ambiguous_text_stays_text():
    document = {"args": [*AMBIGUOUS], **{word: word for word in AMBIGUOUS}}
    text = yaml_text(document)
    assert loaded(text) == yaml.safe_load(text) == document


@pytest.mark.parametrize(
    "text",
    cases(
        [
            st.text(alphabet="0123456789.eE+-_xob:yn ", max_size=6),
            st.text(alphabet=st.characters(codec="utf-8"), max_size=20),
        ]
    ),
)
def test_any_text_stays_text(text):
    @settings(max_examples=50)
    @given(text)
    def check(text):
        assert loaded(yaml_text({"args": [text]})) == {"args": [text]}

    check()


def test_numbers_and_booleans_keep_their_types():
    document = {"replicas": 2, "suspend": False, "list": [1, "1"]}
    assert loaded(yaml_text(document)) == document


def test_fields_keep_their_order_and_lines_are_not_folded():
    assert yaml_text({"b": "word " * 40, "a": 1}) == f"b: '{'word ' * 40}'\na: 1\n"
