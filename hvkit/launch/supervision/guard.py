"""A process above an agent, which ends what an agent leaves behind that is killed itself.

The two are in different process groups, so that a launcher which kills the one does not kill the
other: an agent whose guard has gone ends its command.
"""

import contextlib
import os
import select
import signal

from hvkit.launch.supervision.processes import adopt_orphans, end_descendants, reap_adopted

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals of a launcher that reach the agent."""


def go_below_guard() -> int:
    """Go on in a child of this process, which itself becomes the child's guard: its process id."""
    guard, launcher = os.getpid(), os.getppid()
    adopt_orphans()
    agent = os.fork()
    if agent == 0:
        os.setpgid(0, 0)
        return guard
    os._exit(_guarded(agent, launcher))


def _guarded(agent: int, launcher: int) -> int:
    """Wait for the agent's end; its exit status."""

    def tell(number: int, _: object = None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, number)

    for number in PASSED_ON:
        signal.signal(number, tell)
    watched = os.pidfd_open(agent)
    while not select.select([watched], [], [], 0.2)[0]:
        reap_adopted(agent)
        if os.getppid() != launcher:
            tell(signal.SIGTERM)
            launcher = os.getppid()
    status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    end_descendants()
    return status if status >= 0 else 128 - status
