"""Whichever process ends or is killed, ``hvkit run`` ends all others and names the cause."""

import contextlib
import os
import pty
import re
import signal
import sys
import time

import pytest
from cases import MORE, cases
from supervised import LAUNCHER, RUN, begin, below, command_line, run, sleeping, wait_until

from hvkit.launching.supervision import supervised_run
from hvkit.launching.supervision.protocol import AgentSettings


def test_processes_that_ignore_sigterm_are_killed_after_the_grace(started, mark, monkeypatch):
    monkeypatch.setenv("GRACE", "0.3")
    running = started("trap '' TERM; (trap '' TERM; sleep MARK & wait; wait) & wait; wait")
    running.terminate()
    running.communicate(timeout=30)
    assert sleeping(mark) == []


LEFT = "setsid sleep MARK & disown; sleep 601 & wait"  # by a killed agent


@pytest.mark.parametrize(
    ("victim", "message", "script"),
    [
        ("launcher", "The launcher (process ", []),
        ("guard", "its guard, the process between the launcher and the rank, was killed", []),
        ("agent", "vanished: it and its watcher died without an exit status", [LEFT]),
        ("command", "was killed by signal 9 (SIGKILL)", []),
    ],
)
def test_if_any_process_is_killed_everything_ends_and_it_is_named(
    started, mark, victim, message, script
):
    running = started(*script)
    below(running)[victim][-1].kill()
    _, errors = running.communicate(timeout=30)
    assert running.returncode not in (0, None)
    assert message in errors
    wait_until(lambda: sleeping(mark) == [])


def test_ranks_end_with_their_launcher_while_hvkit_run_is_stopped(started, mark):
    running = started()
    (launcher,) = below(running)["launcher"]
    running.send_signal(signal.SIGSTOP)
    try:
        launcher.kill()
        wait_until(lambda: not sleeping(mark))
    finally:
        running.send_signal(signal.SIGCONT)
    assert running.wait(timeout=30) != 0


def test_if_hvkit_run_is_killed_everything_ends(started, mark):
    running = started()
    agents = below(running)["agent"]
    running.kill()
    wait_until(lambda: sleeping(mark) == [])
    wait_until(lambda: not any(agent.is_running() for agent in agents))


def test_no_process_of_a_command_outlives_it_and_its_status_counts(mark):
    """Also below a service that ignores ended children."""
    ignores = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nagent ="
    program = RUN.replace("agent =", ignores)
    assert run(f"sleep {mark} & disown; exit 0", size=1, program=program).returncode == 0
    assert sleeping(mark) == []


@MORE
def test_adopted_processes_that_ended_are_reaped():
    script = "for i in 1 2 3 4 5 6 7 8; do (true &); done; sleep 2;"
    done = run(f"{script} ps -o stat= --ppid $PPID | grep -c Z; true", size=1)
    assert done.stdout == "0\n"


@MORE
def test_restarts_leave_no_thread_or_file_behind():
    counted = """
import gc, psutil, threading, time
own, held = psutil.Process(), []
for _ in range(4):
    supervise(run)
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    held.append((threading.active_count(), own.num_fds()))
print(*sorted(set(held)))
"""
    program = RUN.replace("sys.exit(supervise(run).status)", counted)
    done = run("exit 3", program=program)
    assert done.stdout.startswith("(1, ")
    assert done.stdout.count("(") == 1


@MORE
def test_a_launcher_that_does_not_notice_the_end_of_its_ranks_is_ended():
    waits = LAUNCHER.replace("sys.exit(", "time.sleep(600), sys.exit(")
    done = run("echo done", launcher=waits)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\ndone\n", "")


@MORE
def test_a_signal_ends_a_run_whose_output_nobody_reads(mark):
    running = begin(f"sleep {mark} & yes", size=1)
    wait_until(lambda: len(sleeping(mark)) == 1)
    time.sleep(1)
    running.terminate()
    assert running.wait(timeout=30) == 128 + signal.SIGTERM
    assert running.stderr.read() == "hvkit run: ended by SIGTERM\n"
    assert sleeping(mark) == []


