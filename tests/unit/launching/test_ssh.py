"""Commands on other hosts, with a stand-in for ssh whose answer depends on the host's name."""

import os
import shlex
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvkit.launching.hosts import Host
from hvkit.launching.ssh import SRUN, SSH, explain_ssh, remote_shell, run_on_hosts, ssh_command

# Its last argument is the remote command, the one before is the host.
_SSH = """
for word; do before=$last; last=$word; done
echo "$@" >> "$0.calls"
case "$before" in
  works*) exec sh -c "$last" ;;
  refuses) echo "ssh: connect to host refuses port 22: Connection refused" >&2 ;;
  hangs) sleep 60 & wait ;;
  *) echo "ssh: Could not resolve hostname $before: Name or service not known" >&2 ;;
esac
exit 255
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, first on PATH; it writes its arguments to ``ssh.calls`` beside it."""
    path = tmp_path / "ssh"
    path.write_text(f"#!/bin/sh\n{_SSH}")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return path


def test_answers_come_in_the_order_of_hosts_with_status_and_output(ssh):
    answers = run_on_hosts(
        [Host("works1"), Host("nosuch"), Host("works2")], ["sh", "-c", "echo a; exit 3"], 30
    )
    assert [answer.host.name for answer in answers] == ["works1", "nosuch", "works2"]
    assert [answer.status for answer in answers] == [3, None, 3]
    assert [answer.stdout for answer in answers] == ["a\n", "", "a\n"]
    assert answers[0].problem is None
    assert answers[1].problem is not None


def test_the_words_of_a_command_arrive_unchanged(ssh):
    words = ["a b", "$HOME", "'", '"', "*", "", "ü;|&"]
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:])", *words]
    assert run_on_hosts([Host("works")], command, 30)[0].stdout == f"{words}\n"
    assert run_on_hosts([Host("localhost")], command, 30)[0].stdout == f"{words}\n"


def test_hosts_that_cannot_be_reached_have_a_problem_with_the_fix(ssh):
    hosts = [Host("works"), Host("refuses"), Host("nosuch")]
    problems = {answer.host.name: answer.problem for answer in run_on_hosts(hosts, ["true"], 30)}
    assert problems == {
        "works": None,
        "refuses": "it is up but nothing listens on its ssh port: start sshd there, or set the "
        "Port for it in ~/.ssh/config",
        "nosuch": "its name does not resolve here: correct it, or add it to DNS or to /etc/hosts "
        "of every host",
    }


def test_a_host_that_hangs_is_given_up_and_no_process_stays_behind(ssh):
    start = time.monotonic()
    answer = run_on_hosts([Host("hangs")], ["true"], 1)[0]
    assert time.monotonic() - start < 30
    assert answer.status is None
    assert answer.problem == "`true` did not end within 1 s: is the host overloaded?"
    for _ in range(100):
        if not _children():
            return
        time.sleep(0.1)
    pytest.fail(f"still there: {_children()}")


def test_a_missing_program_is_a_problem_here_and_elsewhere(ssh):
    fix = "every host needs the same environment at the same path"
    there = run_on_hosts([Host("works")], ["/nonexistent/python"], 30)[0]
    assert there.status is None
    assert there.problem is not None
    assert there.problem.startswith("/nonexistent/python cannot be started there (")
    assert there.problem.endswith(fix)
    here = run_on_hosts([Host("localhost")], ["/nonexistent/python"], 30)[0]
    assert here.problem == "/nonexistent/python cannot be started: No such file or directory"


def test_without_ssh_the_fix_is_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = run_on_hosts([Host("nosuch.invalid")], ["true"], 30)[0]
    assert answer.problem == ("there is no ssh on this host: install it (Debian: openssh-client)")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_on_this_host_commands_run_without_ssh(ssh, name):
    answer = run_on_hosts([Host(name)], ["echo", "here"], 30)[0]
    assert (answer.status, answer.stdout, answer.problem) == (0, "here\n", None)
    assert not Path(f"{ssh}.calls").exists()


def test_ssh_prompts_for_nothing_and_forwards_nothing():
    words = ssh_command(Host("node1", user="root"), ["echo", "a b"], 30)
    options = words[: words.index("--")]
    assert words[words.index("--") :] == ["--", "node1", shlex.join(["echo", "a b"])]
    assert options[-2:] == ["-l", "root"]
    for option in (
        *("BatchMode=yes", "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes"),
        *("UpdateHostKeys=no", "ControlMaster=no", "ConnectTimeout=10"),
    ):
        assert option in options
    assert not any("StrictHostKeyChecking" in option for option in options)


def _children() -> list[str]:
    return [
        " ".join(child.cmdline())
        for child in psutil.Process().children(recursive=True)
        if "sleep" in child.name()
    ]


_HOST = Host("node1", user="root")


@pytest.mark.parametrize(
    ("stderr", "part"),
    [
        (
            "ssh: Could not resolve hostname node1: Temporary failure in name resolution\r\n",
            "its name does not resolve here",
        ),
        (
            "ssh: connect to host node1 port 22: Connection refused\r\n",
            "nothing listens on its ssh port: start sshd there",
        ),
        (
            "ssh: connect to host node1 port 22: Connection timed out\r\n",
            "nothing answers on its ssh port: is it on",
        ),
        (
            "Connection timed out during banner exchange\r\n",
            "nothing answers on its ssh port: is it on",
        ),
        (
            "ssh: connect to host node1 port 22: No route to host\r\n",
            "no route to it: is it on",
        ),
        (
            "Host key verification failed.\r\n",
            "its ssh host key is not known here: run `ssh root@node1` once",
        ),
        (
            "No ED25519 host key is known for node1 and you have requested strict checking.\r\n"
            "Host key verification failed.\r\n",
            "its ssh host key is not known here: run `ssh root@node1` once",
        ),
        (
            "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\r\n"
            "Host key verification failed.\r\n",
            "`ssh-keygen -R node1` removes the old key",
        ),
        (
            "root@node1: Permission denied (publickey,password).\r\n",
            "`ssh-copy-id root@node1` installs your key",
        ),
        (
            "kex_exchange_identification: Connection closed by remote host\r\n",
            "it closes ssh connections before login",
        ),
        (
            "/home/ann/.ssh/config: terminating, 1 bad configuration options\r\n",
            "correct ~/.ssh/config",
        ),
        ("something new\r\n", "ssh failed: something new; try `ssh root@node1 true`"),
        ("", "ssh failed: it printed nothing; try `ssh root@node1 true`"),
    ],
)
def test_each_message_of_openssh_has_a_meaning_and_a_fix(stderr, part):
    problem = explain_ssh(_HOST, 255, stderr)
    assert problem is not None
    assert part in problem


@pytest.mark.parametrize("status", [0, 1, 130])
def test_a_failing_command_is_not_a_failure_of_ssh(status):
    assert explain_ssh(_HOST, status, "Connection refused\n") is None


def test_in_slurm_commands_go_over_srun(srun):
    assert remote_shell("Slurm") is SRUN
    assert remote_shell("PBS") is SSH
    assert remote_shell(None) is SSH
    answer = run_on_hosts([Host("node1.invalid")], ["echo", "there"], 30, SRUN)[0]
    assert (answer.status, answer.stdout, answer.problem) == (0, "there\n", None)
    assert (srun / "asked").read_text() == "node1.invalid\n"


def test_in_slurm_without_srun_commands_go_over_ssh(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert remote_shell("Slurm") is SSH
