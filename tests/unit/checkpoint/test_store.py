"""The directory of checkpoints: damage, the lock, how many are kept, and other files in it."""

import errno
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from scripts import run_script

from hvkit.checkpoint import Checkpoint, Progress, store
from hvkit.checkpoint.saving import Writer


class Thing:
    """An object with a state."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "much": list(range(2000))}

    def load_state_dict(self, state):
        self.value = state["value"]


def save(directory, *steps, keep=None):
    for step in steps:
        Checkpoint(directory, keep=keep, thing=Thing(10 * step)).save(epoch=0, step=step)


def restore(directory):
    thing = Thing()
    start = Checkpoint(directory, thing=thing).restore()
    return start.step, thing.value


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def file_of(directory, pattern):
    return next(folder for folder in directory.glob("step-000000002/" + pattern))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def unlink(path):
    path.unlink()


def change_a_digit(path):
    path.write_text(path.read_text().replace('"epoch": 0', '"epoch": 7'))


@pytest.mark.parametrize(
    ("damage", "pattern", "reason"),
    [
        (cut, "thing.*", " bytes"),
        (flip, "thing.*", "its sha256 differs"),
        (unlink, "thing.*", "is missing"),
        (flip, "ranks.npz", "its sha256 differs"),
        (empty, "manifest.json", "manifest.json is not what was written"),
        (cut, "manifest.json", "manifest.json"),
        (flip, "manifest.json", "manifest.json is not what was written"),
        (unlink, "manifest.json", "manifest.json is missing"),
        (change_a_digit, "manifest.json", "its sha256 differs"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_a_log_line(damage, pattern, reason, tmp_path, capsys):
    save(tmp_path, 1, 2)
    path = file_of(tmp_path, pattern)
    damage(path)
    if (damage, pattern) == (cut, "manifest.json"):
        cut(path)  # the last character is an end of line
    assert restore(tmp_path) == (1, 10)
    log = capsys.readouterr().err
    assert f"hvkit: skipped {path.parent}: damaged: {path.name}" in log
    assert reason in log
    shutil.rmtree(tmp_path / "step-000000001")
    assert restore(tmp_path) == (0, None)
    assert "no checkpoint can be read: starts from the beginning" in capsys.readouterr().err


def test_nothing_to_restore_is_no_error_and_makes_nothing(tmp_path, capsys):
    directory = tmp_path / "none"
    assert Checkpoint(directory, thing=Thing()).restore() == Progress(epoch=0, step=0, extras={})
    assert not directory.exists()
    assert capsys.readouterr().err == ""


def test_the_newest_are_kept_by_when_they_were_saved_and_damaged_ones_go_first(tmp_path):
    save(tmp_path, 10, 20, 30, 40, keep=2)
    assert names(tmp_path) == ["step-000000030", "step-000000040"]
    save(tmp_path, 5, keep=2)  # another start in the same directory
    assert names(tmp_path) == ["step-000000005", "step-000000040"]
    assert restore(tmp_path) == (5, 50)
    empty(tmp_path / "step-000000005" / "manifest.json")
    save(tmp_path, 6, keep=2)
    assert names(tmp_path) == ["step-000000006", "step-000000040"]


def test_a_save_reads_each_manifest_once(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, 3)
    read, read_bytes = [], Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read.append(path.parent.name) or read_bytes(path)
    )
    save(tmp_path, 4)
    assert read == ["step-000000003"]  # the one before was the last
    assert restore(tmp_path) == (4, 40)


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    save(tmp_path, 1, 2)
    Checkpoint(tmp_path, thing=Thing("new")).save(epoch=0, step=1)
    assert restore(tmp_path) == (1, "new")
    assert names(tmp_path) == ["step-000000001", "step-000000002"]


def test_remains_of_killed_runs_are_cleaned_up_and_other_files_stay(tmp_path):
    save(tmp_path, 1)
    for hidden in (".saving-step-000000002", ".removing-step-000000000"):
        (tmp_path / hidden / "x").mkdir(parents=True)
    shutil.copytree(tmp_path / "step-000000001", tmp_path / "step-000000001.old")
    for other in ("notes.txt", "step-7"):
        (tmp_path / other).write_text("mine")
    save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["notes.txt", "step-000000002", "step-7"]


@pytest.mark.parametrize("damage", [cut, flip, None])
def test_a_kill_while_a_step_is_replaced_leaves_a_complete_checkpoint(tmp_path, damage):
    """Also through the next save, which cleans up."""
    save(tmp_path, 1, 2)
    folder = tmp_path / "step-000000002"
    shutil.copytree(folder, f"{folder}.old")
    (folder / "new").touch()
    if damage:
        damage(file_of(tmp_path, "thing*"))
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-000000001", "step-000000002", "step-000000003"]
    assert (folder / "new").exists() == (damage is None)
    shutil.rmtree(tmp_path / "step-000000003")
    assert restore(tmp_path) == (2, 20)


def test_files_are_on_disk_before_the_rename_and_the_rename_after(tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(handle):
        done.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def recorded_rename(old, new):
        done.append(("rename", os.path.basename(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    save(tmp_path / "runs", 1)
    parts = sorted(p.name for p in (tmp_path / "runs/step-000000001").iterdir())
    parts.remove("manifest.json")
    assert done == [
        ("fsync", tmp_path.name),
        *(("fsync", name) for name in parts),
        ("fsync", "manifest.json"),
        ("fsync", ".saving-step-000000001"),
        ("rename", "step-000000001"),
        ("fsync", "runs"),
    ]


def test_a_full_disk_is_an_error_that_names_folder_and_reason(tmp_path):
    save(tmp_path, 1)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, old[1]))
    try:
        with pytest.raises(OSError, match="cannot write the checkpoint: File too large") as caught:
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert caught.value.filename == str(tmp_path / "step-000000002")
    assert caught.value.errno == errno.EFBIG
    assert names(tmp_path) == ["step-000000001"]
    assert restore(tmp_path) == (1, 10)


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(OSError, match="runs"):
        save(tmp_path / "runs", 1)


# A fork of the run lives on, as a worker of its data would.
HOLDS = """
import os, sys, time
from pathlib import Path
from hvkit.checkpoint import store
store.prepare(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


def test_a_second_run_in_the_same_directory_gets_an_error_until_the_first_is_killed(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    fork = int(first.stdout.readline())
    try:
        for _ in range(2):  # the first attempt leaves the owner's name in the file
            with pytest.raises(BlockingIOError, match=f"process {first.pid} on .* give every run"):
                save(tmp_path, 1)
        assert restore(tmp_path) == (0, None)
        first.kill()
        first.wait(timeout=10)
        save(tmp_path, 1)
        os.kill(fork, 0)  # still runs
    finally:
        os.kill(fork, signal.SIGKILL)
        first.communicate(timeout=10)
    assert restore(tmp_path) == (1, 10)


def test_a_directory_that_was_deleted_and_created_again_is_locked_again(tmp_path):
    directory = tmp_path / "runs"
    save(directory, 1)
    shutil.rmtree(directory)
    save(directory, 2)
    assert f"process {os.getpid()} on " in run_script(HOLDS, directory).stderr
    assert restore(directory) == (2, 20)


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL])
def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch, reason):
    def flock(handle, operation):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", flock)
    save(tmp_path, 1, 2)
    assert restore(tmp_path) == (2, 20)


