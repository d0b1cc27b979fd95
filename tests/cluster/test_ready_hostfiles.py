"""The hostfiles that come with hvkit put as many ranks on their hosts as they say, as they are."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cases import cases
from rig import Rig

from hvkit.launching.hosts import read_hostfile

_READY = sorted((Path(__file__).parents[2] / "hostfiles").iterdir())
_BIN = Path(sys.executable).parent
_HVKIT = [sys.executable, "-m", "hvkit", "run", "--hostfile"]
_LAUNCHERS = {
    "mpirun": [f"{_BIN}/mpirun", "--bind-to", "none", "--hostfile"],
    "horovodrun": [f"{_BIN}/horovodrun", "--gloo", "-np", "{ranks}", "--hostfile"],
    "hvkit run": _HVKIT,
}


@pytest.mark.parametrize(
    ("file", "launcher"),
    cases(
        # horovodrun takes long to start, and reads all files alike.
        [(file, each) for file in _READY for each in _LAUNCHERS if each != "horovodrun"]
        + [(file, "horovodrun") for file in _READY if file.name == "uneven_pair"],
        first=[(file, "hvkit run") for file in _READY],
        name=lambda case: f"{case[0].name}-{case[1]}",
    ),
)
def test_a_ready_hostfile_starts_its_ranks(
    rig: Callable[[Sequence[str]], Rig], file: Path, launcher: str
) -> None:
    expected = {host.name: host.slots or 0 for host in read_hostfile(file)}
    first = next(iter(expected))
    here = "node1" if first == "localhost" else first
    hosts = rig([here, *(name for name in expected if name != first)])
    words = [word.format(ranks=sum(expected.values())) for word in _LAUNCHERS[launcher]]
    # A line in one piece, which no other rank gets into.
    say = "import os, socket; os.write(1, f'rank of {socket.gethostname()}\\n'.encode())"
    done = hosts.host(here).run([*words, str(file), sys.executable, "-c", say], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [
        line.rpartition("rank of ")[2] for line in done.stdout.splitlines() if "rank of" in line
    ]
    assert Counter(names) == {
        here if name == "localhost" else name: slots for name, slots in expected.items()
    }
