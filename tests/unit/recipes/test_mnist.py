"""Downloading MNIST from a local server, reading its files, and errors that name bad files."""

import gzip
import hashlib
import multiprocessing
import os
import shutil

import numpy as np
import pytest
from common import sources
from common.images import DataError
from common.mnist import SHA256, Mnist
from idx_files import idx

read_mnist = Mnist().read


def load_local(*arguments):
    return sources.load(Mnist(mirrors=()), *arguments)


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def test_reads_pixels_and_labels_in_the_files_order(folder, contents):
    data = read_mnist(folder)
    assert (len(data.train), len(data.test)) == (30, 20)
    assert data.train.pixels.dtype == np.uint8
    assert data.train.pixels.tobytes() == contents["train-images-idx3-ubyte"][16:]
    assert data.test.labels.tolist() == list(contents["t10k-labels-idx1-ubyte"][8:])


def test_plain_files_read_the_same_as_gzipped_ones(folder, contents, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    for name, content in contents.items():
        (plain / name).write_bytes(content)
    assert read_mnist(plain).digest() == read_mnist(folder).digest()


def test_finds_the_files_in_the_subfolder_mnist(folder, tmp_path):
    (tmp_path / "parent").mkdir()
    shutil.move(folder, tmp_path / "parent" / "mnist")
    assert len(read_mnist(tmp_path / "parent").train) == 30


def test_a_batch_is_float32_centred_on_zero_with_its_labels(folder):
    images = read_mnist(folder).train
    rows = np.array([7, 3])
    pixels, labels = images.batch(rows)
    assert pixels.dtype == np.float32
    assert pixels.shape == (2, 28, 28)
    np.testing.assert_allclose(pixels[1], (images.pixels[3] / 255 - 0.1307) / 0.3081, rtol=1e-5)
    assert labels.tolist() == [images.labels[7], images.labels[3]]


def test_the_digest_tells_apart_images_that_differ_in_one_label(folder, contents):
    before = read_mnist(folder).digest()
    labels = bytearray(contents["t10k-labels-idx1-ubyte"])
    labels[-1] = (labels[-1] + 1) % 10
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    assert read_mnist(folder).digest() != before


def flip_a_byte(raw):
    packed = bytearray(gzip.compress(raw))
    packed[200] ^= 255
    return bytes(packed)


@pytest.mark.parametrize(
    ("file", "spoil", "complaint"),
    [
        (IMAGES, lambda raw: gzip.compress(raw)[:9000], "truncated or damaged"),
        (IMAGES, flip_a_byte, "truncated or damaged"),
        (IMAGES, lambda raw: gzip.compress(raw[:-5]), "23515 bytes after a header that announces"),
        (IMAGES, lambda raw: gzip.compress(raw + b"x"), "announces 30 x 28 x 28"),
        (IMAGES, lambda raw: raw[:10], "truncated"),
        (IMAGES, lambda raw: b"", "must start with 00000803, got nothing"),
        (IMAGES, lambda raw: b"<!DOCTYPE html>", "must start with 00000803, got 3c21444f"),
        (IMAGES, lambda raw: idx(np.zeros(30)), "must start with 00000803, got 00000801"),
        (IMAGES, lambda raw: idx(np.zeros((30, 32, 32))), r"must be 28x28, got \(32, 32\)"),
        (LABELS, lambda raw: idx(np.zeros(29)), "has 29 labels for the 30 images of .*images"),
        (LABELS, lambda raw: idx(np.full(30, 10)), "labels must be 0 to 9, got 10"),
    ],
)
def test_a_damaged_or_foreign_file_is_named_with_what_is_wrong(
    folder, contents, file, spoil, complaint
):
    (folder / file).write_bytes(spoil(contents[file.removesuffix(".gz")]))
    with pytest.raises(DataError, match=complaint) as error:
        read_mnist(folder)
    assert str(folder / file) in str(error.value)


def test_files_without_any_image_are_refused(folder):
    (folder / IMAGES).write_bytes(idx(np.zeros((0, 28, 28))))
    (folder / LABELS).write_bytes(idx(np.zeros(0)))
    with pytest.raises(DataError, match="holds no labels"):
        read_mnist(folder)


@pytest.mark.parametrize("dataset", ["auto", "mnist"])
def test_a_data_dir_without_the_files_is_an_error_that_names_what_is_missing(
    folder, dataset, monkeypatch
):
    monkeypatch.setenv("HVKIT_DATA_DIR", str(folder))
    elsewhere = folder / "elsewhere"
    with pytest.raises(DataError, match="no train-images-idx3-ubyte, no train-labels") as error:
        load_local(dataset, elsewhere)
    assert str(elsewhere / "mnist") in str(error.value)


def test_the_environments_folder_is_used_where_no_data_dir_is_given(folder, monkeypatch):
    monkeypatch.setenv("HVKIT_DATA_DIR", str(folder))
    data = load_local("auto")
    assert len(data.train) == 30
    assert str(folder) in data.origin


def test_the_environments_folder_with_one_file_missing_is_an_error(folder, monkeypatch):
    monkeypatch.setenv("HVKIT_DATA_DIR", str(folder))
    os.remove(folder / LABELS)
    with pytest.raises(DataError, match="no train-labels-idx1-ubyte"):
        load_local("auto")


def test_the_digits_are_mnists_size_in_a_fixed_split_with_every_digit_in_proportion():
    data = load_local("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.train.pixels.shape[1:] == (28, 28)
    assert data.train.pixels.max() == 255
    assert not data.train.pixels[:, :2].any()
    assert np.bincount(data.test.labels).min() >= 34
    assert load_local("digits").digest() == data.digest()


def test_each_digit_is_its_bundled_image_enlarged_three_times():
    from sklearn.datasets import load_digits

    bundled = {image.tobytes() for image in load_digits().images.astype(np.uint8)}
    shrunk = np.round(load_local("digits").test.pixels[:, 3:-3:3, 3:-3:3] * (16 / 255))
    assert all(image.tobytes() in bundled for image in shrunk.astype(np.uint8))


NOWHERE = "http://127.0.0.1:9/"  # the discard port: nothing listens there


def load(dataset="auto", mirrors=(), sha256=SHA256, **arguments):
    return sources.load(Mnist(tuple(mirrors), sha256), dataset, **arguments)


@pytest.fixture
def sha256(contents):
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "data" / "mnist"


def test_downloads_into_the_cache_and_reads_it_from_there_the_next_time(
    server, sha256, folder, cache
):
    lines = []
    data = load(mirrors=[server.url], sha256=sha256, say=lines.append)
    assert data.digest() == Mnist().read(folder).digest()
    assert str(cache) in data.origin
    assert len(lines) == 4
    assert load(mirrors=[], sha256=sha256).digest() == data.digest()
    assert len(server.requests) == 4


def test_the_second_mirror_serves_what_the_first_does_not(server, sha256):
    assert len(load(mirrors=[NOWHERE, server.url], sha256=sha256).train) == 30


def test_the_gzip_wrapper_may_differ_as_long_as_the_content_is_right(
    server, sha256, folder, contents
):
    for name, content in contents.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content, compresslevel=1, mtime=1))
    assert len(load("mnist", mirrors=[server.url], sha256=sha256).train) == 30


