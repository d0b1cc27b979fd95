"""An error on one rank during save or restore is an error on all ranks, never a hang."""

import errno

import numpy as np
import pytest
import torch
from ranks import error_of
from torch_nets import in_rounds, local, mlp, regression, train

import hvkit
from hvkit.checkpoint import Checkpoint


def make(folder, width=16, **parts):
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 4))
    optimizer = torch.optim.Adam(model.parameters())
    return Checkpoint(folder, model=model, optimizer=optimizer, **parts)


def test_rank_0_failing_to_write_is_the_same_error_on_all_ranks(folder):
    path = folder / "file"
    if hvkit.rank() == 0:
        path.write_text("no directory")
    error, text = error_of(lambda: make(path / "runs").save(epoch=0, step=1))
    assert issubclass(error, OSError)
    assert str(path / "runs" / "step-000000001") in text
    assert f"[Errno {errno.ENOTDIR}] cannot write the checkpoint: Not a directory" in text
    assert len(set(hvkit.allgather(text))) == 1


def test_extras_that_json_cannot_hold_on_one_rank_are_refused_on_all(folder):
    extras = {"best": [0.5, np.float32(0.5) if hvkit.rank() == 1 else 0.5]}
    error, text = error_of(lambda: make(folder).save(epoch=0, step=1, extras=extras))
    assert error is TypeError
    assert "extras['best'][1] is of type numpy.float32" in text
    assert ".item()" in text
    hvkit.barrier()
    assert list(folder.iterdir()) == []


class Failing:
    def state_dict(self):
        if hvkit.rank() == 1:
            raise OSError(errno.EIO, "no answer")
        return {}

    def load_state_dict(self, state):
        pass


def test_an_error_of_one_rank_while_an_agreement_runs_is_raised_on_all(folder):
    model, optimizer = in_rounds(hvkit.DiLoCo(4, overlap=2))
    train(model, optimizer, local(regression(steps=5)))
    checkpoint = Checkpoint(folder, model=model, optimizer=optimizer, other=Failing())
    error, text = error_of(lambda: checkpoint.save(epoch=0, step=5))
    assert issubclass(error, OSError)
    assert "no answer" in text


@pytest.mark.parametrize(("epoch", "step"), [(0, 5), (1, 4)])
def test_ranks_that_are_at_different_steps_are_refused(folder, epoch, step):
    mine = (epoch, step) if hvkit.rank() == 1 else (0, 4)
    error, text = error_of(lambda: make(folder).save(epoch=mine[0], step=mine[1]))
    assert error is hvkit.RanksDisagreeError
    assert f"epoch={epoch}, step={step} on rank 1, but epoch=0, step=4 on rank 0" in text


def test_a_checkpoint_of_another_model_is_an_error_on_all_ranks_and_no_skip(folder):
    make(folder).save(epoch=0, step=1)
    width = 17 if hvkit.rank() == 1 else 16
    error, text = error_of(make(folder, width=width).restore)
    assert error is ValueError
    assert "model.pt does not fit model here" in text
    assert "size mismatch for 0.weight" in text
    assert text.startswith("on rank 1: ") == (hvkit.rank() != 1)


def test_a_file_that_cannot_be_read_is_an_error_on_all_ranks(folder, monkeypatch):
    """Rank 1 already has a problem, and still receives."""
    path = make(folder).save(epoch=0, step=1) / "optimizer.pt"
    fromfile = np.fromfile

    def failing(file, *rest, **options):
        if file == path:
            raise OSError(errno.EIO, "Input/output error", str(file))
        return fromfile(file, *rest, **options)

    monkeypatch.setattr(np, "fromfile", failing)
    is_other = hvkit.rank() == 1
    _, text = error_of(make(folder, width=17 if is_other else 16).restore)
    assert ("model.pt does not fit" if is_other else f"Input/output error: '{path}'") in text
    assert hvkit.allgather(hvkit.rank()) == list(range(hvkit.size()))


def test_a_missing_part_is_an_error_on_all_ranks(folder):
    make(folder).save(epoch=0, step=1)
    error, text = error_of(make(folder, ema=mlp()).restore)
    assert error is ValueError
    assert "holds no 'ema', it holds model, optimizer" in text


def test_ranks_that_restore_different_parts_are_refused(folder):
    make(folder).save(epoch=0, step=1)
    parts = {"ema": mlp()} if hvkit.rank() == 1 else {}
    error, text = error_of(make(folder, **parts).restore)
    assert error is hvkit.RanksDisagreeError
    assert "parts model, ema, optimizer on rank 1, but parts model, optimizer on rank 0" in text


def test_every_rank_gets_rank_0s_checkpoint_and_progress(folder, tmp_path):
    """The other ranks have their own directories, which stay empty."""
    checkpoint = make(folder if hvkit.rank() == 0 else tmp_path / "none")
    extras = {"best": float("inf"), "names": ("a", "b")}
    checkpoint.save(epoch=3, step=70, extras=extras)
    assert hvkit.rank() == 0 or not (tmp_path / "none").exists()
    start = make(folder if hvkit.rank() == 0 else tmp_path / "none").restore()
    assert (start.epoch, start.step, start.size) == (3, 70, hvkit.size())
    assert start.extras == {"best": float("inf"), "names": ["a", "b"]}
    assert start.folder == folder / "step-000000070"


def test_parts_that_are_not_loaded_are_named(folder, capsys):
    make(folder).save(epoch=0, step=1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    Checkpoint(folder, model=model).restore()
    line = f"hvkit: {folder / 'step-000000001'} also holds optimizer: not loaded\n"
    assert (line in capsys.readouterr().err) == (hvkit.rank() == 0)
