"""Frameworks are found by their package metadata."""

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvkit.build.frameworks import InstalledFramework, find_frameworks
from hvkit.errors import BuildError


@pytest.fixture
def installed(monkeypatch):
    """Packages and their versions; tests fill it."""
    packages = {}

    def distribution(name):
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return SimpleNamespace(version=packages[name], locate_file=lambda path: Path("/site"))

    monkeypatch.setattr(metadata, "distribution", distribution)
    return packages


@pytest.mark.parametrize(
    ("package", "version", "found"),
    [
        ("torch", "2.13.0+cu130", "PyTorch 2.13.0+cu130"),
        ("tensorflow", "2.21.0", "TensorFlow 2.21.0"),
        ("tf-nightly", "2.21.0", "TensorFlow 2.21.0"),
    ],
)
def test_frameworks_under_any_name_with_their_whole_version(installed, package, version, found):
    installed[package] = version
    assert [str(each) for each in find_frameworks()] == [found]


def test_none_or_all_left_out_is_an_error(installed):
    with pytest.raises(BuildError, match=r"no framework installed.*`pip install torch`"):
        find_frameworks()
    installed.update({"torch": "2.13.0", "tensorflow": "2.21.0"})
    (found,) = find_frameworks({"tensorflow"})
    assert (found.name, found.module) == ("pytorch", "torch")
    with pytest.raises(BuildError, match=r"PyTorch 2\.13\.0 and TensorFlow .* left out by --witho"):
        find_frameworks({"pytorch", "tensorflow"})


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.1'", "12.1"),
        ("cuda: Optional[str] = None", None),
        ("cuda_like = '12.8'", None),
    ],
)
def test_cuda_of_pytorch_is_read_from_its_record(tmp_path, line, cuda):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(
        f"__all__ = ['cuda', 'hip']\n__version__ = '2.13.0'\n{line}\nhip = '6.0'\n"
    )
    assert InstalledFramework("pytorch", "2.13.0", tmp_path).cuda == cuda
