"""What an index of packages would get, and the oldest versions that hvkit needs."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv.pop()
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""


def test_the_packages_are_whole_and_their_description_can_be_shown(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "hvkit", source / "hvkit", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-c", BUILD, out], cwd=source, check=True, stdout=subprocess.DEVNULL
    )
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", sdist, wheel],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    ours = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "hvkit").rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert ours <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as package:
        assert ours <= {name.partition("/")[2] for name in package.getnames()}


def test_the_oldest_versions_that_are_declared_are_those_that_make_oldest_tries():
    setup = (ROOT / "setup.py").read_text()
    pins = (ROOT / "constraints-oldest.txt").read_text()

    def declared(name):
        return Version(re.search(rf'"{name}>=([\d.]+)"', setup).group(1))

    tried = {name: Version(version) for name, version in re.findall(r"(?m)^(\S+)==(\S+)$", pins)}
    names = (
        *("cloudpickle", "filelock", "jinja2", "keras", "msgpack", "numpy"),
        *("tensorflow-cpu", "torch"),
    )
    assert {name: declared(name) for name in names} == {name: tried[name] for name in names}
    assert declared("tensorflow") == declared("tensorflow-cpu")
