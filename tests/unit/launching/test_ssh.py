"""Commands on other hosts, with a stand-in for ssh whose answer depends on the host's name."""

import os
import shlex
import socket
import sys
from pathlib import Path

import psutil
import pytest
from cases import MORE

from hvkit.launching.hosts import Host
from hvkit.launching.ssh import SRUN, SSH, explain_ssh, remote_shell, run_on_hosts, ssh_command

# Its last argument is the remote command, the one before is the host.
STAND_IN = """#!/bin/sh
for word; do before=$last; last=$word; done
echo "$@" >> "$0.calls"
case "$before" in
  works*) exec sh -c "$last" ;;
  refuses) echo "ssh: connect to host refuses port 22: Connection refused" >&2 ;;
  hangs) sleep 60 & echo $! > "$0.pid"; wait ;;
  *) echo "ssh: Could not resolve hostname $before: Name or service not known" >&2 ;;
esac
exit 255
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """The stand-in, first on PATH; it writes its arguments to ``ssh.calls`` beside it."""
    path = tmp_path / "ssh"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return path


def answers(names, *command, timeout=30):
    return run_on_hosts([Host(name) for name in names], command, timeout)


def test_answers_come_in_the_order_of_hosts_with_status_output_or_problem_and_fix(ssh):
    found = answers(["works1", "nosuch", "works2", "refuses"], "sh", "-c", "echo a; exit 3")
    assert [each.host.name for each in found] == ["works1", "nosuch", "works2", "refuses"]
    assert [each.status for each in found] == [3, None, 3, None]
    assert [each.stdout for each in found] == ["a\n", "", "a\n", ""]
    assert [each.problem for each in found] == [
        None,
        "its name does not resolve here: correct it, or add it to DNS or to /etc/hosts of every "
        "host",
        None,
        "it is up but nothing listens on its ssh port: start sshd there, or set the Port for it "
        "in ~/.ssh/config",
    ]


def test_the_words_of_a_command_arrive_unchanged(ssh):
    words = ["a b", "$HOME", "'", '"', "*", "", "ü;|&"]
    show = [sys.executable, "-c", "import sys; print(sys.argv[1:])", *words]
    found = answers(["works", "localhost"], *show)
    assert [each.stdout for each in found] == [f"{words}\n"] * 2


@MORE
def test_a_host_that_hangs_is_given_up_and_no_process_stays_behind(ssh):
    (answer,) = answers(["hangs"], "true", timeout=1)
    assert answer.status is None
    assert answer.problem == "`true` did not end within 1 s: is the host overloaded?"
    psutil.wait_procs([psutil.Process(int(Path(f"{ssh}.pid").read_text()))], timeout=30)
    assert not psutil.pid_exists(int(Path(f"{ssh}.pid").read_text()))


def test_a_missing_program_is_a_problem_here_and_elsewhere(ssh):
    there, here = answers(["works", "localhost"], "/nonexistent/python")
    assert (there.status, here.status) == (None, None)
    assert there.problem.startswith("/nonexistent/python cannot be started there (")
    assert there.problem.endswith("every host needs the same environment at the same path")
    assert here.problem == "/nonexistent/python cannot be started: No such file or directory"


def test_without_ssh_the_fix_is_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (answer,) = answers(["nosuch.invalid"], "true")
    assert answer.problem == "there is no ssh on this host: install it (Debian: openssh-client)"


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_on_this_host_commands_run_without_ssh(ssh, name):
    (answer,) = answers([name], "echo", "here")
    assert (answer.status, answer.stdout, answer.problem) == (0, "here\n", None)
    assert not Path(f"{ssh}.calls").exists()


def test_ssh_prompts_for_nothing_and_forwards_nothing():
    words = ssh_command(Host("node1", user="root"), ["echo", "a b"], 30)
    options = words[: words.index("--")]
    assert words[words.index("--") :] == ["--", "node1", shlex.join(["echo", "a b"])]
    assert options[-2:] == ["-l", "root"]
    assert {
        *("BatchMode=yes", "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes"),
        *("UpdateHostKeys=no", "ControlMaster=no", "ConnectTimeout=10"),
    } <= {*options}
    assert not any("StrictHostKeyChecking" in option for option in options)


UNKNOWN_KEY = "its ssh host key is not known here: run `ssh root@node1` once"
AT_PORT = "ssh: connect to host node1 port 22:"


@pytest.mark.parametrize(
    ("stderr", "part"),
    [
        ("ssh: Could not resolve hostname node1: Temporary failure", "name does not resolve here"),
        (f"{AT_PORT} Connection refused", "nothing listens on its ssh port: start sshd there"),
        (f"{AT_PORT} Connection timed out", "nothing answers on its ssh port: is it on"),
        ("Connection timed out during banner exchange", "nothing answers on its ssh port: is it"),
        (f"{AT_PORT} No route to host", "no route to it: is it on"),
        ("Host key verification failed.", UNKNOWN_KEY),
        ("No ED25519 host key is known for node1 and you have requested strict", UNKNOWN_KEY),
        (
            "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\r\n"
            "Host key verification failed.",
            "`ssh-keygen -R node1` removes the old key",
        ),
        (
            "root@node1: Permission denied (publickey,password).",
            "`ssh-copy-id root@node1`",
        ),
        ("kex_exchange_identification: Connection closed by remote host", "before login"),
        ("/home/ann/.ssh/config: terminating, 1 bad configuration", "correct ~/.ssh/config"),
        ("something new", "ssh failed: something new; try `ssh root@node1 true`"),
        ("", "ssh failed: it printed nothing; try `ssh root@node1 true`"),
    ],
)
def test_each_message_of_openssh_has_a_meaning_and_a_fix(stderr, part):
    host = Host("node1", user="root")
    assert part in explain_ssh(host, 255, f"{stderr}\r\n")
    for status in (0, 1, 130):  # of a command that ran
        assert explain_ssh(host, status, f"{stderr}\r\n") is None


def test_in_slurm_commands_go_over_srun_if_it_is_there(srun, monkeypatch, tmp_path):
    assert remote_shell("Slurm") is SRUN
    assert remote_shell("PBS") is SSH
    assert remote_shell(None) is SSH
    answer = run_on_hosts([Host("node1.invalid")], ["echo", "there"], 30, SRUN)[0]
    assert (answer.status, answer.stdout, answer.problem) == (0, "there\n", None)
    assert (srun / "asked").read_text() == "node1.invalid\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert remote_shell("Slurm") is SSH
