"""What Horovod would be built with."""

import re
from collections.abc import Sequence

from hvkit.build.cuda import DEFAULT_HOME
from hvkit.host.commands import run


def compilers() -> dict[str, str | None]:
    """Versions of the C++ compiler, CMake and NVIDIA's compiler; ``None`` for what is not there."""
    return {
        "c++": _first_version(["c++"], ["g++"], ["clang++"]),
        "cmake": _first_version(["cmake"]),
        "nvcc": _first_version(["nvcc"], [f"{DEFAULT_HOME}/bin/nvcc"]),
    }


def _first_version(*commands: Sequence[str]) -> str | None:
    for command in commands:
        said = run([*command, "--version"])
        if said and said.status == 0:
            # Distributions put their own version in brackets before the compiler's.
            text = re.sub(r"\(.*?\)", "", said.text)
            match = re.search(r"(?:release|version) (\d[\d.]*)|\b(\d+\.\d+[\d.]*)", text)
            return match[1] or match[2] if match else "?"
    return None
