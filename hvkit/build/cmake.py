"""A CMake that can configure Horovod: at least 3.13, and below 4."""

import os
import re
import shutil
import tempfile
from pathlib import Path

from hvkit.build.process import output_of, run_pip
from hvkit.host.cache import cache_dir

# The gloo inside Horovod declares a minimum version that CMake 4 refuses.
_REQUIREMENT = "cmake>=3.13,<4"


def find_cmake() -> str:
    """The command: from HOROVOD_CMAKE, from PATH, or fetched once with pip into the cache.

    Raises:
        BuildError: there is none and pip cannot fetch one.
    """
    if chosen := os.environ.get("HOROVOD_CMAKE"):
        return chosen
    installed = shutil.which("cmake")
    if installed and is_usable(installed):
        return installed
    fetched = cache_dir() / "cmake"
    if not is_usable(_command_in(fetched)):
        _fetch(fetched)
    return _command_in(fetched)


def is_usable(command: str) -> bool:
    """Whether ``command`` runs and is a CMake of a version that Horovod can use."""
    match = re.search(r"cmake version (\d+)\.(\d+)", output_of([command, "--version"]) or "")
    return match is not None and (3, 13) <= (int(match[1]), int(match[2])) < (4, 0)


def _fetch(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / "cmake"
        run_pip(
            ["install", "--target", str(fresh), "--only-binary", ":all:", _REQUIREMENT],
            doing=f"there is no usable CMake, and installing {_REQUIREMENT!r} failed",
        )
        # Another build may have brought it meanwhile, and be using it.
        if not is_usable(_command_in(target)):
            shutil.rmtree(target, ignore_errors=True)
            os.replace(fresh, target)


def _command_in(folder: Path) -> str:
    return str(folder / "cmake" / "data" / "bin" / "cmake")
