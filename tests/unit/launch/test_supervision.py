"""``hvkit run`` watches its ranks: here started by a stand-in for mpirun, on this host."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from hvkit.launch.supervision.protocol import KEY_VARIABLE, Supervised

# Starts each rank as mpirun does, and ends the others when one fails.
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
statuses = [rank.wait() for rank in ranks]
sys.exit(next((status for status in statuses if status), 0) % 256)
"""

RUN = """
import os, signal, sys
from hvkit.launch.supervision.run import Run, supervise
# As from a terminal: what runs in the background may have been started to ignore them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
agent = [sys.executable, "-m", "hvkit.launch.supervision.agent"]
launcher, size, *command = sys.argv[1:]
command = [sys.executable, "-c", launcher, size, *agent, *command]
run = Run(command, dict(os.environ), "The launcher",
          int(size), ("127.0.0.1",), None, bind=True)
sys.exit(supervise(run))
"""


@pytest.fixture
def mark():
    """A duration to sleep for that no other process sleeps for."""
    return f"{600 + uuid.uuid4().int % 10**6 / 10**6:.6f}"


def command_line(script, size=2):
    return [sys.executable, "-c", RUN, LAUNCHER, str(size), "bash", "-c", script]


def run(script, size=2):
    return subprocess.run(command_line(script, size), capture_output=True, text=True, timeout=60)


@pytest.fixture
def started(mark):
    """Starts ranks that sleep for long, each in a process of a process of its own."""
    running = []

    def start(script="(sleep MARK & wait) & wait"):
        run = subprocess.Popen(
            command_line(script.replace("MARK", mark)), stderr=subprocess.PIPE, text=True
        )
        running.append(run)
        wait_until(lambda: len(sleeping(mark)) == 2)
        return run

    yield start
    for run in running:
        run.kill()
        run.wait()
    for process in sleeping(mark):
        process.kill()


def sleeping(mark):
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", mark]]


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in 30 seconds"
        time.sleep(0.05)


def below(run):
    """The processes below ``hvkit run`` by what they are."""
    found = {"launcher": [], "agent": [], "command": []}
    for process in psutil.Process(run.pid).children(recursive=True):
        words = process.cmdline()
        if LAUNCHER in words:
            found["launcher"].append(process)
        elif "hvkit.launch.supervision.agent" in words:
            found["agent"].append(process)
        elif words[:1] == ["bash"] and process.parent() in found["agent"]:
            found["command"].append(process)
    return found


def test_what_ranks_print_and_that_all_ended_well_is_handed_on():
    done = run("echo out $OMPI_COMM_WORLD_RANK; echo err >&2")
    assert done.returncode == 0
    assert sorted(done.stdout.split("\n")) == ["", "out 0", "out 1"]
    assert done.stderr == "err\nerr\n"


def test_megabytes_of_output_arrive_in_full():
    done = run("head -c 3000000 /dev/zero | tr '\\0' x", size=1)
    assert done.stdout == "x" * 3_000_000


def test_the_rank_that_failed_first_is_named_with_its_last_lines_and_its_status():
    done = run("[ $OMPI_COMM_WORLD_RANK = 0 ] && sleep 600; echo too bad >&2; exit 7")
    assert done.returncode == 7
    host = socket.gethostname()
    assert (
        f"hvkit run: rank 1 on {host} ended with exit status 7; its last lines:\n    too bad\n"
        in (done.stderr)
    )
    assert "failed too" not in done.stderr


