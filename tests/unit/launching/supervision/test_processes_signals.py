"""Signals to ``hvkit run`` while it has no ranks: it ends as at any other time."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from cases import each_once
from supervised import LAUNCHER, wait_until

from hvkit.errors import HvkitError
from hvkit.launching.supervision import run_status

# A run of one rank with a stand-in for mpirun. The rank says that hosts hold copies of its
# checkpoint, and fails. The pause before the restart is as long as the test needs.
RUN = """
import os, signal, sys
from hvkit.errors import LaunchError
from hvkit.launching import start
from hvkit.launching.hosts import Host
from hvkit.launching.prepare import Request
from hvkit.launching.ssh import run_on_hosts
from hvkit.launching.supervision.protocol import AgentSettings
from hvkit.launching.supervision.supervised_run import SupervisedRun

launcher, stage, rank = sys.argv[1:]
# As in a terminal: a shell may have started the tests in the background, ignoring these signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

def prepared(request, least=None, preempted=()):
    if stage == "first check" or (least and stage == "check"):
        run_on_hosts([Host("192.0.2.7")], ["true"], 600)
    if least and stage == "hosts":
        raise LaunchError("node2: it is lost")
    agent = [sys.executable, "-m", "hvkit.launching.supervision.agent"]
    command = [sys.executable, "-c", launcher, "1", *agent, sys.executable, "-c", rank]
    environ = {**os.environ, **request.variables}
    agents = AgentSettings(("127.0.0.1",), None, 10.0, bind=False)
    return SupervisedRun(command, environ, "The launcher", 1, agents)

def freed_while_signals_come(*given, **options):
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    free(*given, **options)

free = start._free_memory
if stage == "pause, and signals at the end":
    start._free_memory = freed_while_signals_come
start.prepared = prepared
start._FIRST_PAUSE = 60 if stage.startswith("pause") else 0.01
start._BETWEEN_LOOKS = 600
hosts = (Host("localhost"),)
sys.exit(start.start(Request(command=(), hosts=hosts, max_restarts=1)).status)
"""
RANK = """
import sys
from hvkit.host.run_reports import memory_folder, report
memory_folder().mkdir()
print(memory_folder(), flush=True)
report(replica=True)
report(saved=7)
sys.exit(3)
"""
# Never logs in; writes its process id to a file beside it.
SSH = """#!/bin/sh
echo $$ > "$0.new"
mv "$0.new" "$0.pid"
exec sleep 600
"""
PHASES = {
    "pause": "begins restart 1 after a pause of 60 s",
    "pause, and signals at the end": "begins restart 1 after a pause of 60 s",
    "hosts": "waits for hosts before restart 1: node2: it is lost",
}


def phase(process):
    try:
        return run_status.read(process)["phase"]
    except HvkitError:
        return ""


@pytest.fixture
def running(tmp_path):
    """Starts an ``hvkit run`` and waits until it is at a stage without ranks."""
    begun = []
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(stage):
        words = [sys.executable, "-c", RUN, LAUNCHER, stage, RANK]
        out = subprocess.PIPE
        begun.append(subprocess.Popen(words, stdout=out, stderr=out, text=True, env=environ))
        if stage in PHASES:
            wait_until(lambda: phase(begun[-1].pid).startswith(PHASES[stage]))
        else:
            wait_until((tmp_path / "ssh.pid").exists)
        return begun[-1]

    yield run
    for each in begun:
        each.kill()
        each.communicate()
    if (tmp_path / "ssh.pid").exists():
        wait_until(lambda: not psutil.pid_exists(int((tmp_path / "ssh.pid").read_text())))


def ended(run, number):
    """What a run prints until it has ended after a signal; nothing is left of it."""
    run.send_signal(number)
    printed = run.communicate(timeout=60)
    assert run.returncode == 128 + number, printed
    assert not (run_status.folder() / str(run.pid)).exists()
    return printed


@pytest.mark.parametrize(
    ("stage", "number"),
    each_once([*PHASES, "check"], [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]),
)
def test_between_two_tries_a_signal_ends_the_run_and_frees_memory(running, stage, number):
    run = running(stage)
    for ignored in (signal.SIGUSR1, signal.SIGUSR2):  # which are for ranks
        run.send_signal(ignored)
    output, errors = ended(run, number)
    said = f"hvkit run: ended by {number.name}; step 7 is saved; the same command resumes\n"
    assert said in errors
    assert "Traceback" not in errors
    folder = output.strip()
    assert folder.startswith("/dev/shm/hvkit-run-")
    assert not os.path.exists(folder)


def test_a_signal_ends_a_run_that_checks_its_hosts(running):
    run = running("first check")
    assert phase(run.pid) == "checks the hosts"
    assert ended(run, signal.SIGINT) == ("", "hvkit run: ended by SIGINT\n")


SLOW_END = """
import os, signal, threading, time
from hvkit.launching.supervision import processes

processes._SAME = 0.2
send = lambda: os.kill(os.getpid(), signal.SIGTERM)

with processes.end_on_signals(lambda: 7):
    try:
        send()
        time.sleep(600)
    finally:
        send()  # by a launcher that passes on the same signal
        threading.Timer(0.5, send).start()
        time.sleep(600)
"""


def test_a_later_signal_ends_a_run_whose_end_takes_too_long():
    words = [sys.executable, "-c", SLOW_END]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    said = "hvkit run: ended by SIGTERM; step 7 is saved; the same command resumes\n"
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGTERM, said)
