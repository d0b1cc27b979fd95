"""Every host examines itself with ``hvkit doctor``; this host collects what they tell."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hvkit.launch.check.facts import Facts, facts_in
from hvkit.launch.hosts import Host
from hvkit.launch.ssh import Answer, RemoteShell, ask
from hvkit.launch.ssh_problems import last_line

# Seconds. Python starts slowly from a cold network file system.
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Examined:
    """A host and what it told.

    Attributes:
        host: the host.
        facts: what it told; ``None`` if it could not be asked.
        problem: why it could not be asked, with advice.
    """

    host: Host
    facts: Facts | None
    problem: str | None


def examine(hosts: Sequence[Host], shell: RemoteShell) -> list[Examined]:
    """Let all hosts examine themselves at once, with the Python that this process has.

    Args:
        hosts: all of them.
        shell: what starts programs there.
    """
    command = [sys.executable, "-P", "-m", "hvkit.cli", "doctor", "--json", "--no-self-test"]
    return [_examined(answer) for answer in ask(hosts, command, _TIMEOUT, shell)]


def _examined(answer: Answer) -> Examined:
    if answer.problem is not None:
        return Examined(answer.host, None, answer.problem)
    try:
        return Examined(answer.host, facts_in(answer.stdout), None)
    except ValueError as error:
        # The last line of a traceback says more than that nothing was printed.
        why = last_line(answer.stderr) or str(error)
        return Examined(
            answer.host,
            None,
            f"hvkit does not run there as it does here ({why}): every host needs the same "
            f"environment at the same path, {sys.prefix}",
        )
