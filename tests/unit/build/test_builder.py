"""The build, with stand-ins for pip and for Horovod's setup.py."""

import hashlib
import tarfile
from pathlib import Path

import pytest

from hvkit.build import builder
from hvkit.build.wheels import Key
from hvkit.errors import BuildError

KEY = Key({"horovod": "0.28.1"})

WORKS = """
import os, pathlib, sys
print("[ 50%] Building", os.environ["MAKEFLAGS"], os.environ["HVKIT_RPATH"])
folder = pathlib.Path(sys.argv[3])
folder.mkdir()
(folder / f"horovod-0.28.1+{os.environ['HOROVOD_LOCAL_VERSION']}-cp311-x-x.whl").write_text("wheel")
"""
FAILS = """
import sys
print("[ 10%] Building CXX object ops.cc.o")
print("ops.cc:7:1: error: 'x' was not declared")
sys.exit(1)
"""


@pytest.fixture
def setup_py(tmp_path, monkeypatch):
    """The setup.py that the build will run."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(builder, "fetch_source", lambda: root)
    monkeypatch.setattr(builder, "unpack", lambda archive, folder: root)
    monkeypatch.setattr(builder, "apply_patches", lambda folder, source, toolchain: [])
    monkeypatch.setattr(builder, "find_cmake", lambda: "cmake")
    monkeypatch.setattr(builder, "with_facts", lambda wheel, toolchain, environ: wheel)
    return root / "setup.py"


def test_wheel_goes_into_the_cache_and_the_log_is_kept(setup_py, toolchain, cache, capsys):
    setup_py.write_text(WORKS)
    wheel = builder.build(toolchain, KEY, jobs=3)
    assert wheel == cache / "wheels" / f"horovod-{KEY.version}-cp311-x-x.whl"
    (log,) = (cache / "logs").iterdir()
    assert "[ 50%] Building -j3 /opt/mpi/lib" in log.read_text()
    shown = capsys.readouterr().out
    assert f"log: {log}" in shown
    assert "hvkit: compiling Horovod: 50%" in shown


def test_failure_shows_the_error_and_names_the_log(setup_py, toolchain, cache):
    setup_py.write_text(FAILS)
    with pytest.raises(BuildError) as caught:
        builder.build(toolchain, KEY, jobs=1)
    (log,) = (cache / "logs").iterdir()
    assert str(caught.value).splitlines() == [
        "compiling Horovod failed",
        "    ops.cc:7:1: error: 'x' was not declared",
        f"Full log: {log}",
    ]
    assert not list(cache.glob("wheels/*.whl"))


CONTENT = b"the official package"


@pytest.fixture
def downloads(monkeypatch):
    """Files that a stand-in for pip's index serves, one per download."""
    served = []

    def download(arguments, summary):
        if not served:
            raise BuildError(f"{summary}: pip cannot reach the package index")
        folder = Path(arguments[arguments.index("--dest") + 1])
        (folder / builder.ARCHIVE).write_bytes(served.pop())

    monkeypatch.setattr(builder, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(builder, "run_pip", download)
    return served


def test_the_source_is_downloaded_once_and_a_damaged_copy_replaced(downloads):
    downloads.append(CONTENT)
    first = builder.fetch_source()
    assert first.read_bytes() == CONTENT
    assert builder.fetch_source() == first
    first.write_bytes(b"damaged")
    downloads.append(CONTENT)
    assert builder.fetch_source().read_bytes() == CONTENT


def test_foreign_file_is_refused_and_not_kept(downloads, cache):
    downloads.append(b"foreign")
    with pytest.raises(BuildError, match=r"is not the official Horovod 0\.28\.1: its SHA-256"):
        builder.fetch_source()
    assert not (cache / "source" / builder.ARCHIVE).exists()


def test_without_an_index_the_error_names_the_path_for_the_package(downloads, cache):
    place = cache / "source" / builder.ARCHIVE
    with pytest.raises(
        BuildError, match=f"cannot reach the package index\nWithout an index: put .* {place}"
    ):
        builder.fetch_source()
    place.write_bytes(CONTENT)
    assert builder.fetch_source() == place


def test_unpack_returns_the_root(tmp_path):
    inside = tmp_path / "setup.py"
    inside.write_text("")
    archive = tmp_path / builder.ARCHIVE
    with tarfile.open(archive, "w:gz") as package:
        package.add(inside, "horovod-0.28.1/setup.py")
    assert (builder.unpack(archive, tmp_path / "out") / "setup.py").is_file()


GIB = 1024**3


@pytest.mark.parametrize(
    ("cores", "memory", "jobs"), [(8, 64 * GIB, 8), (8, 7 * GIB, 3), (8, GIB, 1), (1, 64 * GIB, 1)]
)
def test_default_jobs(monkeypatch, cores, memory, jobs):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(builder, "free_memory", lambda: memory)
    assert builder.default_jobs() == jobs