def other_content(file):
    file.write_bytes(gzip.compress(b"another database"))


def cut(file):
    file.write_bytes(file.read_bytes()[:-9])


def web_page(file):
    file.write_text("<html>please log in</html>")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (other_content, "does not match the known hash: expected"),
        (cut, "ended before"),
        (web_page, "Not a gzipped file"),
        (lambda file: file.unlink(), "404"),
    ],
)
def test_a_wrong_download_is_refused_with_its_address_and_leaves_no_file(
    server, sha256, folder, cache, spoil, complaint
):
    spoil(folder / "t10k-images-idx3-ubyte.gz")
    with pytest.raises(DataError, match=complaint) as error:
        load("mnist", mirrors=[server.url], sha256=sha256)
    assert server.url + "t10k-images-idx3-ubyte.gz" in str(error.value)
    assert sorted(file.name for file in cache.iterdir()) == [
        ".lock",
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
    ]


def test_a_download_that_cannot_be_put_in_place_leaves_no_part_of_it(
    server, sha256, cache, monkeypatch
):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pooch.core.shutil.move", full)
    with pytest.raises(DataError, match="No space left on device"):
        load("mnist", mirrors=[server.url], sha256=sha256)
    assert [file.name for file in cache.iterdir()] == [".lock"]


def test_an_interrupted_download_goes_on_with_the_missing_files(server, sha256, folder):
    gone = folder / "t10k-labels-idx1-ubyte.gz"
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(DataError):
        load("mnist", mirrors=[server.url], sha256=sha256)
    gone.write_bytes(content)
    server.requests.clear()
    load("mnist", mirrors=[server.url], sha256=sha256)
    assert server.requests == ["/t10k-labels-idx1-ubyte.gz"]


