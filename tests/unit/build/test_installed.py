"""Whether the Horovod that was put in works is asked of a fresh Python."""

from dataclasses import replace
from pathlib import Path

import pytest

from hvkit.build import installed
from hvkit.build.cuda import Toolkit
from hvkit.build.toolchain import Toolchain
from hvkit.errors import BuildError


@pytest.fixture
def pytorch_only(toolchain: Toolchain) -> Toolchain:
    return replace(toolchain, frameworks=toolchain.frameworks[:1])


@pytest.fixture
def horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for horovod.torch; returns its file."""
    module = tmp_path / "site" / "horovod" / "torch" / "__init__.py"
    module.parent.mkdir(parents=True)
    (module.parent.parent / "__init__.py").touch()
    module.write_text("print('noise')\nmpi_built = lambda: True\nnccl_built = lambda: 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return module


def test_working_horovod(pytorch_only: Toolchain, horovod: Path) -> None:
    installed.check(pytorch_only)


def test_failed_import_is_shown(pytorch_only: Toolchain, horovod: Path) -> None:
    horovod.write_text("raise ImportError('libmpi.so.40: cannot open shared object file')")
    with pytest.raises(BuildError, match=r"(?s)cannot be imported.*libmpi\.so\.40: cannot open"):
        installed.check(pytorch_only)


def test_missing_engine_is_named(pytorch_only: Toolchain, horovod: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"horovod\.torch was built without nccl"):
        installed.check(replace(pytorch_only, cuda=Toolkit(tmp_path, "13.0")))
