"""Downloading CIFAR-10 from a local server, reading its files, and errors that name bad files."""

import gzip
import hashlib
import io
import tarfile

import numpy as np
import pytest
from common import sources
from common.cifar10 import ARCHIVE, Cifar10
from common.images import DataError

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"


def records(labels, seed=0):
    """Images of noise with these labels as the content of a file."""
    pixels = np.random.default_rng(seed).integers(256, size=(len(labels), 3072), dtype=np.uint8)
    return np.hstack([np.array(labels, np.uint8)[:, None], pixels]).tobytes()


def files():
    """Six files like CIFAR-10's, with ten images each."""
    return {
        name: records(np.arange(10), seed) for seed, name in enumerate((*TRAIN_FILES, TEST_FILE))
    }


def load(*arguments):
    return sources.load(Cifar10(mirrors=()), *arguments)


@pytest.fixture
def cifar(tmp_path):
    """A folder with the six files, plain."""
    place = tmp_path / "cifar"
    place.mkdir()
    for name, content in files().items():
        (place / name).write_bytes(content)
    return place


def test_reads_all_training_files_in_order_and_the_test_file(cifar):
    data = load("auto", cifar)
    assert (len(data.train), len(data.test)) == (50, 10)
    assert data.train.labels.tolist() == list(range(10)) * 5
    assert data.train.labels.dtype == np.int64
    assert data.origin == f"CIFAR-10 from {cifar}"


def test_the_files_channels_rows_and_columns_become_rows_columns_and_channels(cifar):
    content = (cifar / "data_batch_2.bin").read_bytes()
    image = load("auto", cifar).train.pixels[10 + 3]
    assert image.shape == (32, 32, 3)
    of_image = content[3 * 3073 + 1 :]
    for channel, row, column in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (2, 31, 30)):
        assert image[row, column, channel] == of_image[channel * 1024 + row * 32 + column]


@pytest.mark.parametrize("subfolder", ["", "cifar-10-batches-bin", "cifar10-subset"])
def test_finds_gzipped_files_also_in_a_subfolder_of_a_known_name(cifar, subfolder, tmp_path):
    packed = tmp_path / "packed" / subfolder
    packed.mkdir(parents=True)
    for file in cifar.iterdir():
        (packed / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    assert load("auto", tmp_path / "packed").digest() == load("auto", cifar).digest()


def test_any_of_the_training_files_will_do(cifar):
    for name in ("data_batch_1.bin", "data_batch_3.bin", "data_batch_5.bin"):
        (cifar / name).unlink()
    assert len(load("auto", cifar).train) == 20


def test_a_batch_is_centred_on_zero_in_each_channel(cifar):
    images = load("auto", cifar).train
    pixels, labels = images.batch(np.array([7, 3]))
    assert pixels.dtype == np.float32
    expected = (images.pixels[3, ..., 2] / 255 - 0.4465) / 0.2616
    np.testing.assert_allclose(pixels[1, ..., 2], expected, rtol=1e-4, atol=1e-6)
    assert labels.tolist() == [7, 3]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (records(np.arange(10))[:-1], "truncated or not a CIFAR-10 file: 30729 bytes"),
        (records(np.arange(10)) + b"x", "30731 bytes are not a whole number of images"),
        (b"", "0 bytes"),
        (b"<html>please log in</html>", "26 bytes"),
        (records(np.array([1, 2, 10, 3])), "labels must be 0 to 9, got 10 for image 2"),
        (gzip.compress(records(np.arange(10)))[:9000], "truncated or damaged"),
    ],
)
def test_a_damaged_or_foreign_file_is_named_with_what_is_wrong(cifar, content, complaint):
    for name in (TEST_FILE, "data_batch_2.bin"):
        (cifar / name).write_bytes(content)
        with pytest.raises(DataError, match=complaint) as error:
            load("auto", cifar)
        assert str(cifar / name) in str(error.value)


def test_missing_files_are_named_with_the_places_that_were_searched(cifar):
    (cifar / TEST_FILE).unlink()
    with pytest.raises(DataError, match=r"no test_batch.bin \(plain or .gz\) there") as error:
        load("cifar10", cifar)
    assert "cifar-10-batches-bin or cifar10-subset" in str(error.value)
    for name in TRAIN_FILES:
        (cifar / name).unlink()
    with pytest.raises(DataError, match=r"no data_batch_1.bin or other training file, no test"):
        load("auto", cifar)


def test_auto_falls_back_to_the_digits_in_cifars_shape_and_says_so(capsys):
    data = load("auto")
    assert data.train.pixels.shape == (1437, 32, 32, 3)
    assert (data.train.pixels[..., 0] == data.train.pixels[..., 2]).all()
    assert not data.train.mirrors
    assert "in place of CIFAR-10" in data.origin
    said = capsys.readouterr().out
    assert "no CIFAR-10 here ($HVKIT_DATA_DIR is not set), nor could it be downloaded" in said


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
    lines = []
    data = sources.load(source, say=lines.append)
    assert (len(data.train), len(data.test)) == (50, 10)
    assert lines == [f"downloading {ARCHIVE} (170 MB) into {cache}"]
    assert sorted(path.name for path in cache.iterdir()) == [".lock", *sorted(files())]
    assert sources.load(Cifar10(mirrors=())).digest() == data.digest()
    assert server.requests == [f"/{ARCHIVE}"]


def test_an_archive_with_another_checksum_or_without_a_file_is_refused(server, published, cache):
    contents = files()
    del contents["data_batch_4.bin"]
    digest = published(contents)
    with pytest.raises(DataError, match=f"{ARCHIVE}: has no data_batch_4.bin"):
        sources.load(Cifar10((server.url,), digest), "cifar10", say=lambda line: None)
    message = "does not match the known hash: expected c4a38c50"
    with pytest.raises(DataError, match=message) as error:
        sources.load(Cifar10((server.url,)), "cifar10", say=lambda line: None)
    assert "data_batch_1.bin to data_batch_5.bin" in str(error.value)
    assert [path.name for path in cache.iterdir()] == [".lock"]
