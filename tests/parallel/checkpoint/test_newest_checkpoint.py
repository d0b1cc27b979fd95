"""The newest checkpoint of a run that goes on elsewhere: every rank plays a host with a disk."""

import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hosts import as_if_on, begin, state, train
from ranks import identical

import hvkit
from hvkit.checkpoint import newest_checkpoint, resume, store
from hvkit.checkpoint.replicas import Replicas
from hvkit.host import run_reports


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """This host's memory, of a run that can be started again."""
    return as_if_on(tmp_path, monkeypatch)


@pytest.fixture
def disk(memory, tmp_path):
    """The directory of checkpoints on this host's disk."""
    return tmp_path / "saved"


def move(disk, step, rank=1, **changes):
    """Move a checkpoint from rank 0's disk to another rank's, with these values in its manifest."""
    there = hvkit.broadcast(disk, rank)
    if hvkit.rank() == 0:
        folder = there / store.name_of(step)
        shutil.copytree(disk / folder.name, folder)
        shutil.rmtree(disk / folder.name)
        manifest = store.read(folder)
        store.Manifest(**{**vars(manifest), **changes}).write(folder)
    hvkit.barrier()


def save(disk, *steps, **options):
    model, optimizer, checkpoint = begin(disk, **options)
    for step in steps:
        train(model, optimizer, step)
        checkpoint.save(epoch=0, step=step)
    return model


def test_the_newest_may_be_on_another_hosts_disk(disk, caplog):
    kept = state(save(disk, 1, 2))
    move(disk, 2)
    model, optimizer, checkpoint = begin(disk)
    start = checkpoint.restore()
    assert start.step == 2
    assert identical(kept, state(model))
    theirs = hvkit.broadcast(disk, 1) / store.name_of(2)
    if hvkit.rank() == 0:
        assert f"resumed {theirs} on " in caplog.text
        assert start.folder == disk / store.name_of(2)
        found = {path.name: path.read_bytes() for path in start.folder.iterdir()}
        assert found == {path.name: path.read_bytes() for path in theirs.iterdir()}
    # What another host still has is older than the next one.
    train(model, optimizer, 3)
    checkpoint.save(epoch=0, step=3)
    assert begin(disk)[2].restore().step == 3


def test_files_that_are_loaded_travel_once(disk, monkeypatch):
    save(disk, 1)
    move(disk, 1)
    read = []
    fromfile = np.fromfile

    def recorded(path, *rest, **options):
        read.append(path.name)
        return fromfile(path, *rest, **options)

    monkeypatch.setattr(np, "fromfile", recorded)
    assert begin(disk)[2].restore().step == 1
    assert read == (["model.pt", "optimizer.pt", "ranks.npz"] if hvkit.rank() == 1 else [])
    if hvkit.rank() == 0:
        folder = disk / store.name_of(1)
        store.verify(folder, store.read(folder))


def test_a_checkpoint_that_does_not_fit_is_not_brought(disk):
    save(disk, 1)
    move(disk, 1)
    model = torch.nn.Linear(3, 7)
    checkpoint = hvkit.Checkpoint(disk, model=model)
    with pytest.raises(ValueError, match="does not fit"):
        checkpoint.restore()
    if hvkit.rank() == 0:
        assert [each.name for each in disk.iterdir()] == [".lock"]


def test_a_host_with_fewer_saves_of_this_run_loses_whatever_the_serials_there(disk):
    """Serials count what other runs have left in a directory, too."""
    save(disk, 1, 2)
    move(disk, 1, serial=100)
    assert begin(disk)[2].restore().step == 2


def test_a_copied_checkpoint_is_the_newest_of_the_directory_for_the_next_run_as_well(
    disk, monkeypatch
):
    save(disk, 1)
    move(disk, 1)
    with monkeypatch.context() as before:
        before.setenv(run_reports.RUN_NAME, "fedcba9876543210")
        save(disk, 20, 40)
    assert begin(disk)[2].restore().step == 1
    monkeypatch.delenv(run_reports.RUN_NAME)
    assert begin(disk)[2].restore().step == 1


def test_a_damaged_one_on_another_disk_is_skipped(disk, caplog):
    save(disk, 1, 2)
    move(disk, 2)
    if hvkit.rank() == 1:
        os.truncate(disk / store.name_of(2) / "model.pt", 10)
    hvkit.barrier()
    assert begin(disk)[2].restore().step == 1
    theirs = hvkit.broadcast(disk, 1) / store.name_of(2)
    if hvkit.rank() == 0:
        assert f"skipped {theirs} on " in caplog.text
        assert "damaged: model.pt has 10 of" in caplog.text


