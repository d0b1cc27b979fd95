import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import MORE
from scripts import run_script

import hvkit
from hvkit import strategies
from hvkit.strategies.strategy import strategies_in


def test_type_checkers_see_the_public_names_and_no_others():
    code = ast.parse(Path(hvkit.__file__).read_text())
    (block,) = (node for node in code.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    imported = {alias.asname or alias.name for line in block.body for alias in line.names}
    assert imported - {"*"} | {*strategies_in(strategies)} == set(hvkit.__all__)


def test_dir_names_the_public_names_and_others_are_unknown():
    assert {name for name in dir(hvkit) if not name.startswith("_")} == set(hvkit.__all__)
    with pytest.raises(AttributeError, match="module 'hvkit' has no attribute 'allgahter'"):
        hvkit.allgahter  # noqa: B018


def test_no_module_has_the_name_of_a_public_function_or_class():
    """Importing it would put the module in the place of the function."""
    modules = {module.name for module in pkgutil.iter_modules(hvkit.__path__)}
    assert modules & set(hvkit.__all__) == set()


def test_importing_hvkit_imports_no_framework_and_nothing_that_takes_time():
    code = """
import hvkit, sys
print({"numpy", "psutil", "rich", "yaml"} & sys.modules.keys())
hvkit.distribute, hvkit.Checkpoint, hvkit.shard
print({"torch", "tensorflow", "keras", "horovod"} & sys.modules.keys())
"""
    assert run_script(code).stdout == "set()\nset()\n"


def test_pytorch_without_a_mesh_imports_nothing_of_meshes():
    code = """
import sys
import hvkit.checkpoint.pytorch, hvkit.frameworks.pytorch.port, hvkit.monitor.pytorch
print([name for name in sys.modules if "model_parallel" in name])
"""
    assert run_script(code).stdout == "[]\n"


def test_every_public_function_has_a_docstring():
    for name in hvkit.__all__:
        assert getattr(hvkit, name).__doc__, name


@MORE
def test_type_checkers_see_what_make_has_installed(tmp_path):
    (tmp_path / "train.py").write_text("import hvkit\nreveal_type(hvkit.shard([1]))\n")
    # PyTorch takes mypy half a minute.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert 'Revealed type is "list[int]"' in checked.stdout, checked.stdout
