"""What a restore does to rates and counters, and says; other sizes are played in one process."""

import keras
import numpy as np
import pytest
import torch

from hvkit.adapters.adapter import Record, record
from hvkit.checkpoint import Checkpoint, manifest

ONES = np.ones((8, 4), "float32")


class WarmUp:
    """What distribute keeps of a warm-up."""

    steps_done = 0


def test_a_keras_rate_is_loaded_as_it_was_saved_also_when_a_callback_has_changed_it(tmp_path):
    def parts():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        optimizer = keras.optimizers.SGD(0.02)
        model.compile(optimizer=optimizer, loss="mse")
        return model, optimizer

    model, optimizer = parts()
    optimizer.learning_rate = 0.04
    folder = Checkpoint(tmp_path, model=model, optimizer=optimizer).save(epoch=3, step=9)
    play_size(folder, 2)
    model, optimizer = parts()
    Checkpoint(tmp_path, model=model, optimizer=optimizer).restore()
    assert np.float32(optimizer.learning_rate) == np.float32(0.04)


def play_size(folder, size):
    """Make a checkpoint one that was saved on so many ranks."""
    written = manifest.read(folder)
    manifest.Manifest(**{**vars(written), "size": size}).write(folder)


def test_a_keras_schedule_goes_on_where_it_was(tmp_path):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)

    def parts():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        optimizer = keras.optimizers.SGD(schedule)
        model.compile(optimizer=optimizer, loss="mse")
        return model, optimizer

    model, optimizer = parts()
    model.fit(ONES, ONES, epochs=3, verbose=0)
    Checkpoint(tmp_path, model=model, optimizer=optimizer).save(epoch=3, step=3)
    model, other = parts()
    Checkpoint(tmp_path, model=model, optimizer=other).restore()
    assert int(other.iterations) == 3
    assert float(other.learning_rate) == float(optimizer.learning_rate)


def test_pytorch_rates_are_loaded_as_they_were_saved_and_a_warm_up_goes_on(tmp_path, capsys):
    def parts(rate):
        body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        groups = [{"params": body.parameters(), "lr": rate / 10}, {"params": head.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=torch.tensor(rate))
        warmup = WarmUp()
        record(body, [(optimizer, Record(warmup))])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return {"optimizer": optimizer, "scheduler": scheduler}, warmup

    given, warmup = parts(0.2)
    warmup.steps_done = 7
    folder = Checkpoint(tmp_path, **given).save(epoch=0, step=7)
    play_size(folder, 2)
    given, warmup = parts(0.4)
    Checkpoint(tmp_path, **given).restore()
    assert warmup.steps_done == 7
    rates = [group["lr"] for group in given["optimizer"].param_groups]
    assert isinstance(rates[1], torch.Tensor)
    assert [float(rate) for rate in rates] == pytest.approx([0.02, 0.2])
    assert [float(rate) for rate in given["scheduler"].base_lrs] == pytest.approx([0.02, 0.2])
    assert (
        f"hvkit: resumed {folder} (epoch 0, step 7) saved on 2 ranks; 1 rank now\n"
    ) in capsys.readouterr().err


def test_a_gradient_scaler_and_averaged_weights_are_parts(tmp_path):
    def parts():
        layer = torch.nn.Linear(2, 2)
        averaged = torch.optim.swa_utils.AveragedModel(layer)
        averaged.update_parameters(layer)
        return {"ema": averaged, "scaler": torch.amp.GradScaler("cpu", init_scale=128.0)}

    saved, loaded = parts(), parts()
    saved["scaler"].scale(torch.ones(1))  # makes the scale
    saved["scaler"].update(32.0)
    Checkpoint(tmp_path, **saved).save(epoch=0, step=1)
    Checkpoint(tmp_path, **loaded).restore()
    assert loaded["scaler"].get_scale() == 32.0
    assert torch.equal(loaded["ema"].module.weight, saved["ema"].module.weight)


@pytest.mark.parametrize("other", [1, 3])
def test_another_format_is_an_error_and_no_damage(tmp_path, other):
    """Format 1 held multiplied rates."""
    checkpoint = Checkpoint(tmp_path, model=torch.nn.Linear(1, 1))
    folder = checkpoint.save(epoch=0, step=1)
    written = manifest.read(folder)
    manifest.Manifest(**{**vars(written), "format": other}).write(folder)
    with pytest.raises(RuntimeError, match=rf"has format {other}, this hvkit reads format 2"):
        checkpoint.restore()
