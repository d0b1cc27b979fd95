"""Downloading from a local server into the cache, and the digits where that fails."""

import gzip
import hashlib
import multiprocessing

import pytest
from common import sources
from common.images import DataError
from common.mnist import SHA256, Mnist

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


def test_the_second_mirror_serves_what_the_first_does_not(server, sha256, folder, contents):
    for name, content in contents.items():
        # The gzip wrapper may differ as long as the content is right.
        (folder / f"{name}.gz").write_bytes(gzip.compress(content, compresslevel=1, mtime=1))
    assert len(load("mnist", mirrors=[NOWHERE, server.url], sha256=sha256).train) == 30


def cut(file):
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (
            lambda file: file.write_bytes(gzip.compress(b"another database")),
            "does not match the known hash: expected",
        ),
        (cut, "ended before"),
        (lambda file: file.write_text("<html>please log in</html>"), "Not a gzipped file"),
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
    arguments = (server.url, sha256, start, digests)
    processes = [context.Process(target=_load_in_process, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    assert len({digests.get(timeout=30) for _ in processes}) == 1
    for process in processes:
        process.join(30)
    assert len(server.requests) == 4