@pytest.fixture
def nfs(monkeypatch):
    """Files that another process reads on NFS: when deleted, they stay under another name."""
    read, unlink = set(), os.unlink

    def unlink_on_nfs(path, *, dir_fd=None):
        name = os.path.basename(path)
        if name.startswith(".nfs"):
            if name in read:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), name)
        elif name in read:
            silly = f".nfs{len(read):04}"
            os.rename(path, os.path.join(os.path.dirname(path), silly), src_dir_fd=dir_fd,
                      dst_dir_fd=dir_fd)  # fmt: skip
            read.add(silly)
            return
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_on_nfs)
    return read


def test_an_old_one_that_is_read_elsewhere_goes_with_the_first_save_after_that(
    tmp_path, nfs, capsys
):
    save(tmp_path, 1, keep=1)
    nfs.add("ranks.npz")
    save(tmp_path, 2, keep=1)
    log = capsys.readouterr().err
    assert f"cannot delete {tmp_path}/.removing-step-000000001 now" in log
    assert "the next save tries again: [Errno 39] Directory not empty" in log
    assert restore(tmp_path) == (2, 20)
    (left,) = tmp_path.glob(".removing-*/*")
    assert left.name.startswith(".nfs")

    nfs.remove("ranks.npz")  # no others are opened
    save(tmp_path, 3, keep=1)
    assert "cannot delete" not in capsys.readouterr().err, "it is logged once"
    assert names(tmp_path) == [".removing-step-000000001", "step-000000003"]
    assert restore(tmp_path) == (3, 30)

    nfs.clear()
    save(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step-000000004"]


def test_a_step_whose_older_folder_is_read_elsewhere_is_replaced_again_and_again(tmp_path, nfs):
    save(tmp_path, 1)
    nfs.add("ranks.npz")
    for value in ("a", "b", "c"):
        Checkpoint(tmp_path, thing=Thing(value)).save(epoch=0, step=1)
        assert restore(tmp_path) == (1, value)
    nfs.clear()
    save(tmp_path, 1)
    assert names(tmp_path) == ["step-000000001"]


def test_an_old_one_that_cannot_even_be_renamed_is_left_to_the_next_save(
    tmp_path, monkeypatch, capsys
):
    save(tmp_path, 1, keep=1)
    rename = os.rename

    def refused(old, new):
        if os.path.basename(old) == "step-000000001":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(old))
        rename(old, new)

    monkeypatch.setattr(os, "rename", refused)
    save(tmp_path, 2, keep=1)
    assert f"cannot delete {tmp_path}/step-000000001 now" in capsys.readouterr().err
    assert restore(tmp_path) == (2, 20)
    monkeypatch.undo()
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-000000003"]


