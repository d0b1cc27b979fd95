"""A script decides how much hvkit logs, and where; numbers, times and long texts in messages."""

import pytest
from scripts import run_script

from hvkit.launching.supervision.failures import Failure, in_one_line
from hvkit.log import in_short, shortened

IN_SCRIPT = "from hvkit.log import logger; logger.info('a note'); logger.warning('a warning')"


def printed(code):
    ended = run_script(code)
    assert (ended.returncode, ended.stdout) == (0, "")
    return ended.stderr


def test_notes_and_warnings_go_to_stderr():
    assert printed(IN_SCRIPT) == "hvkit: a note\nhvkit: a warning\n"


def test_notes_go_to_what_replaces_stderr():
    code = """
import contextlib, io
import hvkit
with contextlib.redirect_stderr(io.StringIO()) as text:
"""
    shown = (
        "\nassert text.getvalue() == 'hvkit: a note\\nhvkit: a warning\\n'\nlogger.info('after')"
    )
    assert printed(f"{code}    {IN_SCRIPT}{shown}") == "hvkit: after\n"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_level_that_the_script_sets_counts_before_and_after_the_import(when):
    level = "import logging; logging.getLogger('hvkit').setLevel(logging.WARNING)"
    lines = [level, "import hvkit"] if when == "before" else ["import hvkit", level]
    assert printed("\n".join([*lines, IN_SCRIPT])) == "hvkit: a warning\n"


def test_handlers_of_the_script_replace_hvkits():
    code = """
import logging
logging.getLogger("hvkit").addHandler(logging.StreamHandler())
import hvkit
"""
    assert printed(code + IN_SCRIPT) == "a note\na warning\n"


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("", ""),
        ("ten chars.", "ten chars."),
        ("eleven char", "eleven..."),
        ("elevenchars", "elevenc..."),
        ("a longlonglong", "a longl..."),
        ("seven c hars", "seven c..."),
    ],
)
def test_a_long_text_ends_after_a_word_and_says_so(text, short):
    assert shortened(text, 10) == short


def test_errors_in_messages_are_marked_where_they_are_cut():
    assert in_short(ValueError("word " * 100)).endswith("word word...")
    line = "ValueError: " + "word " * 100
    failed = Failure(rank=1, host="a", status=1, at=0.0, last_lines=(line,))
    assert in_one_line([failed]).endswith("word word...")
