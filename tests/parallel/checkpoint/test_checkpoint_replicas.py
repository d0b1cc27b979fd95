"""Copies of checkpoints in the memory of other hosts: here every rank plays a host."""

import os
import shutil

import pytest
from cases import MORE
from hosts import as_if_on, begin, state, train
from ranks import identical

import hvkit
from hvkit.checkpoint import store
from hvkit.host import run_reports


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """This host's memory, of a run that can be started again."""
    return as_if_on(tmp_path, monkeypatch)


def names(folder):
    return sorted(path.name for path in folder.glob("*/step-*"))


@MORE
@pytest.mark.parametrize(
    ("lost", "background"), [("directory", True), ("newest", False), ("nothing", False)]
)
def test_memory_has_what_the_directory_lacks(lost, background, folder, memory):
    model, optimizer, checkpoint = begin(folder, replicas=1, background=background)
    for step in (1, 2):
        train(model, optimizer, step)
        checkpoint.save(epoch=0, step=step, extras={"step": step})
    checkpoint.wait()
    kept, files = state(model), {}
    hvkit.barrier()
    if hvkit.rank() == 0:
        files = {path.name: path.read_bytes() for path in (folder / store.name_of(2)).iterdir()}
        if lost == "directory":
            shutil.rmtree(folder)
        elif lost == "newest":
            shutil.rmtree(folder / store.name_of(2))
        else:  # one that is cut short comes again
            os.truncate(folder / store.name_of(2) / "model.pt", 0)
    hvkit.barrier()
    assert names(memory) == ([store.name_of(2)] if hvkit.rank() == 1 else [])
    model, optimizer, checkpoint = begin(folder, replicas=1)
    start = checkpoint.restore()
    assert (start.step, start.extras) == (2, {"step": 2})
    assert start.folder == folder / store.name_of(2)
    assert identical(kept, state(model))
    if hvkit.rank() == 0:
        found = {path.name: path.read_bytes() for path in start.folder.iterdir()}
        if lost == "nothing":  # what was written again has a serial above the old one's
            del found[store.MANIFEST], files[store.MANIFEST]
        assert found == files
    # The next one is newer than any before, wherever it is.
    train(model, optimizer, 3)
    checkpoint.save(epoch=0, step=3)
    hvkit.barrier()
    assert names(memory) == ([store.name_of(3)] if hvkit.rank() == 1 else [])
    assert checkpoint.restore().step == 3


def test_a_newer_checkpoint_in_the_directory_wins(folder, memory):
    _, _, checkpoint = begin(folder, replicas=1)
    checkpoint.save(epoch=0, step=1)
    _, _, other = begin(folder)
    other.save(epoch=0, step=2)
    assert begin(folder, replicas=1)[2].restore().step == 2


def test_checkpoints_of_another_training_in_the_directory_lose(folder, memory, monkeypatch, caplog):
    _, _, checkpoint = begin(folder, replicas=1)
    checkpoint.save(epoch=0, step=1)
    hvkit.barrier()
    if hvkit.rank() == 0:  # as if rank 0 was on another host now
        shutil.rmtree(folder)
    hvkit.barrier()
    with monkeypatch.context() as before:
        before.setenv(run_reports.RUN_NAME, "fedcba9876543210")
        _, _, other = begin(folder)
        for step in (20, 40):
            other.save(epoch=0, step=step)
    _, _, checkpoint = begin(folder, replicas=1)
    assert checkpoint.restore().step == 1
    if hvkit.rank() == 0:
        assert "leaves out the checkpoints of another run" in caplog.text
    checkpoint.save(epoch=0, step=2)
    assert begin(folder)[2].restore().step == 2


def test_different_numbers_of_copies_are_an_error_on_every_rank(folder, memory):
    _, _, checkpoint = begin(folder, replicas=1 if hvkit.rank() == 0 else 0)
    message = "replicas=0 on rank 1, but replicas=1 on rank 0; pass the same"
    with pytest.raises(hvkit.RanksDisagreeError, match=message):
        checkpoint.restore()
    with pytest.raises(hvkit.RanksDisagreeError, match=message):
        checkpoint.save(epoch=0, step=1)


def test_copies_of_a_killed_run_are_deleted_a_day_later(folder, memory):
    for age in (1, 30):
        other = memory.with_name(f"hvkit-run-{age:016x}")
        (other / "a" / "step-000000001").mkdir(parents=True)
        then = os.stat(other).st_mtime - age * 3600
        os.utime(other, (then, then))
    _, _, checkpoint = begin(folder, replicas=1)
    checkpoint.save(epoch=0, step=1)
    hvkit.barrier()
    left = sorted(int(path.name[-16:], 16) for path in memory.parent.glob("hvkit-run-0000*"))
    assert left == ([1] if hvkit.rank() == 1 else [1, 30])


def test_without_restarts_rank_0_says_that_there_are_none(folder, memory, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.delenv(run_reports.RUN_NAME)
    _, _, checkpoint = begin(folder, replicas=1)
    checkpoint.save(epoch=0, step=1)
    assert checkpoint.restore().step == 1
    if hvkit.rank() == 0:
        assert "replicas=1: no copies are kept, because only restarts need them" in caplog.text
    assert names(memory) == []
