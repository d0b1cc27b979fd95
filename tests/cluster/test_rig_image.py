"""Hosts that have the file system of an image."""

import shutil
from pathlib import Path

import pytest
from probes import said
from rig import RigError

NAMES = ["node1", "node2"]
UID = 4321


@pytest.fixture
def image(tmp_path):
    """A folder, and what to bind there, that make a file system with a user ``trainer``."""
    root = tmp_path / "image"
    shutil.copytree("/etc", root / "etc", symlinks=True)
    with (root / "etc/passwd").open("a") as passwd:
        passwd.write(f"trainer:x:{UID}:{UID}::/home/trainer:/bin/sh\n")
    with (root / "etc/shadow").open("a") as shadow:
        shadow.write("trainer:!:20000:0:99999:7:::\n")
    (root / "root").mkdir()
    (root / "home/trainer").mkdir(parents=True)
    shutil.chown(root / "home/trainer", UID, UID)
    binds = {"/usr": "/usr"}
    for name in ("/bin", "/lib", "/lib64", "/sbin"):
        if Path(name).is_symlink():
            (root / name[1:]).symlink_to(Path(name).readlink())
        elif Path(name).exists():
            binds[name] = name
    return root, binds


def test_hosts_have_the_images_files_and_keep_to_themselves_what_they_write(rig, image):
    root, binds = image
    (root / "release").write_text("of the image\n")
    one, other = rig(NAMES, root=root, binds=binds).hosts
    said(one, "sh", "-c", "echo changed > /release; touch /new /dev/shm/new")
    assert said(one, "cat", "/release") == "changed\n"
    assert said(other, "cat", "/release") == "of the image\n"
    assert other.run(["ls", "/new", "/dev/shm/new"]).stdout == ""
    assert (root / "release").read_text() == "of the image\n"
    assert not (root / "new").exists()


def test_hosts_see_what_is_bound_and_cannot_write_there(rig, image, tmp_path):
    root, binds = image
    (tmp_path / "data").mkdir()
    (tmp_path / "data/sample").write_text("1\n")
    (tmp_path / "notes").write_text("2\n")
    binds |= {str(tmp_path / "data"): "/data/here", str(tmp_path / "notes"): "/notes"}
    (host,) = rig(["alone"], root=root, binds=binds).hosts
    assert said(host, "cat", "/data/here/sample", "/notes") == "1\n2\n"
    for target in ("/data/here/sample", "/notes"):
        assert "Read-only" in host.run(["sh", "-c", f"echo 3 > {target}"]).stderr
    assert not (root / "data").exists()


def test_a_user_of_the_image_logs_in_everywhere_without_a_password_set(rig, image):
    root, binds = image
    one, other = rig(NAMES, root=root, binds=binds, user="trainer").hosts
    assert said(one, "sh", "-c", "id --user; pwd") == f"{UID}\n/home/trainer\n"
    for host in (one, other):
        assert said(host, "ssh", "node2", "id --user; pwd; uname --nodename") == (
            f"{UID}\n/home/trainer\nnode2\n"
        )


def test_the_machines_own_root_can_be_the_image(rig):
    one, other = rig(NAMES, root="/").hosts
    said(one, "touch", "/rig-test")
    assert other.run(["ls", "/rig-test"]).returncode != 0
    assert not Path("/rig-test").exists()
    assert said(other, "ssh", "node1", "ls /rig-test") == "/rig-test\n"
    assert "python" not in {process.command for process in one.processes()}


def test_binds_that_cannot_be_made_say_why(rig, image):
    root, binds = image
    with pytest.raises(RigError, match="binds: /nowhere is not on this machine"):
        rig(NAMES, root=root, binds=binds | {"/nowhere": "/data"})
    with pytest.raises(RigError, match="binds: without root"):
        rig(NAMES, binds={"/tmp": "/data"})