def test_a_command_that_is_not_there_is_named():
    done = subprocess.run(
        [sys.executable, "-c", RUN, LAUNCHER, "1", "no-such-program"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 127
    assert "cannot run 'no-such-program'" in done.stderr


def test_ranks_print_at_once_though_into_a_pipe():
    script = f"{sys.executable} -c 'import os; print(1); os.kill(os.getpid(), 9)'"
    done = run(script, size=1)
    assert done.returncode == 137
    assert done.stdout == "1\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything(started, mark, number):
    running = started()
    running.send_signal(number)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 128 + number
    assert f"ended by {number.name}" in errors
    assert sleeping(mark) == []


def test_processes_that_ignore_the_polite_signal_are_ended_too(started, mark):
    running = started("trap '' TERM; (trap '' TERM; sleep MARK & wait; wait) & wait; wait")
    running.terminate()
    running.communicate(timeout=30)
    assert sleeping(mark) == []


@pytest.mark.parametrize(
    ("victim", "message"),
    [
        ("launcher", "The launcher (process "),
        ("agent", "ended without a word"),
        ("command", "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_whatever_is_killed_all_end_and_it_is_named(started, mark, victim, message):
    running = started()
    below(running)[victim][-1].kill()
    _, errors = running.communicate(timeout=30)
    assert running.returncode not in (0, None)
    assert message in errors
    wait_until(lambda: sleeping(mark) == [])


def test_ranks_end_with_their_launcher_also_when_hvkit_run_cannot_tell_them(started, mark):
    running = started()
    (launcher,) = below(running)["launcher"]
    running.send_signal(signal.SIGSTOP)
    try:
        launcher.kill()
        wait_until(lambda: not sleeping(mark))
    finally:
        running.send_signal(signal.SIGCONT)
    assert running.wait(timeout=30) != 0


def test_when_hvkit_run_itself_is_killed_all_end(started, mark):
    running = started()
    agents = below(running)["agent"]
    running.kill()
    wait_until(lambda: sleeping(mark) == [])
    wait_until(lambda: not any(agent.is_running() for agent in agents))


def test_no_process_of_a_command_outlives_it(mark):
    done = run(f"sleep {mark} & disown; exit 0", size=1)
    assert done.returncode == 0
    assert sleeping(mark) == []


def test_a_launcher_that_does_not_notice_the_end_of_its_ranks_is_ended(monkeypatch):
    waits = LAUNCHER.replace("sys.exit(", "time.sleep(600), sys.exit(")
    words = [sys.executable, "-c", RUN, waits, "2", "sh", "-c", "echo done"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\ndone\n", "")


def test_nothing_is_lost_where_output_is_read_late():
    script = "head -c 4000000 /dev/zero | tr '\\0' x; echo END"
    running = subprocess.Popen(command_line(script, size=1), stdout=subprocess.PIPE)
    time.sleep(8)  # Longer than anything here waits for a reader.
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert len(out) == 4_000_004
    assert out.endswith(b"xEND\n")


def test_a_signal_ends_a_run_whose_output_nobody_reads(mark):
    script = f"sleep {mark} & yes"
    running = subprocess.Popen(
        command_line(script, size=1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: len(sleeping(mark)) == 1)
    time.sleep(1)
    running.terminate()
    assert running.wait(timeout=30) == 128 + signal.SIGTERM
    assert running.stderr.read() == "hvkit run: ended by SIGTERM\n"
    assert sleeping(mark) == []


def test_a_reader_that_has_seen_enough_ends_the_run_quietly():
    running = subprocess.Popen(
        command_line("yes", size=1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout.readline() == "y\n"
    running.stdout.close()
    assert running.wait(timeout=30) == 128 + signal.SIGPIPE
    assert running.stderr.read() == ""


def test_a_full_disk_is_named_with_the_log_file(tmp_path):
    (tmp_path / "rank-0000.log").symlink_to("/dev/full")
    logging = RUN.replace("bind=True", f"bind=True, style=Style(log_dir=Path({str(tmp_path)!r}))")
    imports = "from pathlib import Path\nfrom hvkit.launch.supervision.output import Style\n"
    words = [sys.executable, "-c", imports + logging, LAUNCHER, "1", "sh", "-c", "echo x; sleep 60"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    log = tmp_path / "rank-0000.log"
    assert f"output cannot be written to {log}: No space left on device" in done.stderr


def test_without_standard_input_ranks_run():
    words = shlex.join(command_line("cat; echo done", size=1))
    done = subprocess.run(["sh", "-c", f"{words} <&-"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_commands_do_not_get_the_key():
    assert KEY_VARIABLE not in run("env", size=1).stdout


def test_who_does_not_know_the_key_is_not_listened_to(started, mark):
    running = started()
    environment = psutil.Process(below(running)["agent"][0].pid).environ()
    supervised = Supervised.from_json(environment["HVKIT_RUN"])
    with socket.create_connection((supervised.addresses[0], supervised.port), timeout=10) as wrong:
        nonce = wrong.recv(16)
        hello = json.dumps({"rank": 0, "host": "x", "proof": nonce.hex()}).encode()
        wrong.sendall(b"\x01" + len(hello).to_bytes(4, "big") + hello)
        end = json.dumps({"status": 5}).encode()
        wrong.sendall(b"\x04" + len(end).to_bytes(4, "big") + end)
        assert wrong.recv(100) == b""
    # Had it been believed, this would be the end with the status that it told.
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(timeout=6)
    running.terminate()
    assert running.wait(timeout=30) == 128 + signal.SIGTERM


def test_an_agent_without_supervisor_becomes_the_command():
    agent = [sys.executable, "-m", "hvkit.launch.supervision.agent"]
    done = subprocess.run([*agent, "bash", "-c", "exit 5"], timeout=60)
    assert done.returncode == 5


def test_ranks_of_a_host_are_bound_to_different_cores():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has a single core")
    done = run("exec taskset -cp $$")
    first, second = (line.rpartition(": ")[2] for line in done.stdout.splitlines())
    assert first != second
