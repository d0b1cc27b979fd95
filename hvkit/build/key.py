"""The key of a built wheel: everything that changes the binary."""

import hashlib
import json
import os
import platform
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvkit.build import edits
from hvkit.build.environment import run_time_paths, user_build_options
from hvkit.build.frameworks import NAMES
from hvkit.build.horovod_edits import EDITS
from hvkit.build.source import VERSION
from hvkit.build.toolchain import Toolchain


@dataclass(frozen=True)
class Key:
    """What a wheel was built from, by name, in a form that people can read."""

    ingredients: Mapping[str, str]

    @property
    def digest(self) -> str:
        """A short name of all the ingredients."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @property
    def version(self) -> str:
        """The version of the wheel: Horovod's, with the digest as its local part.

        An installed Horovod thus says which build it is.
        """
        return f"{VERSION}+{self.local_version}"

    @property
    def local_version(self) -> str:
        """The local part of the version."""
        return f"hvkit{self.digest}"

    @property
    def text(self) -> str:
        """The ingredients as JSON."""
        return json.dumps(dict(self.ingredients), indent=2) + "\n"


def key_of(toolchain: Toolchain, environ: Mapping[str, str] = os.environ) -> Key:
    """The key of the wheel that this toolchain builds."""
    mpi, compiler = toolchain.mpi, toolchain.compiler
    return Key(
        {
            "horovod": VERSION,
            "edits": edits.digest(EDITS),
            "python": str(sysconfig.get_config_var("SOABI")),
            "platform": sysconfig.get_platform(),
            "libc": " ".join(platform.libc_ver()),
            "cpu": " ".join(cpu_features()),
            **{name: _version(toolchain, name) for name in NAMES},
            "mpi": f"{mpi.flavour} {mpi.version}",
            "compiler": " ".join([compiler.version.partition("\n")[0], *compiler.command[1:]]),
            "gpu": f"NCCL, CUDA {toolchain.cuda.version}" if toolchain.cuda else "none",
            "run-time paths": ":".join(run_time_paths(toolchain, environ)),
            **user_build_options(environ),
        }
    )


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Which of the instruction sets that Horovod's build picks by itself this CPU has."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return []
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return sorted({"avx", "f16c", "fma"} & set(flags[1].split() if flags else ()))


def _version(toolchain: Toolchain, name: str) -> str:
    framework = toolchain.framework(name)
    return framework.version if framework else "none"
