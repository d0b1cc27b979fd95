"""The process between ``hvkit.launch`` and its ranks: ``python -m hvkit.functions.starter``.

It starts and supervises the ranks as ``hvkit run`` does, and leaves how that has ended in the
folder of the call. It ends its ranks, and removes the folder, when its parent ends before.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

from hvkit.cli import set_home
from hvkit.errors import HvkitError
from hvkit.functions.outcomes import picklable
from hvkit.host.call_folder import written
from hvkit.launching.start import start
from hvkit.launching.supervision.processes import ends_with_parent


def request_in(folder: Path) -> Path:
    """The file with the ``Request``."""
    return folder / "request"


def ended_in(folder: Path) -> Path:
    """The file with how the run has ended: an ``Outcome`` or a ``HvkitError``."""
    return folder / "ended"


def main(folder: Path, parent: int) -> None:
    """Start the ranks, and wait for their end."""
    try:
        if os.getppid() != parent:
            return
        ends_with_parent(signal.SIGTERM, parent)()
        set_home()
        request = pickle.loads(request_in(folder).read_bytes())
        try:
            ended = pickle.dumps(start(replace(request, call=folder)))
        except HvkitError as error:
            ended = picklable(error)
        with written(ended_in(folder)) as file:
            file.write(ended)
    finally:
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
