"""A text that every Python installation has: the sources of some standard modules."""

import sysconfig
from pathlib import Path

import hvkit
from common.ranks import stop_if_any

MODULES = (
    *("argparse", "ast", "configparser", "dataclasses", "difflib", "doctest", "enum", "inspect"),
    *("ipaddress", "locale", "mailbox", "optparse", "pickle", "pickletools", "pydoc", "shutil"),
    *("smtplib", "socket", "statistics", "subprocess", "tarfile", "threading"),
)
"""1.7 MB together in Python 3.11."""


def load_text() -> str:
    """Rank 0's text on every rank, in ASCII; other versions of Python may have another text.

    If rank 0 lacks a module, all ranks end and rank 0 prints why. Every rank must call this.
    """
    text, problem = None, None
    if hvkit.rank() == 0:
        folder = Path(sysconfig.get_path("stdlib"))
        try:
            sources = [(folder / f"{module}.py").read_bytes() for module in MODULES]
            text = b"\n".join(sources).decode("ascii", errors="ignore")
        except OSError as error:
            problem = f"this Python has no sources of its standard library: {error}"
    stop_if_any(problem)
    return str(hvkit.broadcast(text))
