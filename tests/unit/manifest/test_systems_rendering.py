"""Templates: a value stays one value, and a mistake is named with its line."""

import json
import re
import shlex
import sys
from importlib.resources import files

import pytest
import yaml
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from manifest_lines import AZUREML, COMMAND, MPIJOB, SAGEMAKER, TRAINJOB

from hvkit import cli
from hvkit.manifest.systems import literal, rendered


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
    assert yaml.safe_load("1e-3") == "1e-3"
    assert loaded("1e-3") == 0.001


NUMBERS = "1e-3 1e3 -1e5 .5 0o17 0x1f 1_000 12:30 2024-01-01 8 -np inf"
WORDS = "y N no on null ~ true = << - {} [1] *a &a !a %a @a `a ? | > {{x}} {%if%} {# ]} '' ${A}"
LINES = (
    "",
    " ",
    "# no",
    "a: b",
    "- x",
    "a\nb",
    "a\n",
    "\tb",
    "\n---\n",
    "', b: '",
    '", "b": "',
    "\\",
)
LETTERS = ("ü", "\x07", "\x7f", "\x85", "\u2028", "\ufeff", "\uffff", "😀")
NASTY = (*NUMBERS.split(" "), *WORDS.split(" "), *LINES, *LETTERS)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """The text of a cluster's own template, in place of hvkit's with this name."""
    file = tmp_path_factory.mktemp("templates") / "own"

    def fill(template, in_place_of="mpijob.yaml.j2", **values):
        file.write_text(template, encoding="utf-8")
        return rendered(in_place_of, values, file)

    return fill


@pytest.mark.parametrize("text", NASTY)
def test_no_text_gets_out_of_its_quotes(filled, text):
    document = "args: {{ [text] }}\n{{ text }}: {{ text }}\nlast: {{ text | tojson }}\n"
    found = filled(document, text=text)
    assert loaded(found) == yaml.safe_load(found) == {"args": [text], text: text, "last": text}
    in_json = filled('{"args": {{ [text] }}, {{ text }}: 1}', "sagemaker.json.j2", text=text)
    assert json.loads(in_json) == {"args": [text], text: 1}
    words = filled("{{ text }} {{ [text, 1] }}", "slurm.sh.j2", text=text)
    assert shlex.split(words) == [text, text, "1"]


@pytest.mark.parametrize(
    "text",
    cases(
        [
            st.text(alphabet="0123456789.eE+-_xob:yn ", max_size=6),
            st.text(alphabet=st.characters(codec="utf-8"), max_size=20),
        ]
    ),
)
def test_any_text_stays_text(filled, text):
    @settings(max_examples=50)
    @given(text)
    def check(text):
        assert loaded(filled("args: {{ [text] }}", text=text)) == {"args": [text]}

    check()


@pytest.mark.parametrize("line", [MPIJOB, TRAINJOB, SAGEMAKER, AZUREML], ids=lambda v: v.split()[0])
def test_nasty_words_and_variables_arrive_unchanged(documents, line):
    value = "".join(NASTY)
    word = value.replace("\n", "")[:200]
    found = list(
        texts(documents(f"{line} --env {shlex.quote(f'A={value}')} {shlex.join(['a', word])}"))
    )
    if line in (MPIJOB, TRAINJOB):
        assert {literal(value), literal(word)} <= {*found}
    else:
        assert value in found
        assert word in found or shlex.join(["a", word]) in found


def texts(document):
    """All texts in it."""
    for below in document.values() if isinstance(document, dict) else document:
        if isinstance(below, str):
            yield below
        elif isinstance(below, dict | list):
            yield from texts(below)


def test_numbers_and_booleans_keep_their_types_and_safe_leaves_text_as_it_is(filled):
    template = "{a: {{ 2 }}, b: {{ false }}, c: {{ '1' }}, d: {{ '1' | safe }}}"
    assert loaded(filled(template)) == {"a": 2, "b": False, "c": "1", "d": 1}


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("a: {{ name }}\n\nb: {{ nam }}\n", "line 3: 'nam' is undefined; the values of this te"),
        ("{% if gpu %}\n{% endif %}", "line 1: 'gpu' is undefined; .* are gpus, name$"),
        ("{{ [nam] }}", "line 1: 'nam' is undefined"),
        ("\n{{ name.x }}", "line 2: 'str object' has no attribute 'x'"),
        ("\n\n{% if gpus %}\na", "line 4: .*'endif'"),
        ("\n{{ name + gpus }}", "line 2: can only concatenate str"),
        ("\n{{ name.__class__.__mro__ }}", "line 2: access to attribute '__class__' .* is unsafe"),
        ("{% include '/etc/passwd' %}", "line 1: no loader"),
    ],
)
def test_a_mistake_in_a_template_is_named_with_its_line(filled, template, complaint):
    for replaced in ("mpijob.yaml.j2", "slurm.sh.j2"):
        with pytest.raises(ValueError, match=rf"own: {complaint}"):
            filled(template, replaced, name="a", gpus=2)


def test_a_cluster_fills_in_its_changed_copy_of_a_template(documents, refusal, tmp_path):
    line = f"mpijob --image a -np 8 --slots 4 {COMMAND}"
    (expected,) = documents(line)
    for replica in expected["spec"]["mpiReplicaSpecs"].values():
        replica["template"]["spec"]["priorityClassName"] = "night-hvkit"
    original = (files("hvkit.manifest") / "templates" / "mpijob.yaml.j2").read_text()
    ours = '          priorityClassName: {{ "night-" ~ name }}\n          containers:\n'
    own = tmp_path / "own.j2"
    own.write_text(original.replace("          containers:\n", ours), encoding="utf-8")
    line = line.replace("mpijob", f"mpijob --template {own}")
    assert documents(line) == [expected]
    own.write_text("kind: MPIJob\nname: {{ nmae }}", encoding="utf-8")
    assert f"hvkit manifest mpijob: error: {own}: line 2: 'nmae' is undefined" in refusal(line)
    own.write_bytes(b"\xff")
    assert f"--template {own}: must be a template in UTF-8" in refusal(line)
    own.unlink()
    assert f"--template {own}: must be a template in UTF-8: [Errno 2]" in refusal(line)


def test_without_jinja_manifests_name_the_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert cli.main(["manifest", "slurm", "-np", "2", "--slots", "2", "a.py"]) == 1
    assert "there is no Jinja, which fills in" in capsys.readouterr().err
