import sys

import pytest

from hvkit import engines


@pytest.mark.parametrize("libraries", [[], ["torch"], ["tensorflow"], ["torch", "tensorflow"]])
def test_the_frameworks_that_horovod_was_built_for_are_those_with_a_library(
    libraries, tmp_path, monkeypatch
):
    package = tmp_path / "horovod"
    for framework in ("torch", "tensorflow"):
        (package / framework).mkdir(parents=True)
        if framework in libraries:
            (package / framework / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so").touch()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    assert engines.built_for() == libraries
