"""LSF: the file ``LSB_DJOB_HOSTFILE`` has a line for each slot; else ``LSB_MCPU_HOSTS`` is read.

On systems with IBM's cluster manager, where ``CSM_ALLOCATION_ID`` is set, the job script runs on
a launch node, which takes no ranks: it comes first, with a single slot, and is left out.
"""

from collections.abc import Mapping

from hvkit.errors import HostfileError
from hvkit.launch.allocation.counting import Found, checked, hosts_of_file, wrong
from hvkit.launch.hosts import Host, count

NAME = "LSF"

_FILE = "LSB_DJOB_HOSTFILE"
_PAIRS = "LSB_MCPU_HOSTS"
_LAUNCH_NODE = "CSM_ALLOCATION_ID"


def hosts(environ: Mapping[str, str]) -> Found | None:
    """The hosts of the job and the variable that names them; ``None`` outside of LSF.

    Raises:
        LaunchError: a variable, or the file that it names, is not what LSF writes.
    """
    if _FILE in environ:
        source, found = _FILE, hosts_of_file(environ, _FILE)
    elif _PAIRS in environ:
        source, found = _PAIRS, _pairs(environ[_PAIRS])
    else:
        return None
    if _LAUNCH_NODE in environ and len(found) > 1 and found[0].slots == 1:
        found = found[1:]
    return source, found


def _pairs(value: str) -> tuple[Host, ...]:
    """The hosts of ``hostA 5 hostB 2``."""
    words = value.split()
    if not words or len(words) % 2:
        raise wrong(_PAIRS, value, "must be pairs of host and slots such as `hostA 5 hostB 2`")
    slots: dict[str, int] = {}
    for name, number in zip(words[::2], words[1::2], strict=True):
        checked(name, _PAIRS, value)
        try:
            slots[name] = slots.get(name, 0) + count(number, "slots")
        except HostfileError as error:
            raise wrong(_PAIRS, value, f"is wrong ({error})") from None
    return tuple(Host(name, slots=number) for name, number in slots.items())
