"""``hvkit run`` on several hosts starts ranks, refuses wrong hosts, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
from cases import MORE, cases

HVKIT = [sys.executable, "-m", "hvkit", "run"]
HOSTS = ["-np", "4", "-H", "node1:1,node2:2,node3:1"]
# Endless allreduces. Each rank prints the first sum: then all ranks are known to be up.
ALLREDUCE = """
import sys, time, torch, horovod.torch as hvd
hvd.init()
print(f"sum {hvd.allreduce(torch.ones(1), op=hvd.Sum).item()}", flush=True)
try:
    while True:
        hvd.allreduce(torch.ones(1000), name="again")
        time.sleep(0.01)
except KeyboardInterrupt:
    # Longer than mpirun and horovodrun wait for a rank after another has ended.
    time.sleep(8 * hvd.rank() / hvd.size())
    print("interrupted", flush=True)
    sys.exit(3)
"""


@pytest.fixture
def hosts(rig):
    """Three hosts, each with a docker0 of the same address, which leads nowhere."""
    return rig(["node1", "node2", "node3"])


def run(hosts, *words, **options):
    return hosts.host("node1").run([*HVKIT, *words], timeout=120, **options)


class Training:
    """A run of ``hvkit run`` that goes on until something ends it."""

    def __init__(self, hosts, folder, *options):
        self.hosts = hosts
        self.log = folder / "log"
        # As in a terminal: a shell may have started the tests in the background, ignoring Ctrl-C.
        terminal = ["env", "--default-signal=INT"]
        words = [*terminal, *HVKIT, *options, *HOSTS, sys.executable, "-c", ALLREDUCE]
        with self.log.open("wb") as log:
            self.process = hosts.host("node1").popen(words, stdout=log, stderr=log)
        wait_until(lambda: self.output.count("sum 4.0") == 4, lambda: self.output, seconds=240)

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def find(self, host, *words):
        """The last process of a host with all these words in its command line."""
        processes = self.hosts.host(host).processes()
        return [p for p in processes if all(word in p.command for word in words)][-1].pid

    def ended(self):
        """Wait until no process is left on any host; return the output and the exit status."""
        wait_until(self.gone, self.left, seconds=60)
        return self.output, self.process.wait(timeout=10)

    def gone(self):
        return not any(host.processes() for host in self.hosts.hosts)

    def left(self):
        return {host.name: host.processes() for host in self.hosts.hosts}


def wait_until(condition, describe, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds} seconds: {describe()}"
        time.sleep(0.1)


def test_a_killed_rank_on_another_host_is_named_and_everything_ends(hosts, tmp_path):
    training = Training(hosts, tmp_path)
    os.kill(training.find("node2", "hvd.init", f"{sys.executable} -c"), signal.SIGKILL)
    output, status = training.ended()
    assert "on node2 was killed by signal 9 (SIGKILL)" in output
    assert status == 128 + signal.SIGKILL


@MORE
@pytest.mark.parametrize("launcher", ["mpirun", "gloo"])
def test_a_killed_launcher_is_named_and_everything_ends(hosts, tmp_path, launcher):
    training = Training(hosts, tmp_path, "--launcher", launcher)
    name = {"mpirun": "bin/prterun", "gloo": "bin/horovodrun"}[launcher]
    os.kill(training.find("node1", name), signal.SIGKILL)
    output, status = training.ended()
    assert "was killed by SIGKILL" in output
    assert status == 128 + signal.SIGKILL


@MORE
def test_when_hvkit_run_itself_is_killed_everything_ends(hosts, tmp_path):
    training = Training(hosts, tmp_path)
    training.process.kill()
    training.ended()


def test_a_host_that_is_cut_off_is_named_and_everything_ends_on_both_sides(hosts, tmp_path):
    training = Training(hosts, tmp_path, "--lost-after", "5")
    hosts.cut("node2")
    output, status = training.ended()
    assert "no sign of life from node2 (ranks 1-2): it or the network is down" in output
    assert status == 1


@MORE
def test_output_that_is_read_late_is_no_sign_of_a_lost_host(hosts):
    words = [*HVKIT, "--lost-after", "2", *HOSTS, "head", "-c", "3000000", "/dev/zero"]
    # Without stderr: Open MPI prints warnings on a busy machine.
    running = hosts.host("node1").popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    # Like a pager: the ranks print far more than the buffers in between can hold.
    time.sleep(8)
    out, _ = running.communicate(timeout=120)
    assert out == bytes(4 * 3_000_000)
    assert running.returncode == 0


@MORE
def test_hosts_are_not_given_up_when_this_process_was_stopped(hosts, tmp_path):
    chatter = "i=0; while [ $i -lt 600 ]; do i=$((i + 1)); echo $i; sleep 0.02; done"
    words = [*HVKIT, "--lost-after", "2", *HOSTS, "sh", "-c", chatter]
    with (tmp_path / "log").open("wb") as log:
        running = hosts.host("node1").popen(words, stdout=log, stderr=subprocess.DEVNULL)
    output = (tmp_path / "log").read_text
    wait_until(lambda: output().split().count("1") == 4, output, seconds=120)
    running.send_signal(signal.SIGSTOP)
    time.sleep(6)
    running.send_signal(signal.SIGCONT)
    assert running.wait(timeout=120) == 0
    assert sorted(map(int, output().split())) == sorted([*range(1, 601)] * 4)


def test_a_host_may_be_silent_for_as_long_as_the_user_says(hosts):
    done = run(hosts, "--lost-after", "86400", *HOSTS, "hostname")
    assert sorted(done.stdout.split()) == ["node1", "node2", "node2", "node3"]


@MORE
def test_when_this_host_is_cut_off_its_own_network_is_named(hosts, tmp_path):
    training = Training(hosts, tmp_path, "--lost-after", "5")
    hosts.cut("node1")
    output, _ = training.ended()
    assert "no sign of life from any other host" in output
    assert "this host's network is down" in output


@MORE
def test_a_signal_ends_every_process_on_every_host(hosts, tmp_path):
    training = Training(hosts, tmp_path)
    training.process.send_signal(signal.SIGTERM)
    output, status = training.ended()
    assert "hvkit run: ended by SIGTERM" in output
    assert status == 128 + signal.SIGTERM


@pytest.mark.parametrize("launcher", cases(["mpirun", "gloo"]))
def test_a_ctrl_c_interrupts_every_rank_on_every_host(hosts, tmp_path, launcher):
    training = Training(hosts, tmp_path, "--launcher", launcher)
    training.process.send_signal(signal.SIGINT)
    output, status = training.ended()
    assert output.count("interrupted\n") == 4
    assert "hvkit run: ended by SIGINT" in output
    assert status == 128 + signal.SIGINT


@MORE
def test_a_gap_in_the_network_is_outlived(hosts, tmp_path):
    go_on = tmp_path / "go on"
    waits = f"echo up; until [ -e '{go_on}' ]; do sleep 0.1; done; echo done"
    with (tmp_path / "log").open("wb") as log:
        words = [*HVKIT, *HOSTS, "sh", "-c", waits]
        running = hosts.host("node1").popen(words, stdout=log, stderr=subprocess.DEVNULL)
    output = (tmp_path / "log").read_text
    wait_until(lambda: output().split() == ["up"] * 4, output, seconds=120)
    hosts.cut("node2")
    time.sleep(8)
    hosts.heal("node2")
    go_on.touch()
    assert running.wait(timeout=120) == 0
    assert output().split() == ["up"] * 4 + ["done"] * 4


def test_a_rank_that_fails_on_another_host_is_shown_with_its_last_lines(hosts):
    script = "import os; 1 / (2 - int(os.environ['OMPI_COMM_WORLD_RANK']))"
    done = run(hosts, *HOSTS, sys.executable, "-c", script)
    assert done.returncode == 1
    assert "hvkit run: rank 2 on node2 ended with exit status 1; its last lines:" in done.stderr
    assert "    ZeroDivisionError" in done.stderr


def test_the_environment_goes_along_but_for_secrets(hosts):
    script = "echo $NCCL_DEBUG-$MY_TOKEN-$MINE-$GIVEN-$NCCL_SOCKET_IFNAME."
    done = run(
        hosts,
        *("-np", "1", "-H", "node2:1", "-x", "MINE", "-x", "GIVEN=g v", "sh", "-c", script),
        env={"NCCL_DEBUG": "INFO", "MY_TOKEN": "t", "MINE": "m"},
    )
    assert done.stdout == "INFO--m-g v-=eth0.\n"


def test_lines_get_rank_and_host_and_each_rank_a_file(hosts, tmp_path):
    logs = tmp_path / "logs"
    script = "echo out; echo err >&2"
    done = run(hosts, *HOSTS, "--prefix", "--log-dir", str(logs), "sh", "-c", script)
    expected = {"[0 node1] out", "[1 node2] out", "[2 node2] out", "[3 node3] out"}
    assert set(done.stdout.splitlines()) == expected
    files = {each.name: each.read_text() for each in logs.iterdir()}
    # Open MPI says at times that an ssh it has started was quicker than itself, which does no harm.
    for line in files.pop("launcher.log", "").splitlines():
        assert "plm:ssh: Warning: setpgid(" in line
    assert files.keys() == {f"rank-000{rank}.log" for rank in range(4)}
    assert files["rank-0003.log"].split("\n").count("[3 node3] err") == 1


@pytest.mark.parametrize("launcher", cases(["mpirun", "gloo"]))
def test_only_the_ranks_that_are_wanted_are_shown(hosts, tmp_path, launcher):
    logs = tmp_path / "logs"
    options = ["--launcher", launcher, "--show", "0,2-3", "--log-dir", str(logs)]
    # Rank 1 is the first of node2.
    script = "echo out; echo err >&2"
    done = run(hosts, *HOSTS, *options, "--prefix", "sh", "-c", script)
    assert set(done.stdout.splitlines()) == {"[0 node1] out", "[2 node2] out", "[3 node3] out"}
    assert "[1 node2]" not in done.stderr
    assert sorted((logs / "rank-0001.log").read_text().splitlines()) == [
        "[1 node2] err",
        "[1 node2] out",
    ]
    output = run(hosts, *HOSTS, "--show", "4", "true").stderr
    assert output == "hvkit: --show 4: there is no such rank: use ranks from 0 to 3\n"


def test_a_dry_run_starts_nothing_and_its_line_does_what_the_run_does(hosts, tmp_path):
    mark = tmp_path / "mark"
    command = ["sh", "-c", f"hostname >> {mark}"]
    line = run(hosts, *HOSTS, "--dry-run", *command).stdout
    assert not mark.exists()
    assert hosts.host("node1").run(["sh", "-c", line], timeout=60).returncode == 0
    assert sorted(mark.read_text().split()) == ["node1", "node2", "node2", "node3"]


def fails_before_the_start(hosts, tmp_path, *options, status=1):
    mark = tmp_path / "started"
    done = run(hosts, *options, "touch", str(mark))
    assert done.returncode == status
    assert not mark.exists()
    return done.stderr


def test_more_ranks_than_slots_are_refused(hosts, tmp_path):
    output = fails_before_the_start(hosts, tmp_path, "-np", "5", *HOSTS[2:], status=2)
    assert output == (
        "hvkit: -np 5 is more than the 4 slots of the hosts (node1 1, node2 2, node3 1): start at "
        "most -np 4, or add slots\n"
    )


def test_a_host_named_twice_is_refused_by_name_and_by_what_it_is(hosts, tmp_path):
    output = fails_before_the_start(hosts, tmp_path, "-H", "node1:1,node2:1,NODE2:2", status=2)
    assert (
        "-H: host 3: NODE2 is named again after host 2: name it once, with all its slots" in output
    )
    output = fails_before_the_start(hosts, tmp_path, "-H", "node2:1,10.77.0.2:1")
    assert "node2 and 10.77.0.2 are the same host, node2" in output


def test_hosts_that_cannot_be_reached_are_all_named(hosts, tmp_path):
    hosts.cut("node2")
    output = fails_before_the_start(hosts, tmp_path, "-H", "node1:1,node2:1,node4:1")
    assert "nothing was started" in output
    assert "\n  node2: " in output
    assert "\n  node4: its name does not resolve" in output


def test_a_working_directory_that_another_host_lacks_is_named(hosts, tmp_path):
    # Below /run, of which each host has its own.
    folder = "/run/only-here"
    hosts.host("node1").run(["mkdir", folder]).check_returncode()
    done = run(hosts, "-H", "node1:1,node2:1", "true", cwd=folder)
    assert done.returncode == 1
    assert f"node2: has no folder {folder}" in done.stderr


def test_output_of_many_ranks_arrives_in_whole_lines(hosts):
    script = "for i in $(seq 200); do printf 'rank '; printf '%s ' $i; echo end; done"
    done = run(hosts, *HOSTS, "sh", "-c", script)
    assert sorted(done.stdout.splitlines()) == sorted(
        f"rank {i} end" for i in range(1, 201) for _ in range(4)
    )


def test_ranks_have_no_standard_input(hosts):
    assert run(hosts, *HOSTS, "cat", input="to nobody\n").stdout == ""


@MORE
def test_a_pipe_that_closes_ends_the_run(hosts, tmp_path):
    words = [*HVKIT, "-np", "2", "-H", "node1:1,node2:1", "sh", "-c", "while :; do echo y; done"]
    process = hosts.host("node1").popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.wait(timeout=60) != 0
    wait_until(lambda: not hosts.host("node2").processes(), hosts.host("node2").processes, 30)
