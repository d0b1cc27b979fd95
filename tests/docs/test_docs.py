"""The code in README and docs runs, its commands parse, and its links lead somewhere."""

import functools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from cases import MORE
from preludes import PRELUDES

from hvkit.cli import parser

ROOT = Path(__file__).parents[2]
DOCS = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *DOCS]
BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Programs of others, whose arguments are not checked.
FOREIGN = {
    *("/usr/sbin/sshd", "eval", "docker", "kubectl", "sbatch", "aws", "az", "."),
    "docker/old_c_library.sh",
}


@dataclass(frozen=True)
class Block:
    language: str
    options: str
    text: str


def blocks(page):
    return [Block(*found) for found in BLOCK.findall((ROOT / page).read_text())]


def after(diff):
    """The new side of a diff."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[:1] in " +")


def scripts(page):
    """The page's Python: fragments after its prelude; a block with a title starts a script."""
    prelude = PRELUDES.get(page, "")
    found = [""]
    for block in blocks(page):
        if block.language not in ("python", "diff"):
            continue
        if "title=" in block.options and "continued" not in block.options:
            found.append("")
        found[-1] += prelude + (after(block.text) if block.language == "diff" else block.text)
    return [text for text in found if text]


# `make test-all` alone runs the code of these.
LATER = (
    *("docs/from-ddp.md", "docs/from-horovod.md", "docs/script.md"),
    *("docs/unusual-scripts.md", "docs/mixed-precision.md"),
    *("docs/strategies.md", "docs/compression.md"),
    *(page for page in DOCS if page.startswith("docs/strategies/")),
)

WITH_CODE = [page for page in PAGES if scripts(page)]

# Their code runs in tests/spark and tests/trainers, which install packages that others lack.
ELSEWHERE = ("docs/from-spark.md", "docs/transformers.md")
STARTS_RANKS = ("docs/notebooks.md", *ELSEWHERE)

# Runs scripts one after another, each in a folder, with names and Keras's settings of its own:
# importing the frameworks takes longer than all of them.
IN_ONE_PROCESS = """
import os, runpy, sys
for script in sys.argv[1:]:
    os.chdir(os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")
    if "keras" in sys.modules:
        sys.modules["keras"].config.set_dtype_policy("float32")
"""


def test_pages_with_code_are_found():
    assert set(WITH_CODE) == {page for page in PRELUDES if scripts(page)}
    assert all(page in PAGES for page in PRELUDES)


