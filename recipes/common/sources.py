"""Where images come from: a folder, the cache, a download, or the bundled digits.

Nothing here knows about ranks: ``common.load_data`` lets the ranks take turns.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from common.images import DataError, Dataset
from hvkit.host.cache import cache_dir


class Source(Protocol):
    """Images that are published in files."""

    name: str
    key: str
    """What ``--dataset`` calls it; also its folder in the cache."""
    files: str
    """Its files in words, for messages."""

    def find(self, folder: Path) -> Mapping[str, Path]:
        """Those of its files that are in ``folder`` or a subfolder of a known name."""
        ...

    def is_whole(self, found: Mapping[str, Path]) -> bool:
        """Whether these are all of its files."""
        ...

    def read(self, folder: Path) -> Dataset:
        """Read it, or a subset of it, from ``folder``; raises DataError naming the file."""
        ...

    def download(self, cache: Path, say: Callable[[str], None]) -> None:
        """Download what ``cache`` lacks, saying so first; raises DataError or OSError."""
        ...

    def digits(self, why: str) -> Dataset:
        """The bundled digits in the shape of its images."""
        ...


def load(
    source: Source,
    dataset: str = "auto",
    data_dir: Path | None = None,
    *,
    download: bool = True,
    say: Callable[[str], None] = print,
) -> Dataset:
    """The first of these that there is: ``data_dir``, ``$HVKIT_DATA_DIR``, cache, download, digits.

    Args:
        source: what to load.
        dataset: the source's key, ``"digits"``, or ``"auto"``: the source, and the digits only
            where the download fails.
        data_dir: folder that must hold the files, itself or in a subfolder; nothing else is
            tried then.
        download: whether to download what the cache lacks.
        say: is told of a download before it starts.

    Raises:
        DataError: no such images; a file is missing, damaged, or no part of them.
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
                return source.digits(problem)
            raise DataError(
                f"{problem}. Name a folder with {source.files} (plain or .gz) with --data-dir, "
                "or use --dataset digits"
            ) from None
    try:
        return source.read(cache)
    except DataError as error:
        raise DataError(f"{error}; delete the file, and it is downloaded again") from None
