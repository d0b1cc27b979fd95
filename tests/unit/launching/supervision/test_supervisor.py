"""``hvkit run`` watches ranks, which a stand-in for mpirun starts on this host."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge

import psutil
import pytest
from cases import MORE, cases
from supervised import LAUNCHER, begin, below, command_line, run, sleeping

from hvkit.connections import connect, frame, keep_alive
from hvkit.launching.supervision.protocol import KEY_VARIABLE, AgentSettings, Frame
from hvkit.launching.supervision.rank_output import Style
from hvkit.launching.supervision.supervisor import Supervisor


def test_output_and_success_of_the_ranks_are_passed_on():
    done = run("echo out $OMPI_COMM_WORLD_RANK; echo err >&2")
    assert done.returncode == 0
    assert sorted(done.stdout.split("\n")) == ["", "out 0", "out 1"]
    assert done.stderr == "err\nerr\n"


def test_a_rank_that_is_not_shown_is_reported_if_it_fails(tmp_path):
    fails = f"until [ -e {tmp_path}/begun ]; do sleep 0.05; done; exit 7"
    done = run(
        f"echo out $OMPI_COMM_WORLD_RANK; [ $OMPI_COMM_WORLD_RANK = 1 ] && {{ {fails}; }};"
        f"echo err >&2; touch {tmp_path}/begun; exec sleep 60",
        options="style=Style(ranks=(range(1),))",
    )
    assert (done.returncode, done.stdout) == (7, "out 0\n")
    host = socket.gethostname()
    report = f"rank 1 on {host} ended with exit status 7; its last lines:\n    out 1\n"
    assert done.stderr == f"err\nhvkit run: {report}"


def test_megabytes_of_output_arrive_in_full():
    done = run("head -c 3000000 /dev/zero | tr '\\0' x", size=1)
    assert done.stdout == "x" * 3_000_000


@MORE
def test_no_output_is_lost_if_it_is_read_late():
    running = begin("head -c 4000000 /dev/zero | tr '\\0' x; echo END", size=1)
    time.sleep(8)  # Longer than anything here waits for a reader.
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert len(out) == 4_000_004
    assert out.endswith("xEND\n")


@MORE
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_ends_well_but_never_starts_horovod_is_not_waited_for(first):
    """Whether another rank starts it before or after that."""
    start = "from hvkit.host import run_reports; run_reports.report(starting=True)"
    late = "sleep 1;"
    done = run(
        f"[ $OMPI_COMM_WORLD_RANK = 1 ] && {{ {late * first} exit 0; }}; "
        f"{late * (1 - first)} {sys.executable} -c '{start}'; sleep 600"
    )
    assert done.returncode == 1
    host = socket.gethostname()
    assert f"rank 1 on {host}: ended with exit status 0 and did not start Horovod" in done.stderr


def test_standard_input_is_left_to_the_next_command(tmp_path):
    """As in a loop of a shell over the lines of a file."""
    (tmp_path / "lines").write_text("first\nsecond\n")
    words = command_line("cat; echo ranks read nothing", size=1)
    with (tmp_path / "lines").open() as given:
        done = subprocess.run(words, stdin=given, capture_output=True, text=True, timeout=60)
        left = subprocess.run(["cat"], stdin=given, capture_output=True).stdout
    assert (done.stdout, left) == ("ranks read nothing\n", b"first\nsecond\n")


def test_without_standard_input_ranks_run():
    words = shlex.join(command_line("cat; echo done", size=1))
    done = subprocess.run(["sh", "-c", f"{words} <&-"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n")


@pytest.mark.parametrize("status", [0, 7])
def test_the_launchers_output_about_a_failed_rank_is_logged_only(status, tmp_path):
    says = "print('ten lines', file=sys.stderr); sys.exit(next"
    wordy = LAUNCHER.replace("sys.exit(next", says)
    style = f"style=Style(log_dir=Path({str(tmp_path)!r}))"
    done = run(f"exit {status}", size=1, launcher=wordy, options=style)
    assert done.returncode == status
    assert "ten lines" not in done.stderr
    assert (tmp_path / "launcher.log").read_text() == "ten lines\n"


@pytest.mark.parametrize(("then", "status"), cases([(LAUNCHER, 5), ("sys.exit(213)", 213)]))
def test_the_launchers_output_is_shown_if_no_rank_has_failed(then, status):
    says = "import sys; print('no such interface', file=sys.stderr, flush=True)\n"
    done = run("sleep 1; exit 5", size=1, launcher=says + then)
    assert done.returncode == status
    assert done.stderr.startswith("no such interface\nhvkit run: ")


def test_of_a_traceback_of_all_ranks_one_is_shown_with_the_verdict():
    done = run(f"exec {sys.executable} -c 'import time; time.sleep(0.3); [][7]'")
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last):") == 1
    lines = done.stderr.splitlines()
    assert "ended with exit status 1; its last lines:" in lines[0]
    assert lines[1] == "    Traceback (most recent call last):"
    assert "    IndexError: list index out of range" in lines


def test_a_missing_command_is_named():
    done = run("", size=1, command=["no-such-program"])
    assert done.returncode == 127
    assert "cannot run 'no-such-program'" in done.stderr


def test_output_of_python_ranks_is_unbuffered():
    done = run(f"{sys.executable} -c 'import os; print(1); os.kill(os.getpid(), 9)'", size=1)
    assert (done.returncode, done.stdout) == (137, "1\n")


def test_a_closed_pipe_ends_the_run_silently():
    running = begin("yes", size=1)
    assert running.stdout.readline() == "y\n"
    running.stdout.close()
    assert running.wait(timeout=30) == 128 + signal.SIGPIPE
    assert running.stderr.read() == ""


def test_a_full_disk_is_named_with_the_log_file(tmp_path):
    log = tmp_path / "rank-0000.log"
    log.symlink_to("/dev/full")
    done = run("echo x; sleep 60", 1, options=f"style=Style(log_dir=Path({str(tmp_path)!r}))")
    assert done.returncode == 1
    assert f"hvkit run: cannot write output to {log}: No space left on device" in done.stderr


def test_commands_get_the_variables_for_this_host_and_not_the_key():
    variables = run("env", size=1, agents="variables={'MINE': 'a b'}").stdout.splitlines()
    assert "MINE=a b" in variables
    assert not [each for each in variables if each.startswith(KEY_VARIABLE)]


def test_ranks_of_a_host_are_bound_to_different_cores():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has a single core")
    done = run("exec taskset -cp $$")
    first, second = (line.rpartition(": ")[2] for line in done.stdout.splitlines())
    assert first != second


@MORE
def test_a_stranger_with_another_key_cannot_pose_as_an_agent(started):
    running = started()
    environment = psutil.Process(below(running)["agent"][0].pid).environ()
    settings = AgentSettings(**json.loads(environment["HVKIT_RUN"]))
    stranger = socket.create_connection((settings.addresses[0], settings.port))
    frames = [
        frame(Frame.HELLO, json.dumps({"rank": 0, "host": "x"}).encode()),
        frame(Frame.ENDED, json.dumps({"status": 5}).encode()),
    ]
    with Connection(stranger.detach()) as connection:
        with pytest.raises(AuthenticationError, match="digest sent was rejected"):
            answer_challenge(connection, b"a guess")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            os.write(connection.fileno(), b"".join(frames))
            assert os.read(connection.fileno(), 100) == b""
    # If the supervisor had believed it, the run would end now, with status 5.
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(timeout=6)
    running.terminate()
    assert running.wait(timeout=30) == 128 + signal.SIGTERM


def test_the_output_of_an_agent_that_connects_after_ctrl_c_is_that_of_an_interrupted_rank():
    supervisor = Supervisor(1, b"key", Style(), None, lambda: None)
    port = supervisor.listen("127.0.0.1")
    supervisor.interrupt()
    supervisor.stop(10)
    with connect(["127.0.0.1"], port, b"key") as agent:
        agent.sendall(frame(Frame.HELLO, b'{"rank": 0, "host": "a"}'))
        assert agent.recv(100)  # STOP
    assert supervisor.ranks[0].output.interrupted
    supervisor.close()


def test_garbage_from_a_stranger_changes_nothing(started, mark):
    running = started()
    connections = psutil.Process(running.pid).net_connections()
    (port,) = {each.laddr.port for each in connections if each.status == "LISTEN"}
    for garbage in (b"[" * 4000, b'{"rank": Infinity, "host": "", "proof": ""}', b"x" * 5000):
        # The supervisor may hang up at any moment.
        with (
            socket.create_connection(("127.0.0.1", port)) as stranger,
            contextlib.suppress(OSError),
        ):
            stranger.sendall(frame(Frame.HELLO, garbage))
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    assert len(sleeping(mark)) == 2
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=30)
    assert errors == "hvkit run: ended by SIGTERM\n"


@pytest.mark.parametrize("seconds", [2, 30, 86400])
def test_the_kernel_gives_up_a_silent_host_after_as_many_seconds_as_the_user_says(seconds):
    with socket.socket() as connection:
        keep_alive(connection, None)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
        keep_alive(connection, seconds)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, probes = (connection.getsockopt(socket.IPPROTO_TCP, n) for n in names)
        assert idle + interval * probes == pytest.approx(seconds, abs=interval)
        limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert limit == 1000 * seconds  # with data on the way
