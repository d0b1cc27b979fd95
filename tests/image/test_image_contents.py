"""What is in the image, and what must not be."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from pip_settings import pip_settings

# Text files are shorter; libraries of frameworks are longer and name no index.
_BYTES_READ = 1024**2
_KEY_NAMES = ("ssh_host_*", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "authorized_keys*")
_PRIVATE_KEY = re.compile(rb"\s*-----BEGIN [A-Z ]*PRIVATE KEY-----")
_COMPILERS = (
    *("gcc", "g++", "cc", "c++", "cpp", "*-gcc*", "*-g++*", "clang*", "nvcc", "as", "ld"),
    *("make", "cmake"),
)


@pytest.fixture(scope="module")
def files(image):
    return image.files()


def test_starts_as_a_user_who_is_not_root(image):
    uid, gid = image.settings["User"].split(":")
    entry = next(
        line
        for line in (image.root / "etc/passwd").read_text().splitlines()
        if line.startswith("hvkit:")
    )
    assert entry.split(":")[2:4] == [uid, gid] == ["1000", "1000"]


def test_the_users_home_is_the_users_and_closed_where_the_key_goes(image):
    home = image.root / "home/hvkit"
    assert {path.owner() for path in home.rglob("*")} <= {home.owner()}
    assert home.stat().st_uid == 1000
    assert (home / ".ssh").stat().st_mode & 0o777 == 0o700
    assert list((home / ".ssh").iterdir()) == []


def test_programs_belong_to_root(image, files):
    programs = image.root / "opt/venv"
    changed = [path for path in files if path.is_relative_to(programs) and path.stat().st_uid]
    assert changed == []


def test_no_keys(image, files):
    named = [path for path in files if any(fnmatch(path.name, each) for each in _KEY_NAMES)]
    assert [image.inside(path) for path in named] == []
    private = [path for path in files if _PRIVATE_KEY.match(_start_of(path, 100))]
    assert [image.inside(path) for path in private] == []


def test_no_trace_of_the_settings_of_the_package_index(image, files):
    places = [place.encode() for place in pip_settings().places]
    assert [place for place in places if place.decode() in str(image.config)] == []
    naming = [path for path in files if any(place in _start_of(path) for place in places)]
    assert [image.inside(path) for path in naming] == []
    assert [name for name in image.environ if name.startswith("PIP_")] == []
    assert "PIP_" not in str(image.settings)
    settings = [path for path in files if path.name in ("pip.conf", ".netrc", ".pypirc")]
    assert [image.inside(path) for path in settings] == []
    assert not any((image.root / "run/secrets").glob("*"))


def test_no_compilers(image):
    folders = [image.root / folder.lstrip("/") for folder in image.environ["PATH"].split(":")]
    programs = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}
    assert "python3" in programs
    compilers = [name for name in programs if any(fnmatch(name, each) for each in _COMPILERS)]
    assert compilers == []


def test_no_caches_and_lists_of_packages(image, files):
    left = ("root/.cache", "home/hvkit/.cache", "var/lib/apt/lists", "var/cache/apt/archives")
    found = [path for path in files if any(path.is_relative_to(image.root / one) for one in left)]
    assert {path.name for path in found} <= {"lock"}
    assert not any((image.root / "tmp").iterdir())
    assert not (image.root / "src").exists()


def test_recipes_and_hostfiles_are_those_of_the_checkout(image):
    checkout = Path(__file__).parents[2]
    for folder in ("recipes", "hostfiles"):
        assert _texts(image.root / "home/hvkit" / folder) == _texts(checkout / folder)


def _texts(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_text() for path in paths if path.is_file()}


def test_docker_knows_how_to_ask_for_its_health(image):
    (program,) = image.settings["Healthcheck"]["Test"][1:]
    assert (image.root / "usr/local/bin" / program).stat().st_mode & 0o111 == 0o111


def _start_of(path: Path, length: int = _BYTES_READ) -> bytes:
    with path.open("rb") as file:
        return file.read(length)
