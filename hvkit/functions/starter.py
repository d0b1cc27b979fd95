"""The process between ``hvkit.launch`` and its ranks: ``python -m hvkit.functions.starter``.

It starts and supervises the ranks as ``hvkit run`` does.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path

from hvkit.functions.supervised import supervise_below
from hvkit.launching.prepare import Request
from hvkit.launching.start import start
from hvkit.launching.supervision.supervised_run import Outcome


def request_in(folder: Path) -> Path:
    """The file with the ``Request``."""
    return folder / "request"


def main(folder: Path, parent: int) -> None:
    """Start the ranks, and wait for their end."""

    def run() -> Outcome:
        request: Request = pickle.loads(request_in(folder).read_bytes())
        return start(replace(request, call=folder))

    supervise_below(folder, parent, run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
