"""What the user or the site has set about Open MPI's network interfaces.

Open MPI takes its settings (MCA parameters) from the environment, the user's file and the site's.
Of each ``..._if_include`` and ``..._if_exclude`` exclude each other: one set anywhere and the other
set elsewhere ends every program.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvkit.errors import LaunchError

# Where distributions have an MPI besides /usr/bin.
_LIBS = ("lib", "lib64")


@dataclass(frozen=True)
class InterfaceSetting:
    """Which interfaces Open MPI uses for one purpose.

    Attributes:
        option: the launcher's option that names them, but for its value.
        prefix: what the environment variables begin with.
        names: what the parameters are called, all but ``include`` and ``exclude`` at their ends.
        user_file: below the user's home.
        site_file: in the site's folder.
    """

    option: tuple[str, str]
    prefix: str
    names: tuple[str, ...]
    user_file: str
    site_file: str

    def parameters(self) -> tuple[str, ...]:
        """What the parameters are called."""
        return tuple(f"{name}{end}" for name in self.names for end in ("include", "exclude"))


RANKS = InterfaceSetting(
    ("--mca", "btl_tcp_if_include"),
    "OMPI_MCA_",
    ("btl_tcp_if_",),
    ".openmpi/mca-params.conf",
    "openmpi-mca-params.conf",
)
"""Between ranks."""

_DAEMONS_4 = InterfaceSetting(
    ("--mca", "oob_tcp_if_include"),
    "OMPI_MCA_",
    ("oob_tcp_if_",),
    ".openmpi/mca-params.conf",
    "openmpi-mca-params.conf",
)
_DAEMONS_5 = InterfaceSetting(
    ("--prtemca", "prte_if_include"),
    "PRTE_MCA_",
    ("prte_if_", "oob_tcp_if_"),
    ".prte/mca-params.conf",
    "prte-mca-params.conf",
)


def daemons(major: int) -> InterfaceSetting:
    """Between the launcher and its daemons, in this major version."""
    return _DAEMONS_5 if major >= 5 else _DAEMONS_4


def without_interfaces(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what sets Open MPI's interfaces."""
    settings = (RANKS, _DAEMONS_4, _DAEMONS_5)
    names = {f"{one.prefix}{parameter}" for one in settings for parameter in one.parameters()}
    return {name: value for name, value in environ.items() if name not in names}


def place_set(
    setting: InterfaceSetting, environ: Mapping[str, str], mpirun: str | None
) -> str | None:
    """Where the setting has been made, for people; ``None`` if it has not been made.

    Args:
        setting: which one.
        environ: the environment that Open MPI gets.
        mpirun: its launcher, by which its files are found; ``None`` to look at no site's.
    """
    for parameter in setting.parameters():
        if (variable := f"{setting.prefix}{parameter}") in environ:
            return variable
    in_files = _in_files(setting, environ, mpirun)
    return next((f"{name} in {file}" for name, file in in_files), None)


def refuse_exclusion(
    setting: InterfaceSetting, environ: Mapping[str, str], mpirun: str | None
) -> None:
    """Take no interfaces from the command line where a file has others excluded.

    Raises:
        LaunchError: a file does.
    """
    for name, file in _in_files(setting, environ, mpirun):
        if name.endswith("exclude"):
            raise LaunchError(
                f"{file} sets {name}, which Open MPI does not take together with --interfaces: "
                "delete that line, or leave --interfaces away and the line counts"
            )


def _in_files(
    setting: InterfaceSetting, environ: Mapping[str, str], mpirun: str | None
) -> Iterator[tuple[str, Path]]:
    """The parameters that files set, each with its file."""
    folders = [] if mpirun is None else _site_folders(Path(os.path.realpath(mpirun)))
    files = [folder / setting.site_file for folder in folders]
    if home := environ.get("HOME"):
        files.insert(0, Path(home, setting.user_file))
    for file in files:
        try:
            text = file.read_text(errors="replace")
        except OSError:
            # Open MPI goes on without it, too.
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
