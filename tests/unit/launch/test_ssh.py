"""Commands on other hosts, with an ssh that stands in: it says what a host's name tells it to."""

import os
import shlex
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvkit.launch.hosts import Host
from hvkit.launch.ssh import ask, ssh_command

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
    """The stand-in, first on PATH; what it was called with is in ``calls`` beside it."""
    path = tmp_path / "ssh"
    path.write_text(f"#!/bin/sh\n{_SSH}")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return path


def test_answers_come_in_the_order_of_hosts_with_status_and_output(ssh):
    answers = ask(
        [Host("works1"), Host("nosuch"), Host("works2")], ["sh", "-c", "echo a; exit 3"], 30
    )
    assert [answer.host.name for answer in answers] == ["works1", "nosuch", "works2"]
    assert [answer.status for answer in answers] == [3, None, 3]
    assert [answer.stdout for answer in answers] == ["a\n", "", "a\n"]
    assert answers[0].problem is None
    assert answers[1].problem is not None


def test_words_of_the_command_arrive_as_they_are(ssh):
    words = ["a b", "$HOME", "'", '"', "*", "", "ü;|&"]
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:])", *words]
    assert ask([Host("works")], command, 30)[0].stdout == f"{words}\n"
    assert ask([Host("localhost")], command, 30)[0].stdout == f"{words}\n"


def test_hosts_that_cannot_be_reached_are_told_with_what_to_do(ssh):
    hosts = [Host("works"), Host("refuses"), Host("nosuch")]
    problems = {answer.host.name: answer.problem for answer in ask(hosts, ["true"], 30)}
    assert problems == {
        "works": None,
        "refuses": "it is there but nothing listens on its ssh port: start sshd there, or set the "
        "Port for it in ~/.ssh/config",
        "nosuch": "its name does not resolve here: correct it, or add it to DNS or to /etc/hosts "
        "of every host",
    }


def test_a_host_that_hangs_is_given_up_and_nothing_stays_behind(ssh):
    start = time.monotonic()
    answer = ask([Host("hangs")], ["true"], 1)[0]
    assert time.monotonic() - start < 30
    assert answer.status is None
    assert answer.problem == "`true` gave no answer within 1 s: is the host overloaded?"
    for _ in range(100):
        if not _children():
            return
        time.sleep(0.1)
    pytest.fail(f"still there: {_children()}")


def test_a_program_that_is_not_there_is_told_here_and_elsewhere(ssh):
    fix = "every host needs the same environment at the same path"
    there = ask([Host("works")], ["/nonexistent/python"], 30)[0]
    assert there.status is None
    assert there.problem is not None
    assert there.problem.startswith("/nonexistent/python cannot be started there (")
    assert there.problem.endswith(fix)
    here = ask([Host("localhost")], ["/nonexistent/python"], 30)[0]
    assert here.problem == "/nonexistent/python cannot be started: No such file or directory"


def test_a_host_without_ssh_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = ask([Host("nosuch.invalid")], ["true"], 30)[0]
    assert answer.problem == ("there is no ssh on this host: install it (Debian: openssh-client)")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_host_is_asked_without_ssh(ssh, name):
    answer = ask([Host(name)], ["echo", "here"], 30)[0]
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
