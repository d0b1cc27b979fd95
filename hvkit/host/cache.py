"""The folder in which hvkit keeps its builds and downloads."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder of hvkit's per-user cache; it need not exist yet.

    ``$HVKIT_CACHE_DIR`` if set, else ``$XDG_CACHE_HOME/hvkit``, else ``~/.cache/hvkit``.
    """
    if explicit := os.environ.get("HVKIT_CACHE_DIR"):
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hvkit"
