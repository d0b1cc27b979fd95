"""Frameworks are found by their package metadata."""

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvkit.build.frameworks import Framework, find_frameworks
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


def test_versions_keep_their_local_part(installed):
    installed["torch"] = "2.13.0+cu130"
    (found,) = find_frameworks()
    assert (found.name, found.version, found.module) == ("pytorch", "2.13.0+cu130", "torch")


@pytest.mark.parametrize("package", ["tensorflow", "tensorflow-cpu", "tf-nightly"])
def test_tensorflow_under_any_name(installed, package):
    installed[package] = "2.21.0"
    assert [str(found) for found in find_frameworks()] == ["TensorFlow 2.21.0"]


def test_without_leaves_one_out(installed):
    installed.update({"torch": "2.13.0", "tensorflow": "2.21.0"})
    assert [found.name for found in find_frameworks({"tensorflow"})] == ["pytorch"]


def test_none_installed(installed):
    with pytest.raises(BuildError, match=r"no framework installed.*`pip install torch`"):
        find_frameworks()


def test_all_left_out(installed):
    installed["torch"] = "2.13.0"
    with pytest.raises(BuildError, match=r"PyTorch 2\.13\.0 left out by --without"):
        find_frameworks({"pytorch"})


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.1'", "12.1"),
        ("cuda: Optional[str] = None", None),
    ],
)
def test_cuda_of_pytorch_is_read_from_its_record(tmp_path, line, cuda):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(
        f"__all__ = ['cuda', 'hip']\n__version__ = '2.13.0'\n{line}\nhip = '6.0'\n"
    )
    assert Framework("pytorch", "2.13.0", tmp_path).cuda == cuda


def test_tensorflow_for_cpus_has_no_cuda(tmp_path):
    file = tmp_path / "tensorflow" / "python" / "platform" / "build_info.py"
    file.parent.mkdir(parents=True)
    file.write_text("build_info = OrderedDict([('is_cuda_build', False)])\n")
    assert Framework("tensorflow", "2.21.0", tmp_path).cuda is None
