"""Puts hvkit's version into the name of the site; MkDocs calls it."""

import re
from pathlib import Path
from typing import Any


def on_config(config: Any) -> None:
    """Read the version from the source: the environment of the docs lacks hvkit."""
    source = (
        Path(config.config_file_path).parent / "hvkit" / "__init__.py"
    ).read_text()
    version = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert version, "hvkit/__init__.py has no __version__"
    config.site_name += f" {version[1]}"
