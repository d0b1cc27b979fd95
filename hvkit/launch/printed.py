"""What a program of hvkit prints on another host, found again among what logins print.

A line of JSON. Greetings may stand before it, with or without an end of line.
"""

import json
from collections.abc import Mapping
from typing import Any

_START = '{"hvkit": '


def line_of(values: Mapping[str, Any]) -> str:
    """The line that tells ``values``."""
    return json.dumps({"hvkit": values})


def values_in(line: str) -> dict[str, Any] | None:
    """What a line tells; ``None`` if it is no line of hvkit's.

    Raises:
        ValueError: it is, but not all of it.
    """
    _, found, rest = line.partition(_START)
    if not found:
        return None
    values: dict[str, Any] = json.JSONDecoder().raw_decode(found + rest)[0]["hvkit"]
    return values
