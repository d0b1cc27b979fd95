"""What lies in a checkpoint's folder, and whether it is still what was written."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hvkit.errors import HvkitError

NAME = "manifest.json"
FORMAT = 2


class DamagedError(HvkitError):
    """A checkpoint's folder does not hold what was written into it."""


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``."""

    epoch: int
    step: int
    batches: int
    """Batches of the epoch that each rank had."""
    size: int
    """The number of ranks that saved."""
    serial: int
    """Counts the saves in a directory: the newest checkpoint has the largest."""
    extras: dict[str, Any]
    parts: dict[str, dict[str, Any]]
    """For each part its file and what loading it has to know."""
    files: dict[str, dict[str, Any]]
    """For each file its length in bytes and its sha256."""
    versions: dict[str, str]
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        body = asdict(self)
        text = json.dumps({**body, "sha256": _digest_of(body)}, indent=1)
        (folder / NAME).write_text(text + "\n")


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        DamagedError: it is missing, cut short or changed.
        HvkitError: an older or newer hvkit wrote it, in another format.
    """
    try:
        body = json.loads((folder / NAME).read_bytes())
        digest = body.pop("sha256")
    except FileNotFoundError:
        raise DamagedError(f"{NAME} is missing") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise DamagedError(f"{NAME} is not what was written") from None
    if digest != _digest_of(body):
        raise DamagedError(f"{NAME} is not what was written: its sha256 differs")
    if body["format"] != FORMAT:
        raise HvkitError(
            f"{folder}: this checkpoint has format {body['format']}, this hvkit reads format "
            f"{FORMAT}: install the hvkit that wrote it ({body['versions'].get('hvkit')})"
        )
    return Manifest(**body)


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every file with the manifest.

    Raises:
        DamagedError: names the file and what is wrong with it.
    """
    for name, written in manifest.files.items():
        try:
            found = facts_of(folder / name)
        except PermissionError:
            raise  # no damage, and nothing to skip in silence
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from None
        if found["bytes"] != written["bytes"]:
            raise DamagedError(f"{name} has {found['bytes']} of {written['bytes']} bytes")
        if found != written:
            raise DamagedError(f"{name} is not what was written: its sha256 differs")


def facts_of(path: Path) -> dict[str, Any]:
    """Length in bytes and sha256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def versions() -> dict[str, str]:
    """The versions of Python, hvkit and the libraries that are in use."""
    found = {"python": sys.version.split()[0]}
    for module, package in (
        ("hvkit", "hvkit"),
        ("numpy", "numpy"),
        ("torch", "torch"),
        ("tensorflow", "tensorflow"),
        ("keras", "keras"),
    ):
        if module in sys.modules:
            version = getattr(sys.modules[module], "__version__", None)
            found[package] = str(version or metadata.version(package))
    return found


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
