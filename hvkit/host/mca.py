"""Open MPI's settings about networks: has the user or the site made them?

Open MPI reads its settings (MCA parameters) from the environment, the user's file and the site's
file. A parameter ``..._if_include`` excludes its ``..._if_exclude``: if both are set, wherever,
every MPI program ends with an error.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from hvkit.errors import LaunchError


@dataclass(frozen=True)
class Setting:
    """Open MPI's parameters for one purpose."""

    option: tuple[str, str]  # of the launcher, without its value
    parameters: tuple[str, ...]
    prefix: str = "OMPI_MCA_"  # of the environment variables
    user_file: str = ".openmpi/mca-params.conf"  # below the home folder
    site_file: str = "openmpi-mca-params.conf"  # below the site's


# The interfaces for the connections between ranks.
RANKS = Setting(("--mca", "btl_tcp_if_include"), ("btl_tcp_if_include", "btl_tcp_if_exclude"))

TRANSPORTS = Setting(("--mca", "btl"), ("btl",))  # the transports for messages between ranks

# The interfaces between the launcher of Open MPI 4 and its daemons.
DAEMONS_4 = Setting(("--mca", "oob_tcp_if_include"), ("oob_tcp_if_include", "oob_tcp_if_exclude"))

# The same of Open MPI 5 and newer.
DAEMONS_5 = Setting(
    ("--prtemca", "prte_if_include"),
    ("prte_if_include", "prte_if_exclude", *DAEMONS_4.parameters),
    prefix="PRTE_MCA_",
    user_file=".prte/mca-params.conf",
    site_file="prte-mca-params.conf",
)

# The variable, and its value, that turns off mpirun's support for debuggers.
#
# For debuggers, mpirun makes a file in a folder named after its process id, and ends with an error
# if that exists already, left by a killed mpirun that had the same id.
WITHOUT_TOOLS = "PRTE_MCA_pmix_tool_support", "0"


def without_interfaces(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that choose Open MPI's interfaces."""
    settings = (RANKS, DAEMONS_4, DAEMONS_5)
    names = {one.prefix + parameter for one in settings for parameter in one.parameters}
    return {name: value for name, value in environ.items() if name not in names}


def where_set(setting: Setting, environ: Mapping[str, str], mpirun: str | None) -> str | None:
    """The variable or file that makes a setting, in words; ``None`` if nothing does."""
    variables = (setting.prefix + parameter for parameter in setting.parameters)
    in_files = (f"{name} in {file}" for name, file in _in_files(setting, environ, mpirun))
    return next(chain(filter(environ.__contains__, variables), in_files), None)


def refuse_exclusion(setting: Setting, environ: Mapping[str, str], mpirun: str | None) -> None:
    """Refuse ``--interfaces`` if a file excludes interfaces."""
    for name, file in _in_files(setting, environ, mpirun):
        if name.endswith("exclude"):
            raise LaunchError(
                f"{file} sets {name}, which Open MPI does not accept together with --interfaces: "
                "delete that line, or omit --interfaces to use the line"
            )


def _in_files(
    setting: Setting, environ: Mapping[str, str], mpirun: str | None
) -> Iterator[tuple[str, Path]]:
    files = [Path(home, setting.user_file)] if (home := environ.get("HOME")) else []
    if mpirun is not None:
        folders = _site_folders(Path(os.path.realpath(mpirun)))
        files += [folder / setting.site_file for folder in folders]
    for file in files:
        try:
            text = file.read_text(errors="replace")
        except OSError:  # Open MPI ignores such a file, too
            continue
        for line in text.splitlines():
            name, sign, _ = line.partition("=")
            if sign and name.strip() in setting.parameters:
                yield name.strip(), file


def _site_folders(mpirun: Path) -> list[Path]:
    prefix = mpirun.parent.parent
    # Distributions keep settings out of /usr: /etc/openmpi, /etc/openmpi-x86_64. They install
    # further MPIs below /usr/lib and /usr/lib64.
    packaged = f"{prefix}/".startswith(("/usr/lib/", "/usr/lib64/")) or prefix == Path("/usr")
    return [prefix / "etc", *(sorted(Path("/etc").glob("openmpi*")) if packaged else ())]
