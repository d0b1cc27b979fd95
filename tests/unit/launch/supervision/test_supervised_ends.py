"""Whatever ends or is killed, ``hvkit run`` ends everything, and names what failed."""

import signal
import subprocess
import sys
import time

import pytest
from supervised import LAUNCHER, RUN, below, command_line, run, sleeping, wait_until


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
        ("guard", "its process below the launcher was killed"),
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


def test_a_signal_gives_commands_their_time(started, monkeypatch):
    monkeypatch.setenv("GRACE", "20")
    running = started("trap 'sleep 2; echo saved; exit 0' TERM; sleep MARK & wait; wait")
    running.send_signal(signal.SIGTERM)
    out, errors = running.communicate(timeout=30)
    assert sorted(out.split()) == ["saved", "saved"]
    assert errors == "hvkit run: ended by SIGTERM\n"


def test_a_second_signal_ends_everything_at_once(started, mark, monkeypatch):
    monkeypatch.setenv("GRACE", "500")
    running = started("trap '' TERM; sleep MARK & echo there; wait")
    running.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert len(sleeping(mark)) == 2
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert errors == "hvkit run: ended by SIGTERM\n"
    assert sleeping(mark) == []


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_for_commands_reach_them(started, number):
    name = number.name.removeprefix("SIG")
    running = started(f"trap 'echo got {name}; kill %1' {name}; sleep MARK & wait; wait")
    running.send_signal(number)
    out, _ = running.communicate(timeout=30)
    assert out == f"got {name}\n" * 2
    assert running.returncode == 0


def test_a_rank_that_takes_its_time_to_end_is_not_the_one_that_failed():
    done = run(
        "if [ $OMPI_COMM_WORLD_RANK = 1 ]; then sleep 1; exit 7; fi;"
        "trap 'sleep 3; exit 0' TERM; sleep 600 & wait; wait"
    )
    assert done.returncode == 7
    assert "hvkit run: rank 1 on " in done.stderr
    assert "failed too" not in done.stderr


def test_what_a_killed_agent_leaves_behind_is_ended(started, mark):
    running = started("setsid sleep MARK & disown; sleep 601 & wait")
    below(running)["agent"][0].kill()
    assert running.wait(timeout=30) != 0
    wait_until(lambda: sleeping(mark) == [])


def test_processes_that_ended_are_not_kept():
    done = run(
        "for i in 1 2 3 4 5 6 7 8; do (true &); done; sleep 2;"
        "ps -o stat= --ppid $PPID | grep -c Z; true",
        size=1,
    )
    assert done.stdout == "0\n"
