"""What ssh says, explained. The messages are those of OpenSSH."""

import pytest

from hvkit.launch.hosts import Host
from hvkit.launch.ssh_problems import explain

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
            "nothing answers at its ssh port: is it on",
        ),
        (
            "Connection timed out during banner exchange\r\n",
            "nothing answers at its ssh port: is it on",
        ),
        (
            "ssh: connect to host node1 port 22: No route to host\r\n",
            "no network leads there",
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
            "`ssh-keygen -R node1` forgets the old key",
        ),
        (
            "root@node1: Permission denied (publickey,password).\r\n",
            "`ssh-copy-id root@node1` puts your key there",
        ),
        (
            "kex_exchange_identification: Connection closed by remote host\r\n",
            "it closes ssh connections before login",
        ),
        (
            "/home/ann/.ssh/config: terminating, 1 bad configuration options\r\n",
            "mend ~/.ssh/config",
        ),
        ("something new\r\n", "ssh failed: something new; try `ssh root@node1 true`"),
        ("", "ssh failed: it said nothing; try `ssh root@node1 true`"),
    ],
)
def test_each_failure_of_ssh_comes_with_what_to_do(stderr, part):
    problem = explain(_HOST, 255, stderr)
    assert problem is not None
    assert part in problem


@pytest.mark.parametrize("status", [0, 1, 130])
def test_a_command_that_fails_by_itself_is_no_failure_of_ssh(status):
    assert explain(_HOST, status, "Connection refused\n") is None
