"""YAML that means the same to every reader."""

import re
from typing import Any

import yaml

# Plain, PyYAML reads these as text, and readers of other versions of YAML, such as kubectl, as
# numbers (1e-3, 0o17, 1:30) or truth (y).
_AMBIGUOUS = re.compile(r"[-+.0-9].*|[yYnN]", re.DOTALL)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Puts what looks like a number in quotes, whatever the version of YAML."""


def _string(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


def dumped(document: dict[str, Any]) -> str:
    """The document as YAML, in the order of its keys, with a line for each value."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=float("inf"))
    return text
