"""Where images come from: a folder, the cache, a download, or the bundled digits.

This module does not know about ranks: ``common.load_data`` makes the ranks take turns.
"""

import gzip
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from common.images import DataError, Dataset
from hvkit.host.system import cache_dir

TIMEOUT = 5.0
"""Seconds to wait for a mirror's connection, and for each piece of its answer."""


class Source(Protocol):
    """Images that are published in files."""

    name: str
    key: str
    """Its name in ``--dataset``, and the name of its folder in the cache."""
    files: str
    """A description of its files, for messages."""

    def find(self, folder: Path) -> Mapping[str, Path]:
        """Its files that are in ``folder``, or in a subfolder with a known name."""
        ...

    def is_whole(self, found: Mapping[str, Path]) -> bool:
        """Whether these are all of its files."""
        ...

    def read(self, folder: Path) -> Dataset:
        """Read it, or a subset of it, from ``folder``; raises DataError naming the file."""
        ...

    def download(self, cache: Path, say: Callable[[str], None]) -> None:
        """Download the files that ``cache`` lacks, announcing each; raises DataError or OSError."""
        ...

    def digits(self, why: str) -> Dataset:
        """The bundled digits in the shape of its images; ``why`` is for errors."""
        ...


def load(
    source: Source,
    dataset: str = "auto",
    data_dir: Path | None = None,
    *,
    download: bool = True,
    say: Callable[[str], None] = print,
) -> Dataset:
    """Load from the first of: ``data_dir``, ``$HVKIT_DATA_DIR``, cache, download, digits.

    Args:
        source: the images to load.
        dataset: the source's key, ``"digits"``, or ``"auto"``: the source, and the digits only
            if the download fails.
        data_dir: a folder that must hold the files, itself or in a subfolder; if it is given,
            nothing else is tried.
        download: whether to download the files that the cache lacks.
        say: called with a line before each download, and if the digits take the images' place.

    Raises:
        DataError: there are no such images; or a file is missing, damaged, or not one of them.
    """
    if dataset == "digits":
        return source.digits("--dataset digits")
    if data_dir is not None:
        return source.read(data_dir)
    tried = "$HVKIT_DATA_DIR is not set"
    if named := os.environ.get("HVKIT_DATA_DIR"):
        if source.find(Path(named)):
            return source.read(Path(named))
        tried = f"$HVKIT_DATA_DIR, {named}, holds none of its files"
    cache = cache_dir() / "data" / source.key
    if not source.is_whole(source.find(cache)):
        try:
            if not download:
                raise DataError(f"{cache} does not hold it")
            source.download(cache, say)
        except (DataError, OSError) as error:
            problem = f"no {source.name}: {tried}; download into {cache} failed: {error}"
            if dataset == "auto":
                say(
                    f"no {source.name} here ({tried}), nor could it be downloaded; "
                    f"--dataset {source.key} prints why. Put its files into {cache}, or name their "
                    "folder with --data-dir"
                )
                return source.digits(problem)
            raise DataError(
                f"{problem}. Name a folder with {source.files} (plain or .gz) with --data-dir, "
                "or use --dataset digits"
            ) from None
    try:
        return source.read(cache)
    except DataError as error:
        raise DataError(f"{error}; delete the file, and it is downloaded again") from None


def fetch(
    file: str, mirrors: Sequence[str], sha256: str, folder: Path, *, gzipped: bool = False
) -> Path:
    """Download a file from the first mirror that has it with the right content.

    The file appears in ``folder`` when it is complete and checked. A mirror that answers is tried
    twice, and one that does not, once: without a network this fails at once.

    Args:
        file: the file's name, which follows the mirror's address.
        mirrors: addresses, tried in order; they end in a slash.
        sha256: the checksum of the file in ``folder``.
        folder: where to put the file.
        gzipped: whether the mirrors have ``FILE.gz``, to be stored unpacked. The mirrors may
            compress it differently.

    Raises:
        DataError: no mirror has the file; the message gives each mirror's reason.
    """
    try:
        import pooch
        import requests
    except ImportError:
        raise DataError("downloads need pooch: pip install pooch") from None
    pooch.get_logger().setLevel(logging.WARNING)
    problems: dict[str, Exception] = {}
    for mirror in (*mirrors, *mirrors):
        url = f"{mirror}{file}.gz" if gzipped else mirror + file
        if isinstance(problems.get(url), requests.ConnectionError):
            continue
        try:
            files = pooch.Pooch(folder, mirror, {file: sha256}, {file: url})
            return Path(files.fetch(file, downloader=_unpacked if gzipped else _plain))
        except (OSError, ValueError, EOFError, zlib.error) as error:
            problems[url] = error
    raise DataError("; ".join(f"{url}: {_first_cause(why)}" for url, why in problems.items()))


def _plain(url: str, file: str, pooch: Any) -> None:
    """Download for pooch, which calls it with the address and a temporary file's path."""
    from pooch import HTTPDownloader

    HTTPDownloader(timeout=TIMEOUT)(url, file, pooch)


def _unpacked(url: str, file: str, pooch: Any) -> None:
    """Download a gzipped file for pooch, which then checks the unpacked one."""
    packed = Path(f"{file}.gz")
    try:
        _plain(url, str(packed), pooch)
        with gzip.open(packed) as source, open(file, "wb") as target:
            shutil.copyfileobj(source, target)
    finally:
        packed.unlink(missing_ok=True)


def _first_cause(error: BaseException) -> str:
    """The error at the beginning of the chain: ``requests`` wraps "Connection refused" thrice."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error) or type(error).__name__


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create ``folder`` and hold its lock, after waiting for the process that holds it."""
    # Imported only here: from Python 3.12 on, filelock installs an audit hook, which costs time.
    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        yield