def test_one_that_this_user_may_not_read_is_skipped_only_where_others_are_wanted(
    tmp_path, monkeypatch
):
    save(tmp_path, 1)
    save(tmp_path, 2)
    read_bytes = Path.read_bytes

    def refused(path):
        if path.parent.name == "step-000000002":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    skipped = []
    found = store.readable(tmp_path, lambda folder, why: skipped.append((folder.name, why)))
    with pytest.raises(PermissionError):
        next(found)
    assert skipped == []
    found = store.readable(tmp_path, lambda folder, why: skipped.append(folder.name), strict=False)
    assert [folder.name for folder, _ in found] == ["step-000000001"]
    assert skipped == ["step-000000002"]
    with pytest.raises(PermissionError):
        restore(tmp_path)


def test_remains_of_a_killed_run_that_are_read_elsewhere_do_not_stop_a_save(tmp_path, nfs):
    for hidden in (".saving-step-000000002", ".removing-step-000000001"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "ranks.npz").touch()
    nfs.add("ranks.npz")
    save(tmp_path, 2)
    assert restore(tmp_path) == (2, 20)


def test_a_wait_that_is_interrupted_forgets_no_write(tmp_path):
    writer = Writer(tmp_path, None, background=True, replicas=None)
    main, waits, goes_on = threading.get_ident(), threading.Event(), threading.Event()

    def write():
        waits.wait(60)
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)
        goes_on.wait(60)
        raise OSError(errno.ENOSPC, "No space left on device")

    writer.start(write)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        waits.set()
        writer.wait()
    goes_on.set()
    with pytest.raises(OSError, match="No space"):
        writer.wait()
    writer.wait()
