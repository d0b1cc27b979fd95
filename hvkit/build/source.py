"""Horovod's official source package: fetched once, verified at every use."""

import hashlib
import os
import tarfile
import tempfile
from pathlib import Path

from hvkit.build.process import run_pip
from hvkit.errors import BuildError
from hvkit.host.cache import cache_dir

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
ARCHIVE = f"horovod-{VERSION}.tar.gz"


def fetch() -> Path:
    """The verified source package, from the cache or from the package index that pip uses.

    Raises:
        BuildError: it cannot be had, or is not the official one.
    """
    archive = cache_dir() / "source" / ARCHIVE
    if archive.is_file() and _sha256(archive) == SHA256:
        return archive
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        downloaded = _download(Path(folder), archive)
        verify(downloaded)
        os.replace(downloaded, archive)
    return archive


def verify(archive: Path) -> None:
    """Check the package against the official SHA-256.

    Raises:
        BuildError: it differs.
    """
    found = _sha256(archive)
    if found != SHA256:
        raise BuildError(
            f"{archive.name} is not the official Horovod {VERSION}: its SHA-256 is {found}, "
            f"expected {SHA256}. Check which package index pip uses with `pip config list`"
        )


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the package into ``folder`` and return the root of the source."""
    with tarfile.open(archive) as package:
        # Python before 3.11.4 has no filters. What is unpacked has the official checksum.
        package.extraction_filter = getattr(tarfile, "data_filter", None)
        package.extractall(folder)
    return folder / ARCHIVE.removesuffix(".tar.gz")


def _download(folder: Path, cached: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
    try:
        run_pip(
            ["download", *options, "--dest", str(folder), "--requirement", str(requirements)],
            doing=f"fetching the source of Horovod {VERSION} failed",
        )
    except BuildError as error:
        raise BuildError(f"{error}\nWithout an index: put {ARCHIVE} at {cached}") from None
    return folder / ARCHIVE


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
