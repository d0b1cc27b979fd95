"""How containers of the image reach each other, and whom they let in."""

import pytest
from containers import containers, keys_in_a_secret, keys_in_a_volume

# A server on node2 that does not hold the key that the containers share.
_IMPOSTOR = """
ssh-keygen -q -t ed25519 -N '' -f /tmp/other
sed 's|^HostKey .*|HostKey /tmp/other|' ~/.sshd_config > /tmp/config
exec /usr/sbin/sshd -D -f /tmp/config
"""


@pytest.fixture(params=[keys_in_a_volume, keys_in_a_secret], ids=["volume", "secret"])
def keys(request, tmp_path):
    return request.param(tmp_path / "keys")


@pytest.fixture
def pair(image, keys):
    """Two containers, with their ssh servers."""
    with containers(image, ["node1", "node2"], keys) as (node1, node2):
        node1.serve()
        node2.serve()
        yield node1, node2


def test_any_container_logs_in_on_any_other_and_finds_mpirun(pair):
    node1, node2 = pair
    assert node1.output("ssh", "node2", "hostname; id -un; command -v mpirun prted").split() == [
        *("node2", "hvkit", "/opt/venv/bin/mpirun", "/opt/venv/bin/prted")
    ]
    assert node2.output("ssh", "node1", "hostname") == "node1"


def test_a_container_is_known_by_its_address_as_well(pair):
    node1, _ = pair
    assert node1.output("ssh", "10.77.0.2", "hostname") == "node2"


def test_the_server_is_not_root(pair):
    node1, _ = pair
    servers = "$PPID $(ps -o ppid= -p $PPID)"
    users = node1.output("ssh", "node2", f"for id in {servers}; do ps -o user=,comm= -p $id; done")
    assert users.split() == ["hvkit", "sshd"] * 2


def test_healthy_where_others_can_log_in(pair, image):
    node1, _ = pair
    assert node1.output(*image.settings["Healthcheck"]["Test"][1:]).startswith("hvkit ")


def test_a_server_without_the_shared_key_is_refused(image, keys):
    with containers(image, ["node1", "node2"], keys) as (node1, node2):
        node2.start("bash", "-ec", _IMPOSTOR)
        node2.wait_for_server()
        done = node1.run("ssh", "-o", "LogLevel=INFO", "node2", "hostname")
        assert done.returncode == 255
        assert "Host key verification failed" in done.stderr
        assert done.stdout == ""


def test_unhealthy_where_the_server_does_not_let_others_in(image, keys):
    check = image.settings["Healthcheck"]["Test"][1:]
    with containers(image, ["node1"], keys) as (node1,):
        assert node1.output(*check).startswith("hvkit ")
        node1.start("bash", "-ec", _IMPOSTOR)
        node1.wait_for_server()
        assert node1.run(*check).returncode == 255


def test_without_a_key_the_server_says_what_is_missing(image):
    with containers(image, ["node1"]) as (node1,):
        done = node1.run("hvkit-sshd")
        assert done.returncode == 1
        assert done.stderr == (
            "hvkit-sshd: no readable ~/.ssh/id_rsa: mount the key that all containers of the run "
            "share at /home/hvkit/.ssh; hvkit-ssh-key makes one there\n"
        )


def test_a_key_can_be_made_in_the_image_and_is_made_once(image):
    with containers(image, ["node1"]) as (node1,):
        node1.output("hvkit-ssh-key")
        made = node1.output("cat", ".ssh/id_rsa.pub")
        node1.output("hvkit-ssh-key")
        assert node1.output("cat", ".ssh/id_rsa.pub") == made
        node1.serve()
        assert node1.output("ssh", "node1", "hostname") == "node1"
