"""The manifest in each checkpoint's folder: what was saved, by whom, and the sha256 of each file.

It is written last, so a folder with a manifest that fits its files is complete.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hvkit.communication.encoding import sendable
from hvkit.errors import HvkitError

MANIFEST = "manifest.json"
FORMAT = 3


class DamagedError(HvkitError):
    """A checkpoint's folder does not hold what was written into it."""


@sendable
@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``."""

    epoch: int
    step: int
    batches: int
    """Batches of the epoch that each rank had read."""
    size: int
    """The number of ranks that saved."""
    serial: int
    """The number of the save in this directory: the newest checkpoint has the largest."""
    extras: dict[str, Any]
    parts: dict[str, dict[str, Any]]
    """By part: the name of its file and the facts that loading needs."""
    files: dict[str, dict[str, Any]]
    """By file: its length in bytes and its sha256."""
    versions: dict[str, str]
    run: str = ""
    """The name of the run that saved it or goes on from it, if ``hvkit run`` may start it again."""
    saves: int = 0
    """The number of saves of this run up to this one. Unlike serials, these numbers can be compared
    between directories of several hosts, which may hold checkpoints of other runs."""
    epoch_batches: int = 0
    """Batches of a whole epoch on each rank; 0 if unknown."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write the manifest into a checkpoint's folder."""
        body = asdict(self)
        text = json.dumps({**body, "sha256": _digest_of(body)}, indent=1)
        (folder / MANIFEST).write_text(text + "\n")


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        DamagedError: it is missing, cut short or changed, or the disk cannot read it.
        PermissionError: this user may not read it: skipping to an older one would hide that.
        HvkitError: an older or newer hvkit wrote it in another format.
    """
    try:
        body = json.loads((folder / MANIFEST).read_bytes())
        digest = body.pop("sha256")
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except PermissionError:
        raise
    except OSError as error:
        raise DamagedError(f"{MANIFEST}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise DamagedError(f"{MANIFEST} is not what was written") from None
    if digest != _digest_of(body):
        raise DamagedError(f"{MANIFEST} is not what was written: its sha256 differs")
    if body["format"] != FORMAT:
        raise HvkitError(
            f"{folder}: this checkpoint has format {body['format']}, this hvkit reads format "
            f"{FORMAT}: install the hvkit that wrote it ({body['versions'].get('hvkit')})"
        )
    return Manifest(**body)


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        DamagedError: names the file and the damage.
        PermissionError: this user may not read a file.
    """
    for name, written in manifest.files.items():
        try:
            found = facts_of(folder / name)
        except PermissionError:
            raise  # not damage: skipping to an older checkpoint would hide it
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from None
        if found["bytes"] != written["bytes"]:
            raise DamagedError(f"{name} has {found['bytes']} of {written['bytes']} bytes")
        if found != written:
            raise DamagedError(f"{name} is not what was written: its sha256 differs")


def has_all_bytes(folder: Path, manifest: Manifest) -> bool:
    """Whether every file of a checkpoint has its length; unlike ``verify``, reads no file."""
    try:
        return all(
            (folder / name).stat().st_size == written["bytes"]
            for name, written in manifest.files.items()
        )
    except OSError:
        return False


def describes(folder: Path, manifest: Manifest) -> bool:
    """Whether a folder's own manifest lists the same files; reads none of them."""
    try:
        return read(folder).files == manifest.files
    except (HvkitError, OSError):
        return False


def facts_of(path: Path) -> dict[str, Any]:
    """Length in bytes and sha256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def versions() -> dict[str, str]:
    """The versions of Python, hvkit and the libraries that are in use."""
    found = {"python": sys.version.split()[0]}
    for package in ("hvkit", "numpy", "torch", "tensorflow", "keras"):
        if package in sys.modules:
            version = getattr(sys.modules[package], "__version__", None)
            found[package] = str(version or metadata.version(package))
    return found


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
