"""Training jobs of Amazon SageMaker, which starts the same command on every host of a job.

So ``hvkit run``, or a script with ``hvkit.launch``, runs on every host. On the first it starts the
ranks, as soon as it can log in to the others. On each other host it only waits until the first
host's container has ended: SageMaker stops a container when its command ends.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence

from hvkit.errors import LaunchError
from hvkit.launching.allocation import SAGEMAKER, sagemaker_job, sagemaker_resources
from hvkit.launching.hosts import Host
from hvkit.launching.ssh import explain_ssh, run_on_hosts, ssh_command
from hvkit.log import logger

CURRENT_HOST = "SM_CURRENT_HOST"

# Seconds for the containers of a job to start, which they do at different times.
_STARTED = 600.0
# Seconds without a login, after one, that mean the end of the first host's container.
_ENDED = 30.0
_CONNECT = 10.0
_BETWEEN_TRIES = 2.0
# Prints this line at login, after what the shell's start files may print; ends with its input.
_HERE = "hvkit is logged in"
_SESSION = ("sh", "-c", f"echo {_HERE}; exec cat")
# A host that has vanished is noticed after three of these intervals, in seconds.
_ALIVE = ("-o", "ServerAliveInterval=10")


def are_of_a_job(hosts: Sequence[Host]) -> bool:
    """Whether all of these hosts belong to the SageMaker job that this process runs in."""
    try:
        job = sagemaker_job(os.environ)
    except LaunchError:  # the list cannot be read, so the user has named the hosts
        return False
    return job is not None and {h.name for h in hosts} <= {h.name for h in job.hosts}


def starts_ranks(hosts: Sequence[Host]) -> bool:
    """Whether this host, of a job whose hosts these are, starts the ranks: the first one does."""
    here = os.environ.get(CURRENT_HOST)
    if here is None:  # without SageMaker's training toolkit
        here = (sagemaker_resources() or {}).get("current_host")
    if not isinstance(here, str) or not are_of_a_job([Host(here)]):
        job = sagemaker_job(os.environ)
        listed = ", ".join(host.name for host in (job.hosts if job else hosts))
        raise LaunchError(
            f"{CURRENT_HOST} must be one of the job's hosts ({listed}), got {here!r}: name the "
            "hosts with a hostfile or -H instead"
        )
    return here == hosts[0].name


def leave_to_first(system: str | None, hosts: Sequence[Host]) -> bool:
    """If another host of a SageMaker job starts the ranks, wait until it has ended; whether so."""
    if system != SAGEMAKER or starts_ranks(hosts):
        return False
    follow(hosts[0])
    return True


def wait_for_hosts(hosts: Sequence[Host]) -> None:
    """Wait until all hosts let this one log in, for ten minutes at most.

    ``hvkit.launching.host_checks.preflight`` reports those that still do not.
    """
    deadline = time.monotonic() + _STARTED
    said = False
    while time.monotonic() < deadline:
        late = [each for each in run_on_hosts(hosts, ["true"], _CONNECT) if each.problem]
        if not late:
            return
        if not said:
            said = True
            names = ", ".join(answer.host.name for answer in late)
            logger.info("waits for %s: %s", names, late[0].problem)
        time.sleep(_BETWEEN_TRIES)


def follow(first: Host) -> None:
    """Wait until the container of the host that starts the ranks has ended.

    Signals do not end this process: ``hvkit run`` on the first host gets SageMaker's signals, too,
    and ends the ranks here.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logger.info("%s starts the ranks; this host waits until it has ended", first.name)
    seen = False
    deadline = time.monotonic() + _STARTED
    while (problem := _session(first)) is None or time.monotonic() < deadline:
        if problem is None:
            seen, deadline = True, time.monotonic() + _ENDED
        time.sleep(_BETWEEN_TRIES)
    if not seen:
        raise LaunchError(f"{first.name}, which starts the ranks, cannot be reached: {problem}")


def _session(host: Host) -> str | None:
    """Stay logged in on a host until it ends; return why there was no login, else ``None``."""
    ssh, *words = ssh_command(host, _SESSION, 2 * _CONNECT)
    logged_in = False
    with tempfile.TemporaryFile("w+", errors="replace") as problems:
        try:
            process = subprocess.Popen(
                [ssh, *_ALIVE, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=problems,
                text=True,
                errors="replace",
            )
        except OSError as error:
            return f"{ssh} cannot be started here ({error.strerror}): install openssh-client"
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                logged_in |= line.strip() == _HERE
        problems.seek(0)
        stderr = problems.read()
    if logged_in:
        return None
    return explain_ssh(host, process.returncode, stderr) or "its shell runs no commands"
