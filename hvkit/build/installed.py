"""The Horovod of this Python: which build it is, putting a wheel in, and whether it works."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from hvkit.build import failures
from hvkit.build.process import run_pip
from hvkit.build.toolchain import Toolchain
from hvkit.errors import BuildError

_CHECK = """
import importlib, json, sys
built = {}
for name in sys.argv[1:]:
    hvd = importlib.import_module("horovod." + name)
    built[name] = [engine for engine in ("mpi", "nccl") if getattr(hvd, engine + "_built")()]
print("hvkit:" + json.dumps(built))
"""


def installed_version() -> str | None:
    """The version of the Horovod that is installed, with its local part."""
    try:
        return metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return None


def install(wheel: Path) -> None:
    """Install a wheel in the place of any other Horovod, then what it needs at run time."""
    doing = f"installing {wheel.name} failed"
    run_pip(["install", "--no-deps", "--force-reinstall", str(wheel)], doing)
    run_pip(["install", str(wheel)], doing)


def check(toolchain: Toolchain) -> None:
    """Import Horovod in a process of its own, for each framework that it was built for.

    Raises:
        BuildError: an import fails, or Horovod lacks MPI, or NCCL in a build for it.
    """
    modules = [framework.module for framework in toolchain.frameworks]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CHECK, *modules],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        raise failures.explain(done.stdout, "Horovod was installed but cannot be imported")
    answer = next(line for line in done.stdout.splitlines() if line.startswith("hvkit:"))
    for module, engines in json.loads(answer.removeprefix("hvkit:")).items():
        missing = {"mpi", *(["nccl"] if toolchain.cuda else [])} - set(engines)
        if missing:
            raise BuildError(
                f"horovod.{module} was built without {', '.join(sorted(missing))}. "
                "Rebuild it with `hvkit install-horovod --force` and read the log"
            )