@pytest.mark.parametrize("number", cases([signal.SIGHUP, signal.SIGTERM]))
def test_after_a_signal_commands_may_finish_within_the_grace(started, mark, number):
    running = started("trap 'sleep 0.7; echo saved; exit 0' TERM; sleep MARK & wait; wait")
    running.send_signal(number)
    out, errors = running.communicate(timeout=30)
    assert running.returncode == 128 + number
    assert (out, errors) == ("saved\nsaved\n", f"hvkit run: ended by {number.name}\n")
    assert sleeping(mark) == []


def all_of(terminal):
    """What was printed to a terminal that nobody writes to any more; one read may return a part."""
    printed = b""
    with contextlib.suppress(OSError):  # which Linux raises at the end
        while piece := os.read(terminal, 10_000):
            printed += piece
    return printed


def test_a_ctrl_c_in_a_terminal_reaches_every_rank_as_an_interrupt(mark, interruptible):
    answer = "time.sleep(2); print('saved')"  # longer than a launcher that ends has
    words = command_line(interruptible(answer).replace("MARK", mark))
    run, terminal = pty.fork()
    if run == 0:
        os.execv(words[0], words)
    try:
        wait_until(lambda: len(sleeping(mark)) == 2)
        os.write(terminal, b"\x03")
        assert os.waitstatus_to_exitcode(os.waitpid(run, 0)[1]) == 130
        shown = [line.removeprefix("^C") for line in all_of(terminal).decode().splitlines()]
        assert shown == ["saved", "saved", "hvkit run: ended by SIGINT"]
    finally:
        os.close(terminal)


@MORE
def test_a_rank_that_ends_at_the_interrupt_does_not_cut_short_the_others(started, interruptible):
    first = "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': raise"
    running = started(interruptible(f"{first}\n    time.sleep(4); print('saved')"))
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=30)
    assert out == "saved\n"
    assert errors.count("hvkit: rank 1 was interrupted (") == 1
    assert "Traceback" not in errors
    assert running.returncode == 130


# Starts itself like a data loader's worker, and in a session of its own; ready when `sleep` runs.
# Waits for a signal, prints its name in one piece, and ends.
RANK = """
import signal, subprocess, sys
role, mark = sys.argv[1:]
signals = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
if role == "rank":
    worker = subprocess.Popen([sys.executable, __file__, "worker", mark])
    subprocess.Popen([sys.executable, __file__, "session", mark], start_new_session=True)
    subprocess.Popen(["sleep", mark])
sys.stdout.write(f"{role} got {signal.Signals(signal.sigwait(signals)).name}\\n")
sys.stdout.flush()
if role == "rank":
    worker.wait()
"""


@MORE
def test_an_interrupt_reaches_the_same_processes_as_ctrl_c_in_a_terminal(started, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    running = started(f"{sys.executable} {tmp_path}/rank.py rank MARK")
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=30)
    # The interrupt misses the other session; SIGTERM ends it as a left-over of the rank.
    once = ["rank got SIGINT", "session got SIGTERM", "worker got SIGINT"]
    assert sorted(out.splitlines()) == sorted(once * 2)


def test_ranks_that_ignore_the_interrupt_get_sigterm_after_the_grace(started, monkeypatch):
    monkeypatch.setenv("GRACE", "0.5")
    running = started("trap '' INT; trap 'echo term; exit' TERM; sleep MARK & wait; wait")
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=30)
    assert (out, errors) == ("term\nterm\n", "hvkit run: ended by SIGINT\n")


def test_a_second_ctrl_c_sends_sigterm_and_a_third_kills(started, mark, monkeypatch):
    monkeypatch.setenv("GRACE", "500")
    running = started(
        "trap 'echo interrupted' INT; trap 'echo term' TERM; (trap '' INT TERM; exec sleep MARK) &"
        "while :; do wait; done"
    )
    for number, printed in enumerate(("interrupted", "term")):
        running.send_signal(signal.SIGINT)
        assert [running.stdout.readline() for _ in range(2)] == [f"{printed}\n"] * 2, number
    assert len(sleeping(mark)) == 2
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert (running.returncode, errors) == (130, "hvkit run: ended by SIGINT\n")
    assert sleeping(mark) == []


def test_a_second_signal_ends_everything_at_once(started, mark, monkeypatch):
    monkeypatch.setenv("GRACE", "500")
    running = started("trap 'echo term' TERM; (trap '' TERM; exec sleep MARK) & wait; wait")
    running.send_signal(signal.SIGTERM)
    assert [running.stdout.readline() for _ in range(2)] == ["term\n"] * 2
    assert len(sleeping(mark)) == 2
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert errors == "hvkit run: ended by SIGTERM\n"
    assert sleeping(mark) == []


