"""Tables: drawn on a terminal, plain and aligned elsewhere."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is to the left, the others to the right."""
    if not console.is_terminal:
        for line in plain(columns, rows):
            console.print(Text(line), soft_wrap=True)
        return
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table's lines, columns two blanks apart."""
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