@pytest.mark.parametrize(
    ("pages", "ranks"),
    [
        pytest.param([p for p in WITH_CODE if p not in (*LATER, *ELSEWHERE)], 1, id="one process"),
        pytest.param([p for p in WITH_CODE if p in LATER], 1, id="one process, later", marks=MORE),
        pytest.param(
            [p for p in WITH_CODE if p not in STARTS_RANKS], 2, id="two ranks", marks=MORE
        ),
    ],
)
def test_code_runs(pages, ranks, tmp_path):
    written = []
    for page in pages:
        for number, text in enumerate(scripts(page)):
            if ranks == 1 or "hvkit" in text:  # the tutorial begins with a plain script
                folder = tmp_path / f"{page.replace('/', '-')}-{number}"
                folder.mkdir()
                written.append(folder / "train.py")
                written[-1].write_text(text)
    start = [] if ranks == 1 else ["mpirun", "-np", str(ranks), "--oversubscribe"]
    ended = subprocess.run(
        [*start, sys.executable, "-c", IN_ONE_PROCESS, *map(str, written)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error:::__main__"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    printed = ended.stdout + ended.stderr
    assert ended.returncode == 0, printed
    if ranks == 2:
        said = [line for page in pages for line in outputs(page)]
        assert said
        assert not [line for line in said if not re.search(line, printed)]
    if ranks == 1 and "docs/tutorial.md" in pages:
        plain, ours = (tmp_path / f"docs-tutorial.md-{number}" / "model.pt" for number in (0, 1))
        assert plain.read_bytes() == ours.read_bytes()  # with one process the calls change nothing


def outputs(page):
    """Patterns for the page's lines of output; indented lines continue, and digits may differ."""
    for block in blocks(page):
        if 'title="output"' in block.options:
            for line in re.sub(r"\n +", " ", block.text).splitlines():
                yield re.sub(r"\d", r"\\d", re.escape(line))


def test_the_page_about_the_command_line_is_current():
    written = runpy.run_path(str(ROOT / "docs" / "command_line.py"))["page"]()
    assert written == (ROOT / "docs" / "cli.md").read_text(), "run python docs/command_line.py"


@pytest.mark.xdist_group("flags")
def test_make_run_uses_hvkit_run_and_ends_with_what_to_type_next():
    recipe = re.search(r"(?m)^run: setup\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text()).group(1)
    started, following = recipe.split("\n", 1)
    check_command(shlex.split(started))
    lines = re.findall(r"'  (.+?)'", following.replace("$(VENV)", ".venv"))
    assert [line.split()[0] for line in lines] == [".", "hvkit", "hvkit"]
    for line in lines:
        check_command(shlex.split(line))


def commands(page):
    """The command lines of a page's shell blocks, as lists of words."""
    for block in blocks(page):
        if block.language != "sh":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            for command in re.split(r"&&|;", line):
                words = shlex.split(command, comments=True)
                if words:
                    ends = [words.index(sign) for sign in "<>" if sign in words]
                    yield words[: min(ends, default=len(words))]


# One worker runs scripts for their flags.
FOR_FLAGS = pytest.mark.xdist_group("flags")
WITH_COMMANDS = [
    pytest.param(page, words, id=f"{page}: {shlex.join(words)[:60]}", marks=FOR_FLAGS)
    for page in PAGES
    for words in commands(page)
]


@pytest.mark.parametrize(("page", "words"), WITH_COMMANDS)
def test_commands_exist_with_these_arguments(page, words):
    check_command(words)


def check_command(words):
    program, *arguments = words
    if program in ("horovodrun", "mpirun"):
        assert arguments[:1] == ["-np"]
        check_command(arguments[2:])
    elif program == "-":
        assert not arguments
    elif program.endswith(".py"):
        check_python(words)
    elif program == "exec":
        check_command(arguments)
    elif program == "hvkit":
        parsed = parser().parse_args(arguments)
        if command := getattr(parsed, "command", None):
            check_command(command)
    elif program == "make":
        targets = [word for word in arguments if "=" not in word]
        variables = [word.partition("=")[0] for word in arguments if "=" in word]
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
        assert all(re.search(rf"^{name} \?=", makefile, re.MULTILINE) for name in variables)
    elif program == "pip":
        assert arguments[0] == "install"
        extras = re.fullmatch(r"\.\[(.*)\]", arguments[1]).group(1).split(",")
        assert all(f'"{extra}":' in (ROOT / "setup.py").read_text() for extra in extras)
    elif program == "python":
        check_python(arguments)
    else:
        assert program in FOREIGN, f"{program}: neither hvkit's nor a known program"


def check_python(arguments):
    if arguments[:2] == ["-m", "pytest"]:
        assert all((ROOT / path).exists() for path in arguments[2:])
        return
    script, *options = arguments
    if script == "train.py":  # the tutorial's
        return
    assert (ROOT / script).is_file()
    assert {word for word in options if word.startswith("--")} <= flags()[str(ROOT / script)]


# The help of scripts, which import the same frameworks for seconds.
HELP = """
import contextlib, io, json, os, runpy, sys

texts = {}
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    sys.path.insert(0, os.path.dirname(script))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (script, end.code)
    texts[script] = printed.getvalue()
print(json.dumps(texts))
"""


@functools.cache
def flags():
    """The flags that the help of each script in the pages' commands lists."""
    words = {word for page in PAGES for words in commands(page) for word in words}
    scripts = [
        str(ROOT / word) for word in words if word.endswith(".py") and (ROOT / word).is_file()
    ]
    printed = subprocess.run(
        [sys.executable, "-c", HELP, *scripts],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
    ).stdout
    helps = json.loads(printed.splitlines()[-1])
    return {script: set(re.findall(r"--[\w-]+", text)) for script, text in helps.items()}


# What docs/site.css makes room for, in a window 1280 pixels wide; Python is formatted to it.
COLUMNS = 88


@pytest.mark.parametrize("page", DOCS)
def test_code_fits_beside_the_side_bars(page):
    lines = [line for block in blocks(page) for line in block.text.splitlines()]
    assert not [line for line in lines if len(line) > COLUMNS]


LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_to_files(page):
    folder = (ROOT / page).parent
    text = BLOCK.sub("", (ROOT / page).read_text())
    for link in LINK.findall(text):
        if not link.startswith(("http://", "https://", "#")):
            file = folder / link.partition("#")[0]
            assert file.is_dir() or file.stat().st_size > 0, f"{page}: {link}"


def test_hvkit_is_installed_from_a_checkout_since_no_index_has_it():
    named = re.compile(r"pip install [^\n`&;]*(?<![./\w-])hvkit\b(?! @)")
    assert not [page for page in PAGES if named.search((ROOT / page).read_text())]


def test_readme_has_500_to_800_words():
    assert 500 <= len((ROOT / "README.md").read_text().split()) <= 800
