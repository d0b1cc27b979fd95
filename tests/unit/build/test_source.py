"""Only the official source package is used."""

import hashlib
import tarfile
from pathlib import Path

import pytest

from hvkit.build import source
from hvkit.errors import BuildError

CONTENT = b"the official package"


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "SHA256", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What a stand-in for pip's index serves, one file a download."""
    served: list[bytes] = []

    def download(arguments: list[str], doing: str) -> None:
        if not served:
            raise BuildError(f"{doing}: the package index cannot be reached")
        folder = Path(arguments[arguments.index("--dest") + 1])
        (folder / source.ARCHIVE).write_bytes(served.pop())

    monkeypatch.setattr(source, "run_pip", download)
    return served


def test_downloaded_once_then_from_the_cache(official: None, downloads: list[bytes]) -> None:
    downloads.append(CONTENT)
    first = source.fetch()
    assert first.read_bytes() == CONTENT
    assert source.fetch() == first
    assert downloads == []


def test_damaged_copy_in_the_cache_is_replaced(official: None, downloads: list[bytes]) -> None:
    downloads.append(CONTENT)
    source.fetch().write_bytes(b"damaged")
    downloads.append(CONTENT)
    assert source.fetch().read_bytes() == CONTENT


def test_foreign_file_is_refused_and_not_kept(
    official: None, downloads: list[bytes], cache: Path
) -> None:
    downloads.append(b"foreign")
    with pytest.raises(BuildError, match=r"is not the official Horovod 0\.28\.1: its SHA-256"):
        source.fetch()
    assert not (cache / "source" / source.ARCHIVE).exists()


def test_without_an_index_the_place_for_the_package_is_named(
    official: None, downloads: list[bytes], cache: Path
) -> None:
    place = cache / "source" / source.ARCHIVE
    with pytest.raises(BuildError, match=f"cannot be reached\nWithout an index: put .* {place}"):
        source.fetch()
    place.write_bytes(CONTENT)
    assert source.fetch() == place


def test_unpack_returns_the_root(tmp_path: Path) -> None:
    inside = tmp_path / "setup.py"
    inside.write_text("")
    archive = tmp_path / source.ARCHIVE
    with tarfile.open(archive, "w:gz") as package:
        package.add(inside, "horovod-0.28.1/setup.py")
    assert (source.unpack(archive, tmp_path / "out") / "setup.py").is_file()
