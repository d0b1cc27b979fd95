"""What a restore does to rates and counters, and says; other sizes are played in one process."""

import keras
import numpy as np
import pytest
import torch

from hvkit.checkpoint import Checkpoint, manifest
from hvkit.registry import Record, record

ONES = np.ones((8, 4), "float32")


class WarmUp:
    """What distribute keeps of a warm-up."""

    steps_done = 0


def distributed(model, optimizer, factor, warmup=None):
    """As on ``factor`` ranks, as far as a checkpoint can see."""
    record(model, [(optimizer, Record(factor, warmup))])
    return model, optimizer


def play_size(folder, size):
    """Make a checkpoint one that was saved on so many ranks."""
    written = manifest.read(folder)
    manifest.Manifest(**{**vars(written), "size": size}).write(folder)


def keras_parts(factor, rate):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model, optimizer = distributed(model, keras.optimizers.SGD(rate), factor)
    model.compile(optimizer=optimizer, loss="mse")
    return model, optimizer


@pytest.mark.parametrize(("saved", "now", "expected"), [(2.0, 3.0, 0.06), (3.0, 1.0, 0.01333333)])
def test_a_keras_rate_follows_also_when_a_callback_has_changed_it(
    saved, now, expected, tmp_path, capsys
):
    model, optimizer = keras_parts(saved, 0.02 * saved)
    optimizer.learning_rate = 0.04
    folder = Checkpoint(tmp_path, model=model, optimizer=optimizer).save(epoch=3, step=9)
    play_size(folder, int(saved))
    model, optimizer = keras_parts(now, 0.02 * now)
    Checkpoint(tmp_path, model=model, optimizer=optimizer).restore()
    assert float(optimizer.learning_rate) == pytest.approx(expected)
    assert (
        f"hvkit: resumed {folder} (epoch 3, step 9) saved on {saved:g} ranks; 1 rank now: "
        f"learning rate 0.04 -> {expected:.6g}\n"
    ) in capsys.readouterr().err


def test_a_keras_schedule_stays_as_it_is(tmp_path):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    model, optimizer = keras_parts(2.0, schedule)
    model.fit(ONES, ONES, epochs=3, verbose=0)
    Checkpoint(tmp_path, model=model, optimizer=optimizer).save(epoch=3, step=3)
    model, other = keras_parts(3.0, schedule)
    Checkpoint(tmp_path, model=model, optimizer=other).restore()
    assert int(other.iterations) == 3
    assert float(other.learning_rate) == float(optimizer.learning_rate)


def test_pytorch_groups_schedulers_and_warm_up_follow(tmp_path, capsys):
    def parts(factor, rate):
        body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        groups = [{"params": body.parameters(), "lr": rate / 10}, {"params": head.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=torch.tensor(rate))
        warmup = WarmUp()
        distributed(body, optimizer, factor, warmup)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return {"optimizer": optimizer, "scheduler": scheduler}, warmup

    given, warmup = parts(2.0, 0.2)
    warmup.steps_done = 7
    Checkpoint(tmp_path, **given).save(epoch=0, step=7)
    given, warmup = parts(4.0, 0.4)
    Checkpoint(tmp_path, **given).restore()
    assert warmup.steps_done == 7
    rates = [group["lr"] for group in given["optimizer"].param_groups]
    assert isinstance(rates[1], torch.Tensor)
    assert [float(rate) for rate in rates] == pytest.approx([0.04, 0.4])
    assert [float(rate) for rate in given["scheduler"].base_lrs] == pytest.approx([0.04, 0.4])
    assert "learning rate 0.02 -> 0.04, 0.2 -> 0.4\n" in capsys.readouterr().err


def test_an_optimizer_that_was_not_distributed_keeps_its_rate(tmp_path):
    def parts(factor):
        layer = torch.nn.Linear(2, 2)
        first = torch.optim.SGD(layer.parameters(), lr=0.1 * factor)
        distributed(layer, first, factor)
        return [first, torch.optim.SGD(layer.parameters(), lr=0.3)]

    Checkpoint(tmp_path, optimizer=parts(2.0)).save(epoch=0, step=1)
    first, second = parts(3.0)
    Checkpoint(tmp_path, optimizer=(first, second)).restore()
    assert first.param_groups[0]["lr"] == pytest.approx(0.3)
    assert second.param_groups[0]["lr"] == 0.3


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


def test_a_newer_format_is_an_error_and_no_damage(tmp_path):
    checkpoint = Checkpoint(tmp_path, model=torch.nn.Linear(1, 1))
    folder = checkpoint.save(epoch=0, step=1)
    written = manifest.read(folder)
    manifest.Manifest(**{**vars(written), "format": 2}).write(folder)
    with pytest.raises(RuntimeError, match=r"has format 2, this hvkit reads format 1"):
        checkpoint.restore()