@pytest.mark.parametrize("run", ["fedcba9876543210", ""])
def test_a_run_that_goes_on_from_anothers_checkpoint_finds_it_elsewhere(run, disk, monkeypatch):
    with monkeypatch.context() as before:
        before.setenv(run_reports.RUN_NAME, run)
        kept = state(save(disk, 5))
    begin(disk)[2].restore()
    hvkit.barrier()
    move(disk, 5)
    model, optimizer, checkpoint = begin(disk)
    assert checkpoint.restore().step == 5
    assert identical(kept, state(model))
    train(model, optimizer, 6)
    checkpoint.save(epoch=0, step=6)
    assert begin(disk)[2].restore().step == 6


def test_a_directory_that_cannot_be_written_is_resumed_from_with_a_warning(
    disk, monkeypatch, caplog
):
    save(disk, 5)
    monkeypatch.setenv(run_reports.RUN_NAME, "fedcba9876543210")

    def locked(*_):
        raise BlockingIOError(11, "another run saves there")

    monkeypatch.setattr(store, "prepare", locked)
    assert begin(disk)[2].restore().step == 5
    assert ("another run saves there" in caplog.text) == (hvkit.rank() == 0)


@pytest.mark.parametrize("run", ["fedcba9876543210", None])
@pytest.mark.parametrize("killed", [False, True])
def test_a_loaded_checkpoint_has_a_copy_before_the_next_save(
    killed, run, disk, memory, monkeypatch
):
    """Also if a kill has left it just when the same step was saved again."""
    with monkeypatch.context() as before:
        if run is not None:
            before.setenv(run_reports.RUN_NAME, run)
        save(disk, 5)
    if killed and hvkit.rank() == 0:
        (disk / store.name_of(5)).rename(disk / f"{store.name_of(5)}.old")
    hvkit.barrier()
    checkpoint = begin(disk, replicas=1)[2]
    folder = checkpoint.restore().folder
    assert hvkit.rank() or folder.is_dir()
    checkpoint.wait()
    hvkit.barrier()
    kept = [path.name for path in memory.glob("*/step-*")]
    assert kept == ([store.name_of(5)] if hvkit.rank() == 1 else [])
    hvkit.barrier()
    if hvkit.rank() == 0:
        shutil.rmtree(disk)
    hvkit.barrier()
    assert begin(disk, replicas=1)[2].restore().step == 5


@pytest.mark.parametrize("rank", [0, 1])
def test_an_old_checkpoint_that_the_disk_cannot_read_hides_no_newer_one(rank, disk, caplog):
    save(disk, 1, 2)
    move(disk, 2, rank=rank) if rank else hvkit.barrier()
    if hvkit.rank() == rank:
        manifest = disk / store.name_of(1) / store.MANIFEST
        manifest.parent.mkdir(exist_ok=True)
        manifest.unlink(missing_ok=True)
        manifest.mkdir()  # reading it is an OSError
        (disk / store.name_of(0)).touch()
    hvkit.barrier()
    model, optimizer, checkpoint = begin(disk)
    assert checkpoint.restore().step == 2
    assert ("damaged: manifest.json: Is a directory" in caplog.text) == (hvkit.rank() == 0)
    train(model, optimizer, 3)
    checkpoint.save(epoch=0, step=3)


@pytest.mark.parametrize("run", ["fedcba9876543210", ""])
def test_a_disk_with_another_run_is_left_alone(run, disk):
    save(disk, 1)
    move(disk, 1, run=run)
    assert begin(disk)[2].restore().step == 0


def test_without_restarts_rank_0s_directory_is_the_only_one(disk, monkeypatch):
    monkeypatch.delenv(run_reports.RUN_NAME)
    save(disk, 1, 2)
    move(disk, 2)
    assert begin(disk)[2].restore().step == 1


def test_a_shared_directory_is_read_once(folder, memory, monkeypatch, caplog):
    read = []
    verify = store.verify
    monkeypatch.setattr(
        store, "verify", lambda *given: (read.append(given[0].name), verify(*given))
    )
    save(folder, 1, 2, 3)
    if hvkit.rank() == 0:
        os.truncate(folder / store.name_of(3) / "model.pt", 10)
        (folder / store.name_of(2) / store.MANIFEST).unlink()
    hvkit.barrier()
    before = sorted(path.name for path in folder.iterdir())
    assert begin(folder)[2].restore().step == 1
    assert read == ([store.name_of(3), store.name_of(1)] if hvkit.rank() == 0 else [])
    assert sorted(path.name for path in folder.iterdir()) == before
    if hvkit.rank() == 0:
        assert caplog.text.count("skipped") == 2
        assert f"skipped {folder / store.name_of(2)}: damaged: manifest.json is missing\n" in (
            caplog.text
        )


