"""A script decides how much hvkit logs, and where."""

import pytest
from scripts import run_script

IN_SCRIPT = "from hvkit.log import logger; logger.info('a note'); logger.warning('a warning')"


def printed(code):
    ended = run_script(code)
    assert (ended.returncode, ended.stdout) == (0, "")
    return ended.stderr


def test_notes_and_warnings_go_to_stderr():
    assert printed(IN_SCRIPT) == "hvkit: a note\nhvkit: a warning\n"


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
