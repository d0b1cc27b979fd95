"""Tables, on a terminal and elsewhere."""

import io

from rich.console import Console

from hvkit.cli.table import show

_COLUMNS = ("host", "slots")
_ROWS = (("node1", "2"), ("[::1]", "16"))


def _printed(terminal: bool) -> str:
    file = io.StringIO()
    show(Console(file=file, force_terminal=terminal, width=60), _COLUMNS, _ROWS)
    return file.getvalue()


def test_elsewhere_columns_are_aligned_and_lines_have_no_blank_ends():
    assert _printed(terminal=False) == "host   slots\nnode1      2\n[::1]     16\n"


def test_lines_longer_than_the_width_stay_whole_elsewhere():
    file = io.StringIO()
    show(Console(file=file, width=10), _COLUMNS, [("n" * 50, "2")])
    assert len(file.getvalue().splitlines()) == 2


def test_on_a_terminal_a_table_is_drawn_and_brackets_are_no_markup():
    drawn = _printed(terminal=True)
    assert "━" in drawn
    for word in ("host", "slots", "node1", "[::1]", "16"):
        assert word in drawn
