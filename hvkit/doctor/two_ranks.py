"""Starts the self-test on two ranks of this host, once for each framework."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from hvkit.doctor.horovod import Horovod
from hvkit.doctor.mpi import MpiLauncher
from hvkit.doctor.self_test import BYTES, RANKS, ROUNDS
from hvkit.errors import LaunchError
from hvkit.launch.hosts import Host
from hvkit.launch.launchers import Job, Launcher, find_launcher

# Importing TensorFlow from a network file system takes a minute at times.
_SECONDS = 180.0
_SECONDS_TO_END = 5.0
_LINES_SHOWN = 8


@dataclass(frozen=True)
class Result:
    """How one framework did.

    Attributes:
        framework: ``torch`` or ``tensorflow``.
        command: what was run, for people to run it again.
        error: why it failed; ``None`` if the sums were right.
        output: the last lines, where it failed.
        seconds: the median time of one allreduce.
    """

    framework: str
    command: str
    error: str | None
    output: tuple[str, ...] = ()
    seconds: float | None = None

    @property
    def bandwidth(self) -> float | None:
        """Bytes of one rank's array, divided by the time: the algorithm bandwidth in bytes/s."""
        return BYTES / self.seconds if self.seconds else None


@dataclass(frozen=True)
class SelfTest:
    """How two ranks did.

    Attributes:
        launcher: what started them; ``None`` where nothing could.
        error: why nothing was started.
        results: of each framework whose library loads.
    """

    launcher: str | None
    error: str | None
    results: tuple[Result, ...]
    ranks: int = RANKS
    bytes: int = BYTES
    rounds: int = ROUNDS


def self_test(
    horovod: Horovod, launchers: Sequence[MpiLauncher], cores: int, seconds: float = _SECONDS
) -> SelfTest | None:
    """Start two ranks for each framework; ``None`` if no library of Horovod's can be used.

    Args:
        horovod: what is installed.
        launchers: those of MPIs that are here.
        cores: how many cores can be used.
        seconds: the time that each framework has.
    """
    frameworks = [one.framework for one in horovod.libraries if one.error is None]
    if not frameworks:
        return None
    try:
        launcher = find_launcher(launcher_for(horovod, launchers))
    except LaunchError as error:
        return SelfTest(None, str(error), ())
    results = tuple(_try(launcher, one, cores, seconds) for one in frameworks)
    return SelfTest(launcher.name, None, results)


def launcher_for(horovod: Horovod, launchers: Sequence[MpiLauncher]) -> str:
    """``mpirun`` where Horovod can use MPI and there is one, else ``gloo`` if Horovod has it."""
    usable = [set(one.controllers) for one in horovod.libraries if one.error is None]
    with_mpi = all("mpi" in controllers for controllers in usable)
    with_gloo = all("gloo" in controllers for controllers in usable)
    return "mpirun" if (with_mpi and launchers) or not with_gloo else "gloo"


def _try(launcher: Launcher, framework: str, cores: int, seconds: float) -> Result:
    program = (sys.executable, "-m", "hvkit.doctor.self_test", framework)
    job = Job((Host("localhost", RANKS),), program, crowded=cores < RANKS)
    status, output = _run(launcher.command(job), _environment(os.environ), seconds)
    command = f"{os.path.basename(launcher.path)} -np {RANKS} python {' '.join(program[1:])}"
    told = re.search(r"hvkit:(\{.*\})", output)
    if status == 0 and told:
        return Result(framework, command, None, seconds=json.loads(told[1])["seconds"])
    lines = tuple(line for line in output.splitlines() if line.strip())[-_LINES_SHOWN:]
    return Result(framework, command, _why(status, output, seconds), lines)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    # The sums are made in the host's memory; TensorFlow would take all of a GPU's beside them.
    return {"TF_CPP_MIN_LOG_LEVEL": "2", **environ, "CUDA_VISIBLE_DEVICES": ""}


def _why(status: int | None, output: str, seconds: float) -> str:
    if status is None:
        return f"it did not end within {seconds:g} s"
    if said := re.search(r"hvkit: (.+)", output):
        return said[1].strip()
    return f"it ended with status {status}" if status else "it printed no result"


def _run(
    command: Sequence[str], environ: Mapping[str, str], seconds: float
) -> tuple[int | None, str]:
    """Exit status, ``None`` if it took too long, and all output; nothing is left running."""
    # A pipe would have to be read to its end, which a rank that cannot be ended never closes.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        output.seek(0)
        return status, output.read()


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    # Ranks that hang do not always end with their launcher.
    launcher = psutil.Process(process.pid)
    started = [launcher, *launcher.children(recursive=True)]
    process.terminate()
    _, left = psutil.wait_procs(started, timeout=_SECONDS_TO_END)
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
