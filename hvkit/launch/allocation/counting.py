"""What the batch systems' modules share: counting lines, and errors that name the variable."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvkit.errors import HostfileError, LaunchError
from hvkit.launch.hosts import Host, host_name, shown

Found = tuple[str, tuple[Host, ...]]


def wrong(variable: str, value: str, why: str) -> LaunchError:
    """The error for a variable that is not what its batch system writes."""
    return LaunchError(
        f"{variable} {why}, got {shown(value)}: name the hosts with a hostfile or -H instead"
    )


def checked(name: str, variable: str, value: str) -> str:
    """A host's name from ``variable``.

    Raises:
        LaunchError: it is none.
    """
    try:
        return host_name(name)
    except HostfileError as error:
        raise wrong(variable, value, f"names a host wrongly ({error})") from None


def counted(names: Iterable[str]) -> tuple[Host, ...]:
    """Each host once, in the order of first mention, with a slot for each mention."""
    return tuple(Host(name, slots=times) for name, times in Counter(names).items())


def hosts_of_file(environ: Mapping[str, str], variable: str) -> tuple[Host, ...]:
    """The hosts of the file that ``variable`` names, which has one line for each slot.

    Raises:
        LaunchError: it cannot be read, or a line is no host.
    """
    path = environ[variable]
    try:
        lines = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise wrong(variable, path, f"names a file that cannot be read ({reason})") from None
    if not lines:
        raise wrong(variable, path, "names a file without hosts")
    return counted(checked(line, variable, path) for line in lines)
