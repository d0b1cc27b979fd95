"""Prints modules, lines and lines of code of each folder: ``python tests/weight.py``."""

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1] / "hvkit"
NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def lines_of_code(text: str) -> int:
    """Lines that hold code: no blank ones, comments or docstrings."""
    used = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                used -= set(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    return len(used)


if __name__ == "__main__":
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for file in sorted(ROOT.rglob("*.py")):
        text = file.read_text()
        folder = str(Path(*file.parent.relative_to(ROOT.parent).parts[:4]))
        for name in (folder, "all"):
            for at, count in enumerate((1, text.count("\n"), lines_of_code(text))):
                rows[name][at] += count
    for name, counts in sorted(rows.items(), key=lambda row: row[1][1]):
        print(f"| `{name}` | " + " | ".join(f"{count:,}" for count in counts) + " |")
