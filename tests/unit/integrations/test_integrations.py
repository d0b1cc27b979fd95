"""What follows the import of a library."""

import importlib
import sys
import types
import zipfile

import pytest

import hvkit
from hvkit import integrations
from hvkit.integrations.ranks import OLDEST, check_use


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
def test_a_module_is_followed_once_whoever_finds_it(packed, tmp_path, monkeypatch):
    seen, name = [], f"library_{packed}".lower()
    monkeypatch.setattr(integrations, "_follow", lambda module: seen.append(module.answer))
    monkeypatch.setitem(integrations._AFTER, f"{name}.state", "lightning:register")
    files = {"__init__": "", "state": "answer = 42", "other": ""}
    if packed:
        with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
            for module, text in files.items():
                archive.writestr(f"{name}/{module}.py", text)
    else:
        (tmp_path / name).mkdir()
        for module, text in files.items():
            (tmp_path / name / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "all.zip" if packed else tmp_path))
    state = importlib.import_module(f"{name}.state")
    importlib.import_module(f"{name}.other")
    assert seen == [42]
    assert type(state.__loader__).__module__ != integrations.__name__


def test_hvkit_watches_once_however_often_it_is_imported():
    integrations.watch_imports()
    followers = [each for each in sys.meta_path if type(each).__name__ == "_Follower"]
    assert len(followers) == 1


def test_other_objects_have_no_distributor():
    assert integrations.distributor(object()) is None
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'optimizer'"):
        hvkit.distribute(object())


@pytest.mark.parametrize("package", OLDEST)
@pytest.mark.parametrize(("version", "fits"), [("1.0.9", False), ("10.0", True)])
def test_a_package_that_is_too_old_is_named(package, version, fits, monkeypatch):
    found = types.ModuleType(package)
    found.__version__ = version
    monkeypatch.setitem(sys.modules, package, found)
    if fits:
        check_use(package, {"accumulate": 2})
        with pytest.raises(TypeError, match="acumulate"):
            check_use(package, {"acumulate": 2})
    else:
        with pytest.raises(hvkit.HvkitError, match=f"{package} {version} is installed: upgrade it"):
            check_use(package, {})
