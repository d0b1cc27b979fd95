"""The cells of a notebook: under which names tracebacks show them, and their lines.

IPython compiles each cell as a file of its own that does not exist, such as
``/tmp/ipykernel_7/123.py``, and keeps its lines in ``linecache``. Ranks get both, so that their
tracebacks say ``File "Cell In[3]", line 2`` and show the line, and ``inspect.getsource`` works.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Mapping, Sequence


def cell_names() -> dict[str, str]:
    """By the name of a file that does not exist, the name of its cell, such as ``Cell In[3]``."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_shell() if get_shell is not None else None
    if shell is None:
        return {}
    found = {file: shell.compile.format_code_name(file) for file in linecache.cache}
    return {file: " ".join(name) for file, name in found.items() if name is not None}


def lines_of_cells() -> dict[str, list[str]]:
    """The lines of all code that is in no file, by the name that ranks give to it."""
    names = cell_names()
    return {
        names.get(file, file): entry[2]
        for file, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(file)
    }


def add_lines(cells: Mapping[str, Sequence[str]]) -> None:
    """Make these lines known to tracebacks and ``inspect`` in this process."""
    for name, lines in cells.items():
        # No time of change: the lines stay although there is no file.
        linecache.cache[name] = (sum(map(len, lines)), None, [*lines], name)