def fails_beside(answer, ready):
    """A script: rank 1 fails once rank 0 has set ``answer`` as its handler of SIGTERM."""
    return (
        f"if [ $OMPI_COMM_WORLD_RANK = 1 ]; then until [ -e '{ready}' ]; do sleep 0.1; done;"
        f"exit 7; fi; trap '{answer}' TERM; touch '{ready}'; while :; do sleep 0.1; done"
    )


@MORE
def test_after_a_failure_the_other_ranks_may_finish_within_the_grace(tmp_path):
    """Which begins when those that fail because of the first have had their time."""
    seconds = supervised_run._OTHERS_FAIL + 1
    done = run(fails_beside(f"sleep {seconds}; echo saved; exit", tmp_path / "ready"))
    assert (done.returncode, done.stdout) == (7, "saved\n")
    assert "hvkit run: rank 1 on " in done.stderr
    assert "failed too" not in done.stderr


@MORE
def test_a_signal_cuts_the_grace_after_a_failure_short(tmp_path, monkeypatch):
    monkeypatch.setenv("GRACE", "500")
    idle = LAUNCHER.replace("rank.terminate()", "pass").replace("rank.kill()", "rank.wait()")
    running = begin(fails_beside("echo term", tmp_path / "ready"), launcher=idle)
    assert running.stdout.readline() == "term\n"
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 7
    assert "hvkit run: rank 1 on " in errors


def test_a_rank_that_is_stopped_gets_the_sigterm_that_ends_the_run(tmp_path):
    stops = "echo $$ > pid; trap 'echo woken; exit 9' TERM; kill -STOP $$; wait"
    fails = "until grep -q stopped /proc/$(cat pid)/status; do sleep 0.05; done; exit 3"
    script = f"cd {tmp_path}; if [ $OMPI_COMM_WORLD_RANK = 1 ]; then {stops}; else {fails}; fi"
    done = run(script)
    assert (done.returncode, done.stdout) == (3, "woken\n")


@pytest.mark.parametrize("number", cases([signal.SIGUSR1, signal.SIGUSR2]))
def test_signals_for_commands_reach_them(started, number):
    name = number.name.removeprefix("SIG")
    running = started(f"trap 'echo got {name}; kill %1' {name}; sleep MARK & wait; wait")
    running.send_signal(number)
    out, _ = running.communicate(timeout=30)
    assert (running.returncode, out) == (0, f"got {name}\n" * 2)


def test_a_rank_that_ends_well_before_the_others_is_named_if_the_launcher_minds(tmp_path):
    """Open MPI does, if it has not called MPI_Finalize."""
    strict = LAUNCHER.replace("any(rank.poll() for", "any(rank.poll() is not None for")
    strict = strict.replace("sys.exit(next", "sys.exit(1 if len({*statuses}) > 1 else next")
    begun = tmp_path / "rank 0 has begun"
    ended = run(
        f"if [ $OMPI_COMM_WORLD_RANK = 0 ]; then touch '{begun}'; exec sleep 60; fi; "
        f"until [ -e '{begun}' ]; do sleep 0.1; done",
        launcher=strict,
    )
    assert ended.returncode == 1
    why = r"; rank 1 on \S+ ended with exit status 0 before the others"
    assert re.search(f"hvkit run: The launcher ended with exit status 1{why}", ended.stderr)


def test_a_signal_that_comes_once_the_outcome_is_known_allows_no_restart(monkeypatch):
    def supervise(self):
        self.stopping = True
        outcome = self.outcome(1, "rank 0 ended with exit status 1", restartable=True)
        assert outcome.restartable
        self.on_end_signal(signal.SIGTERM)
        return outcome

    monkeypatch.setattr(supervised_run._Supervision, "supervise", supervise)
    monkeypatch.setattr(supervised_run.processes, "adopt_orphans", lambda: None)
    agents = AgentSettings(("127.0.0.1",), None, 10.0, bind=False)
    made = supervised_run.SupervisedRun((), {}, "x", 1, agents)
    assert not supervised_run.supervise(made).restartable