@pytest.mark.parametrize("there", ["damaged", "another run's"])
def test_a_damaged_file_on_the_disk_does_not_replace_a_good_copy(there, disk, memory, monkeypatch):
    save(disk, 5, replicas=1)
    hvkit.barrier()
    weights = disk / store.name_of(5) / "model.pt"
    if there == "damaged" and hvkit.rank() == 0:
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    with monkeypatch.context() as other:
        if there != "damaged":
            other.setenv(run_reports.RUN_NAME, "fedcba9876543210")
            model, optimizer, checkpoint = begin(disk)
            train(model, optimizer, 6)
            checkpoint.save(epoch=0, step=5)
    with monkeypatch.context() as full:

        def no_space(*_):
            raise OSError(28, "No space left on device")

        if there != "damaged" and hvkit.rank() == 0:
            full.setattr(store, "new_folder", no_space)
        checkpoint = begin(disk, replicas=1)[2]
        assert checkpoint.restore().step == 5
        checkpoint.wait()
    hvkit.barrier()
    copies = list(memory.glob("*/step-*"))
    assert len(copies) == (hvkit.rank() == 1)
    for copy in copies:
        manifest = store.read(copy)
        store.verify(copy, manifest)
        assert manifest.run == run_reports.run_name()


def test_saves_after_a_failed_write_are_newer_than_the_copy(disk, memory, monkeypatch, caplog):
    save(disk, 1, 2, 3, replicas=1)
    hvkit.barrier()
    if hvkit.rank() == 0:
        shutil.rmtree(disk)
    hvkit.barrier()
    model, optimizer, checkpoint = begin(disk, replicas=1)
    with monkeypatch.context() as full:

        def no_space(*_):
            raise OSError(28, "No space left on device")

        full.setattr(store, "new_folder", no_space)
        assert checkpoint.restore().step == 3
    if hvkit.rank() == 0:
        assert f"into {disk}: No space left on device; the run resumes from it" in caplog.text
    # The older copy stays where it is.
    monkeypatch.setattr(
        "hvkit.host.hardware.psutil.virtual_memory", lambda: SimpleNamespace(available=1)
    )
    train(model, optimizer, 4)
    checkpoint.save(epoch=0, step=4)
    hvkit.barrier()
    kept = [path.name for path in memory.glob("*/step-*")]
    assert kept == ([store.name_of(3)] if hvkit.rank() == 1 else [])
    assert begin(disk, replicas=1)[2].restore().step == 4


def test_a_file_that_was_cut_while_the_ranks_loaded_it_is_named(disk, caplog):
    save(disk, 1)
    move(disk, 1)
    found, _ = newest_checkpoint.find(disk, Replicas(disk, 0))
    with resume.copied_to(disk, found) as take:
        take("model.pt", np.frombuffer(b"cut", np.uint8))
    length = found.manifest.files["model.pt"]["bytes"]
    assert (f": model.pt has 3 of {length} bytes; the run" in caplog.text) == (hvkit.rank() == 0)
    assert list(disk.glob("step-*")) == ([found.folder] if hvkit.rank() == 1 else [])


@pytest.mark.parametrize("problem", ["unreadable", "short"])
def test_a_checkpoint_that_cannot_be_read_is_an_error_on_every_rank(problem, disk, monkeypatch):
    save(disk, 1)
    move(disk, 1)
    found, is_here = newest_checkpoint.find(disk, Replicas(disk, 0))
    assert not is_here
    path = found.folder / "optimizer.pt"
    if hvkit.rank() == 1 and problem == "short":
        os.truncate(path, 10)
    if problem == "unreadable":
        fromfile = np.fromfile

        def failing(file, *rest, **options):
            if file == path:
                raise OSError(5, "Input/output error")
            return fromfile(file, *rest, **options)

        monkeypatch.setattr(np, "fromfile", failing)
    said = {"unreadable": "Input/output error", "short": "it is shorter than"}[problem]
    copied = resume.copied_to(disk, found)
    with pytest.raises(OSError, match=said) as raised, copied:
        pass  # nothing is loaded, so all files travel at its end
    assert raised.value.filename == str(path)
    assert hvkit.allgather(hvkit.rank()) == list(range(hvkit.size()))
    assert list(disk.glob("step-*")) == ([path.parent] if hvkit.rank() == 1 else [])
