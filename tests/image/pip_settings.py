"""pip's settings on this machine, made ready for a build that must not keep them."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Where the Dockerfile's secret `ca_bundle` appears during the build.
_CA_BUNDLE = "/run/secrets/ca_bundle"
_INDEXES = ("index-url", "extra-index-url")
_KEPT = (*_INDEXES, "find-links", "trusted-host", "proxy", "timeout", "default-timeout")


@dataclass(frozen=True)
class PipSettings:
    """What a build needs to find packages where this machine finds them.

    Attributes:
        text: a configuration file of pip.
        certificates: the file to pass as the secret ``ca_bundle``, if pip is told of one.
        folders: of this machine, which the text names.
        places: indexes and folders of packages, none of which an image may name.
    """

    text: str
    certificates: Path | None
    folders: tuple[Path, ...]
    places: tuple[str, ...]


def pip_settings() -> PipSettings:
    """What pip is set to here, in its files and in the environment."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    return parse(listed.stdout)


def parse(listed: str) -> PipSettings:
    """Read the output of ``pip config list``."""
    values = {}
    # The environment's come first in the list and count more.
    for line in reversed(listed.splitlines()):
        name, _, value = line.partition("=")
        values[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    lines = [f"{name} = {' '.join(values[name].split())}" for name in _KEPT if name in values]
    certificates = values.get("cert")
    if certificates:
        lines.append(f"cert = {_CA_BUNDLE}")
    indexes = [word for name in _INDEXES for word in values.get(name, "").split()]
    links = values.get("find-links", "").split()
    # An index has its packages beside `simple`, the folder that its address ends with.
    folders = [folder.parent for word in indexes if (folder := _folder(word))]
    folders += [folder for word in links if (folder := _folder(word))]
    return PipSettings(
        "\n".join(["[global]", *lines, ""]),
        Path(certificates) if certificates else None,
        tuple(dict.fromkeys(folders)),
        tuple(dict.fromkeys([*indexes, *links])),
    )


def _folder(place: str) -> Path | None:
    address = urlsplit(place)
    return Path(unquote(address.path)) if address.scheme in ("", "file") else None
