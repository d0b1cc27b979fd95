import subprocess
import sys

import hvkit


def test_the_public_names_are_these_and_no_others():
    public = {name for name in vars(hvkit) if not name.startswith("_")}
    modules = {name for name in public if type(getattr(hvkit, name)).__name__ == "module"}
    assert public - modules == set(hvkit.__all__) - modules
    assert callable(hvkit.distribute)


def test_importing_hvkit_imports_no_framework():
    code = (
        "import hvkit, sys; print({'torch', 'tensorflow', 'keras', 'horovod'} & sys.modules.keys())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout == "set()\n"


def test_every_public_function_has_a_docstring():
    for name in hvkit.__all__:
        assert getattr(hvkit, name).__doc__, name
