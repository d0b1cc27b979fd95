"""Starts ``hvkit run``'s supervision with a stand-in for mpirun on this host."""

import subprocess
import sys
import time

import psutil

# Starts ranks like mpirun. When one fails, ends the others, by force after a second.
LAUNCHER = """
import os, subprocess, sys, time
size, *command = sys.argv[1:]
ranks = []
for rank in range(int(size)):
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    own = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}
    ranks.append(subprocess.Popen(command, env={**os.environ, **own}))
while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
    time.sleep(0.05)
for rank in ranks:
    rank.terminate()
deadline = time.monotonic() + 1
while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
    time.sleep(0.05)
for rank in ranks:
    rank.kill()
statuses = [rank.wait() for rank in ranks]
sys.exit(next((status for status in statuses if status), 0) % 256)
"""

RUN = """
import os, signal, sys
from pathlib import Path
from hvkit.launching.supervision.protocol import AgentSettings
from hvkit.launching.supervision.rank_output import Style
from hvkit.launching.supervision.supervised_run import SupervisedRun, supervise
# As in a terminal: a shell may have started the tests in the background, ignoring these signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
agent = [sys.executable, "-m", "hvkit.launching.supervision.agent"]
launcher, size, *command = sys.argv[1:]
command = [sys.executable, "-c", launcher, size, *agent, *command]
grace = float(os.environ.get("GRACE", 10))
agents = AgentSettings(("127.0.0.1",), None, grace, bind=True, **dict(AGENTS))
run = SupervisedRun(command, dict(os.environ), "The launcher", int(size), agents, **dict(OPTIONS))
sys.exit(supervise(run).status)
"""


def command_line(
    script, size=2, *, options="", agents="", launcher=LAUNCHER, program=RUN, command=None
):
    """A run of a shell's script, or of another command.

    ``options`` are those of SupervisedRun, ``agents`` those of AgentSettings.
    """
    words = command or ["bash", "-c", script]
    program = program.replace("OPTIONS", options).replace("AGENTS", agents)
    return [sys.executable, "-c", program, launcher, str(size), *words]


def begin(script, size=2, **changes):
    """The process of a run; changes are those of ``command_line``."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command_line(script, size, **changes), text=True, **pipes)


def run(script, size=2, **changes):
    """A run that has ended."""
    words = command_line(script, size, **changes)
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def sleeping(mark):
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", mark]]


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met within 30 seconds"
        time.sleep(0.02)


def below(run):
    """The processes below ``hvkit run``, by role."""
    found = {"launcher": [], "guard": [], "agent": [], "command": []}
    for process in psutil.Process(run.pid).children(recursive=True):
        words = process.cmdline()
        if LAUNCHER in words:
            found["launcher"].append(process)
        elif "hvkit.launching.supervision.agent" in words:
            guards = process.parent() in found["launcher"]
            found["guard" if guards else "agent"].append(process)
        elif words[:1] == ["bash"] and process.parent() in found["agent"]:
            found["command"].append(process)
    return found
