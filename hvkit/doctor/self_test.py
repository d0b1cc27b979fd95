"""An allreduce on two ranks of this host, once for each framework.

``self_test`` starts the ranks; ``python -m hvkit.doctor.self_test`` calls it for what is installed.
Each rank runs ``python -m hvkit.doctor.self_test torch 9 67108864``: it compares an allreduce of so
many bytes in the host's memory with the right sum, and times it 9 times. Rank 0 prints the result
as JSON after ``hvkit:``; a rank that fails prints the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from hvkit.doctor.facts import mpi_launchers
from hvkit.errors import HvkitError, LaunchError
from hvkit.host.mca import WITHOUT_TOOLS
from hvkit.launching.hosts import Host
from hvkit.launching.launchers import Job, Launcher, find_launcher
from hvkit.transport.engines import ENGINES, built_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

RANKS = 2
BYTES = 64 * 1024**2
ROUNDS = 9
# After an installation, only the sum matters.
_BYTES_AFTER_INSTALLATION = 1024**2

# Importing TensorFlow from a network file system can take a minute.
_SECONDS = 180.0
# Compiling Horovod instead would take longer on a machine that is as slow.
_SECONDS_AFTER_INSTALLATION = 600.0
_SECONDS_TO_END = 5.0
_LINES_SHOWN = 8


def self_test(
    facts: Mapping[str, Any],
    seconds: float = _SECONDS,
    show_step: Callable[[str], None] = lambda _: None,
    rounds: int = ROUNDS,
    size: int = BYTES,
) -> dict[str, Any] | None:
    """``self_test`` of the report, from two ranks; None if none of Horovod's libraries loads.

    ``facts`` are ``hvkit.doctor.facts.gather``'s; ``seconds`` is the limit for each framework.
    """
    frameworks = [one["framework"] for one in _usable_libraries(facts)]
    if not frameworks:
        return None
    test = {"ranks": RANKS, "bytes": size, "rounds": rounds}
    try:
        launcher = find_launcher(launcher_for(facts))
    except LaunchError as error:
        return {"launcher": None, "error": str(error), "results": [], **test}
    results = []
    for number, one in enumerate(frameworks, start=1):
        of_all = f"({number} of {len(frameworks)})"
        show_step(f"trying an allreduce on {RANKS} ranks with {one} {of_all}")
        results.append(_test(launcher, one, facts["cores"]["usable"], seconds, rounds, size))
    return {"launcher": launcher.name, "error": None, "results": results, **test}


def launcher_for(facts: Mapping[str, Any]) -> str:
    """``mpirun`` where Horovod can use MPI and there is one, else ``gloo`` if Horovod has it."""
    with_mpi, with_gloo = (
        all(name in one["controllers"] for one in _usable_libraries(facts))
        for name in ("mpi", "gloo")
    )
    return "gloo" if with_gloo and not (with_mpi and facts["launchers"]) else "mpirun"


def _usable_libraries(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    libraries = facts["horovod"]["libraries"] if facts["horovod"] else []
    return [one for one in libraries if one["error"] is None]


def _test(
    launcher: Launcher, framework: str, cores: int, seconds: float, rounds: int, size: int
) -> dict[str, Any]:
    program = (sys.executable, "-m", "hvkit.doctor.self_test", framework, str(rounds), str(size))
    crowded = {"localhost": (RANKS, cores)} if cores < RANKS else {}
    job = Job((Host("localhost", RANKS),), program, crowded=crowded)
    status, output = _run(launcher.command(job), seconds)
    timing = re.search(r"hvkit:(\{.*\})", output)
    time_of_one = json.loads(timing[1])["seconds"] if status == 0 and timing else None
    passed = time_of_one is not None
    lines = [line for line in output.splitlines() if line.strip()][-_LINES_SHOWN:]
    return {
        "framework": framework,
        "command": f"{os.path.basename(launcher.path)} -np {RANKS} python {' '.join(program[1:])}",
        "error": None if passed else _error(status, output, seconds),
        "output": [] if passed else lines,
        "seconds": time_of_one,
        # The algorithm bandwidth: the bytes of one rank's array, divided by the time.
        "bandwidth": size / time_of_one if time_of_one else None,
    }


def _error(status: int | None, output: str, seconds: float) -> str:
    if status is None:
        return f"it did not end within {seconds:g} s"
    if reason := re.search(r"hvkit: (.+)", output):
        return reason[1].strip()
    return f"it ended with status {status}" if status else "it printed no result"


def _run(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Exit status (``None`` if it ran out of time) and all output; leaves no process running."""
    # The sums need the host's memory only; TensorFlow would also take all of a GPU's.
    defaults = {"TF_CPP_MIN_LOG_LEVEL": "2", **dict([WITHOUT_TOOLS])}
    environ = {**defaults, **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    # A file, because a rank that cannot be killed would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        output.seek(0)
        return status, output.read()


def _end(process: subprocess.Popen[bytes]) -> None:
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


def main(framework: str, rounds: int, size: int) -> None:
    """Run as one of the ranks, and time the allreduce of so many bytes so many times."""
    for name in ("jax", "sklearn"):
        # TensorFlow and Keras import these where they are installed, which takes the most time.
        sys.modules[name] = None  # type: ignore[assignment]
    engine = ENGINES[framework]()
    if engine.hvd.size() != RANKS:
        raise LaunchError(
            f"the launcher started {RANKS} ranks, but Horovod sees {engine.hvd.size()}: it uses "
            "another MPI than the launcher's. Put the MPI that Horovod was built with first on "
            "PATH, or rebuild Horovod with `hvkit install-horovod`"
        )
    sent = contribution(engine.hvd.rank(), size)
    require_sum(engine.allreduce(sent, "sum"), RANKS)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        engine.allreduce(sent, "sum")
        times.append(time.perf_counter() - start)
    if engine.hvd.rank() == 0:
        print(f"hvkit:{json.dumps({'seconds': statistics.median(times)})}", flush=True)
    engine.hvd.shutdown()


def contribution(rank: int, size: int) -> NDArray[np.float32]:
    """A rank's term of the sum: so many bytes, with different values on every rank."""
    # A prime, so that a sum with swapped pieces is wrong. Sums are exact in float32.
    return (np.arange(size // 4) % 251 * (rank + 1)).astype(np.float32)


def require_sum(total: NDArray[np.float32], size: int) -> None:
    """Compare a sum over ``size`` ranks with the right one."""
    right = contribution(0, total.nbytes) * (size * (size + 1) // 2)
    wrong = np.flatnonzero(total != right)
    if wrong.size:
        at = int(wrong[0])
        raise ArithmeticError(
            f"an allreduce is wrong in {wrong.size} of {right.size} elements: element {at} is "
            f"{total[at]:g}, expected {right[at]:g}"
        )


def try_installed() -> None:
    """Try the installed Horovod, built for MPI, with every framework that it has a library for."""
    usable = {"error": None, "controllers": ["mpi"]}
    facts = {
        "horovod": {"libraries": [{"framework": name, **usable} for name in built_for()]},
        "launchers": mpi_launchers(),
        "cores": {"usable": len(os.sched_getaffinity(0))},
    }
    test = self_test(facts, _SECONDS_AFTER_INSTALLATION, rounds=1, size=_BYTES_AFTER_INSTALLATION)
    if test is None:
        raise LaunchError("the installed Horovod has no library for a framework")
    failed = [
        "\n".join([f"{one['framework']}: {one['error']}", *one["output"]])
        for one in test["results"]
        if one["error"]
    ]
    if test["error"] or failed:
        raise LaunchError("; ".join(filter(None, [test["error"], *failed])))


if __name__ == "__main__":
    try:
        main(sys.argv[1], *map(int, sys.argv[2:])) if sys.argv[1:] else try_installed()
    except (HvkitError, ArithmeticError) as error:
        sys.exit(f"hvkit: {error}")
