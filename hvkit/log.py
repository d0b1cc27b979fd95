"""The ``hvkit`` logger: everything that hvkit says while a script runs.

Messages go to stderr as ``hvkit: ...``, from level INFO on. To see less:

    logging.getLogger("hvkit").setLevel(logging.WARNING)

To have them elsewhere as well, add a handler to that logger: they do not reach the root logger's
handlers, where each would appear twice.
"""

import logging
import sys


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what ``sys.stderr`` is at that moment: notebooks and tests replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("hvkit: %(message)s"))

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stderr


logger = logging.getLogger("hvkit")
logger.propagate = False
logger.setLevel(logging.INFO)
logger.addHandler(_Stderr())
