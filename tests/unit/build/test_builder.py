"""The build itself, with a stand-in for Horovod's setup.py."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hvkit.build import builder, source
from hvkit.build.key import Key
from hvkit.build.toolchain import Toolchain
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
def setup_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The setup.py that the build will run."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(source, "fetch", lambda: root)
    monkeypatch.setattr(source, "unpack", lambda archive, folder: root)
    monkeypatch.setattr(builder, "EDITS", ())
    monkeypatch.setattr(builder, "find_cmake", lambda: "cmake")
    return root / "setup.py"


def test_wheel_goes_into_the_cache_and_the_log_is_kept(
    setup_py: Path, toolchain: Toolchain, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_py.write_text(WORKS)
    wheel = builder.build(toolchain, KEY, jobs=3)
    assert wheel == cache / "wheels" / f"horovod-{KEY.version}-cp311-x-x.whl"
    (log,) = (cache / "logs").iterdir()
    assert "[ 50%] Building -j3 /opt/mpi/lib" in log.read_text()
    shown = capsys.readouterr().out
    assert f"log: {log}" in shown
    assert "hvkit: compiling Horovod: 50%" in shown


def test_failure_shows_the_error_and_names_the_log(
    setup_py: Path, toolchain: Toolchain, cache: Path
) -> None:
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


def test_too_little_disk_is_said_before_anything_is_done(
    setup_py: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=100 * 1024**2)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(BuildError, match=r"has 100 MiB free, the build needs .*TMPDIR"):
        builder.build(toolchain, KEY, jobs=1)