def test_mnist_never_falls_back_and_explains_all_it_tried(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("HVKIT_DATA_DIR", str(tmp_path / "empty"))
    with pytest.raises(DataError) as error:
        load("mnist", mirrors=[NOWHERE])
    for part in (str(tmp_path / "empty"), str(cache), NOWHERE, "refused", "--data-dir", "digits"):
        assert part in str(error.value)


def test_auto_falls_back_to_the_digits_and_says_so_in_two_lines(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HVKIT_DATA_DIR", str(tmp_path / "empty"))
    lines = []
    data = load("auto", mirrors=[NOWHERE], say=lines.append)
    assert len(data.train) == 1437
    assert data.origin == "scikit-learn's 1,797 handwritten digits in place of MNIST"
    downloading, why = lines
    assert downloading.startswith("downloading train-images-idx3-ubyte")
    empty = f"no MNIST here ($HVKIT_DATA_DIR, {tmp_path / 'empty'}, holds none of its files)"
    assert why.startswith(empty)
    assert f"--dataset mnist prints why. Put its files into {cache}, or" in why
    assert NOWHERE not in why


def test_a_mirror_that_does_not_answer_is_tried_once_and_one_that_does_twice(
    server, sha256, folder, monkeypatch
):
    cut(folder / "train-images-idx3-ubyte.gz")
    tried = []
    plain = sources._plain
    monkeypatch.setattr(
        sources, "_plain", lambda url, *others: tried.append(url) or plain(url, *others)
    )
    with pytest.raises(DataError):
        load("mnist", mirrors=[NOWHERE, server.url], sha256=sha256)
    name = "train-images-idx3-ubyte.gz"
    assert tried == [NOWHERE + name, server.url + name, server.url + name]


def test_nothing_is_downloaded_where_that_is_left_to_another_rank(server, sha256):
    assert len(load("auto", download=False, mirrors=[server.url], sha256=sha256).train) == 1437
    assert server.requests == []


def test_a_cache_that_cannot_be_written_counts_as_a_failed_download(cache):
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where a folder should be")
    with pytest.raises(DataError, match=r"Not a directory|File exists"):
        load("mnist", mirrors=[NOWHERE])


def test_a_file_damaged_in_the_cache_is_named_with_the_fix(server, sha256, cache):
    load("mnist", mirrors=[server.url], sha256=sha256)
    cut(cache / "train-images-idx3-ubyte")
    with pytest.raises(DataError, match="delete the file, and it is downloaded again"):
        load("mnist", mirrors=[], sha256=sha256)


def _load_in_process(mirror, sha256, start, digests):
    start.wait()
    digests.put(load("mnist", mirrors=[mirror], sha256=sha256, say=lambda line: None).digest())


def test_processes_that_start_at_once_download_each_file_once(server, sha256):
    context = multiprocessing.get_context("fork")
    start, digests = context.Event(), context.Queue()
    processes = [
        context.Process(target=_load_in_process, args=(server.url, sha256, start, digests))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    start.set()
    assert len({digests.get(timeout=30) for _ in processes}) == 1
    for process in processes:
        process.join(30)
    assert len(server.requests) == 4
