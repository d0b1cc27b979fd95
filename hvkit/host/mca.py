"""Open MPI's settings about networks: has the user or the site made them?

Open MPI reads its settings (MCA parameters) from the environment, the user's file and the site's
file. A parameter ``..._if_include`` excludes its ``..._if_exclude``: if both are set, wherever,
every MPI program ends with an error.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvkit.errors import LaunchError

# Distributions install further MPIs below these, in addition to the one in /usr/bin.
_LIBS = ("lib", "lib64")


@dataclass(frozen=True)
class Setting:
    """Open MPI's parameters for one purpose.

    Attributes:
        option: the launcher's option, without its value.
        names: the parameters' names without their ends.
        ends: of these names.
        prefix: the prefix of the environment variables.
        user_file: the user's file, relative to the home folder.
        site_file: the site's file, relative to the site's folder.
    """

    option: tuple[str, str]
    names: tuple[str, ...]
    ends: tuple[str, ...] = ("include", "exclude")
    prefix: str = "OMPI_MCA_"
    user_file: str = ".openmpi/mca-params.conf"
    site_file: str = "openmpi-mca-params.conf"

    def parameters(self) -> tuple[str, ...]:
        """The full names of the parameters."""
        return tuple(f"{name}{end}" for name in self.names for end in self.ends)


RANKS = Setting(("--mca", "btl_tcp_if_include"), ("btl_tcp_if_",))
"""The interfaces for the connections between ranks."""

TRANSPORTS = Setting(("--mca", "btl"), ("btl",), ends=("",))
"""The transports for messages between ranks."""

_DAEMONS_4 = Setting(("--mca", "oob_tcp_if_include"), ("oob_tcp_if_",))
_DAEMONS_5 = Setting(
    ("--prtemca", "prte_if_include"),
    ("prte_if_", "oob_tcp_if_"),
    prefix="PRTE_MCA_",
    user_file=".prte/mca-params.conf",
    site_file="prte-mca-params.conf",
)


WITHOUT_TOOLS = "PRTE_MCA_pmix_tool_support", "0"
"""The variable, and its value, that turns off mpirun's support for debuggers.

For debuggers, mpirun makes a file in a folder named after its process id, and ends with an error if
that exists already, left by a killed mpirun that had the same id.
"""


def daemons(major: int) -> Setting:
    """The interfaces between the launcher and its daemons, for this major version."""
    return _DAEMONS_5 if major >= 5 else _DAEMONS_4


def without_interfaces(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that choose Open MPI's interfaces."""
    settings = (RANKS, _DAEMONS_4, _DAEMONS_5)
    names = {f"{one.prefix}{parameter}" for one in settings for parameter in one.parameters()}
    return {name: value for name, value in environ.items() if name not in names}


def where_set(setting: Setting, environ: Mapping[str, str], mpirun: str | None) -> str | None:
    """The variable or file that makes a setting, in words; ``None`` if nothing does.

    Args:
        setting: the setting.
        environ: the environment that Open MPI gets.
        mpirun: Open MPI's launcher, which leads to the site's files; ``None`` to skip those.
    """
    for parameter in setting.parameters():
        if (variable := f"{setting.prefix}{parameter}") in environ:
            return variable
    in_files = _in_files(setting, environ, mpirun)
    return next((f"{name} in {file}" for name, file in in_files), None)


def refuse_exclusion(setting: Setting, environ: Mapping[str, str], mpirun: str | None) -> None:
    """Refuse ``--interfaces`` if a file excludes interfaces.

    Raises:
        LaunchError: a file does.
    """
    for name, file in _in_files(setting, environ, mpirun):
        if name.endswith("exclude"):
            raise LaunchError(
                f"{file} sets {name}, which Open MPI does not accept together with --interfaces: "
                "delete that line, or omit --interfaces to use the line"
            )


def _in_files(
    setting: Setting, environ: Mapping[str, str], mpirun: str | None
) -> Iterator[tuple[str, Path]]:
    folders = [] if mpirun is None else _site_folders(Path(os.path.realpath(mpirun)))
    files = [folder / setting.site_file for folder in folders]
    if home := environ.get("HOME"):
        files.insert(0, Path(home, setting.user_file))
    for file in files:
        try:
            text = file.read_text(errors="replace")
        except OSError:
            # Open MPI ignores such a file, too.
            continue
        for line in text.splitlines():
            name, sign, _ = line.partition("=")
            if sign and name.strip() in setting.parameters():
                yield name.strip(), file


def _site_folders(mpirun: Path) -> list[Path]:
    prefix = mpirun.parent.parent
    # Distributions keep settings out of /usr: /etc/openmpi, /etc/openmpi-x86_64.
    packaged = prefix == Path("/usr") or prefix.parts[:3] in {("/", "usr", lib) for lib in _LIBS}
    return [prefix / "etc", *(sorted(Path("/etc").glob("openmpi*")) if packaged else ())]
