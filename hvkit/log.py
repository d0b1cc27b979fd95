"""The ``hvkit`` logger: notes and warnings while a script runs.

They go to stderr as ``hvkit: ...``, from level INFO on. To see less:

    logging.getLogger("hvkit").setLevel(logging.WARNING)

To have them elsewhere as well, add a handler to that logger: they do not reach the root logger's
handlers, where each would appear twice. The reason why a run ends always goes to stderr.
"""

import logging

logger = logging.getLogger("hvkit")
# A script may have configured the logger before it imported hvkit.
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
if not logger.handlers:
    logger.propagate = False
    # Writes to what sys.stderr is at that moment: notebooks and tests replace it.
    _stderr = logging._StderrHandler()  # type: ignore[attr-defined]
    _stderr.setFormatter(logging.Formatter("hvkit: %(message)s"))
    logger.addHandler(_stderr)


def printable(text: str) -> str:
    """The text without characters that command a terminal, for text that ranks or files supply."""
    return "".join(c if c.isprintable() else "?" for c in text)
