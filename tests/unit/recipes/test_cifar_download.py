"""Downloading CIFAR-10's archive, from a server on this machine."""

import hashlib
import io
import tarfile

import pytest
from cifar_files import files
from common import sources
from common.cifar10 import ARCHIVE, Cifar10
from common.images import DataError


def archive(contents):
    """The files in a gzipped archive, in a folder like the published one's."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as members:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            members.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def published(folder):
    """Puts contents on the server as the archive; returns its checksum."""

    def publish(contents):
        packed = archive(contents)
        (folder / ARCHIVE).write_bytes(packed)
        return hashlib.sha256(packed).hexdigest()

    return publish


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "data" / "cifar10"


def test_downloads_into_the_cache_and_reads_it_from_there_the_next_time(server, published, cache):
    source = Cifar10((server.url,), published({"readme.html": b"hello"} | files()))
    said = []
    data = sources.load(source, say=said.append)
    assert (len(data.train), len(data.test)) == (50, 10)
    assert said == [f"downloading {ARCHIVE} (170 MB) into {cache}"]
    assert sorted(path.name for path in cache.iterdir()) == [".lock", *sorted(files())]
    assert sources.load(Cifar10(mirrors=())).digest() == data.digest()
    assert server.requests == [f"/{ARCHIVE}"]


def test_an_archive_with_another_checksum_is_refused_and_leaves_no_file(server, published, cache):
    published(files())
    with pytest.raises(
        DataError, match="does not match the known hash: expected c4a38c50"
    ) as error:
        sources.load(Cifar10((server.url,)), "cifar10", say=lambda line: None)
    assert "data_batch_1.bin to data_batch_5.bin" in str(error.value)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_an_archive_without_one_of_the_files_is_refused(server, published):
    contents = files()
    del contents["data_batch_4.bin"]
    with pytest.raises(DataError, match=f"{ARCHIVE}: has no data_batch_4.bin"):
        sources.load(Cifar10((server.url,), published(contents)), "cifar10", say=lambda line: None)
