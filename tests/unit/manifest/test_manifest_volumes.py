"""Volumes that are accepted, and those that are not."""

from pathlib import PurePosixPath

import pytest

from hvkit.manifest.volumes import Volume, volume


@pytest.mark.parametrize(
    ("claim", "path"),
    [
        ("data", "/data"),
        ("results.of-team1", "/home/hvkit/runs"),
        ("a" * 253, "/a b/c"),
        ("a" * 100, "/usr/local/share/data"),
        ("a", "/dev/shmem"),
    ],
)
def test_a_claim_and_a_path_are_accepted(claim: str, path: str) -> None:
    assert volume(f"{claim}:{path}") == Volume(claim, PurePosixPath(path))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be CLAIM:PATH, such as datasets:/data, got ''"),
        ("/data", "must be CLAIM:PATH"),
        (":/data", "lower-case letters, digits, `-` and `.`, .*got ''"),
        ("Data:/data", "lower-case letters"),
        ("a..b:/data", "lower-case letters"),
        ("-a:/data", "lower-case letters"),
        ("a_b:/data", "lower-case letters"),
        ("a\n:/data", "lower-case letters"),
        ("a" * 254 + ":/data", "at most 253"),
        ("a:", "PATH must be absolute, such as /data, .*got ''"),
        ("a:data", "PATH must be absolute"),
        ("a:/data/../etc", "no `..`"),
        ("a:/data/", "no `/` too many"),
        ("a://data", "no `/` too many"),
        ("a:/./data", "PATH must be absolute"),
        ("a:/data:ro", "no `:`"),
        ("a:/da\nta", "PATH must be printable"),
    ],
)
def test_anything_else_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        volume(text)


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("/dev/shm", "/dev/shm"),
        ("/dev/shm/data", "/dev/shm"),
        ("/dev", "/dev/shm"),
        ("/", "/home/hvkit/.ssh"),
        ("/home/hvkit", "/home/hvkit/.ssh"),
        ("/home/hvkit/.ssh", "/home/hvkit/.ssh"),
        ("/etc/mpi", "/etc/mpi"),
        ("/opt", "/opt/venv"),
        ("/usr", "/usr/bin"),
        ("/proc/1", "/proc"),
    ],
)
def test_a_path_that_pods_need_otherwise_is_refused(path: str, taken: str) -> None:
    with pytest.raises(ValueError, match=f"PATH {path} is in the way of {taken}, which the pods"):
        volume(f"data:{path}")
