"""Rates, counters and log lines of a restore, also on another number of ranks."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import torch
from cases import MORE, cases
from quick_start import in_less_time

from hvkit.checkpoint import Checkpoint, resume, store
from hvkit.checkpoint.resume import batches_after
from hvkit.sync.port import Record, remember

ONES = np.ones((8, 4), "float32")


def keras_parts(rate):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(rate)
    model.compile(optimizer=optimizer, loss="mse")
    return model, optimizer


def test_a_keras_rate_is_loaded_as_it_was_saved_also_when_a_callback_has_changed_it(tmp_path):
    model, optimizer = keras_parts(0.02)
    optimizer.learning_rate = 0.04
    folder = Checkpoint(tmp_path, model=model, optimizer=optimizer).save(epoch=3, step=9)
    play_size(folder, 2)
    model, optimizer = keras_parts(0.02)
    Checkpoint(tmp_path, model=model, optimizer=optimizer).restore()
    assert np.float32(optimizer.learning_rate) == np.float32(0.04)


def play_size(folder, size):
    """Change a checkpoint's manifest as if ``size`` ranks had saved it."""
    written = store.read(folder)
    store.Manifest(**{**vars(written), "size": size}).write(folder)


def test_a_keras_schedule_goes_on_where_it_was(tmp_path):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    model, optimizer = keras_parts(schedule)
    model.fit(ONES, ONES, epochs=3, verbose=0)
    Checkpoint(tmp_path, model=model, optimizer=optimizer).save(epoch=3, step=3)
    model, other = keras_parts(schedule)
    Checkpoint(tmp_path, model=model, optimizer=other).restore()
    assert int(other.iterations) == 3
    assert float(other.learning_rate) == float(optimizer.learning_rate)


def test_pytorch_rates_are_loaded_as_they_were_saved_and_a_warm_up_goes_on(tmp_path, capsys):
    def parts(rate):
        body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        groups = [{"params": body.parameters(), "lr": rate / 10}, {"params": head.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=torch.tensor(rate))
        warmup = SimpleNamespace(steps_done=0)  # the part that distribute keeps
        remember([body], [(optimizer, Record(warmup))])
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


@pytest.mark.parametrize(("accumulated", "steps"), [(None, [10, 20]), (5, [2, 4])])
def test_a_callback_counts_skipped_updates_also_after_a_resume(tmp_path, accumulated, steps):
    x = np.ones((20, 4), "float32")
    x[2] = np.inf

    def fit(epochs):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        inner = keras.optimizers.SGD(0.01, gradient_accumulation_steps=accumulated)
        scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0)
        model.compile(scaler, "mse", jit_compile=False)
        checkpoint = Checkpoint(tmp_path, model=model, optimizer=scaler)
        start, save = checkpoint.restore(), checkpoint.callback()
        options = {"batch_size": 2, "shuffle": False, "verbose": 0, "callbacks": [save]}
        model.fit(x, x, epochs=epochs, initial_epoch=start.epoch, **options)
        return checkpoint.restore().step

    assert [fit(1), fit(2)] == steps


def test_an_error_of_one_rank_between_collectives_is_raised_as_it_is(tmp_path, monkeypatch):
    """It is no error of the part; the other ranks may be inside the broadcast."""
    checkpoint = Checkpoint(tmp_path, model=torch.nn.Linear(1, 1))
    checkpoint.save(epoch=0, step=1)

    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr(np, "fromfile", full)
    with pytest.raises(MemoryError):
        checkpoint.restore()


def test_the_names_in_a_file_of_many_ranks_are_read_once(tmp_path, monkeypatch):
    class Values(dict):
        reads = 0

        def __iter__(self):
            self.reads += 1
            return super().__iter__()

    values = Values({f"{rank}/model/weight-0": rank for rank in (0, 1, 10)})
    manifest = store.Manifest(epoch=0, step=0, batches=0, size=1)
    monkeypatch.setattr(np, "load", lambda _: nullcontext(values))
    monkeypatch.setattr(
        resume.collectives, "scatter", lambda _, make, __: list(map(make, range(3)))
    )
    states = resume._saved_rank_states(
        SimpleNamespace(folder=tmp_path, manifest=manifest, rank=0), in_round=True
    )
    assert states == [{"model/weight-0": 0}, {"model/weight-0": 1}, {}]
    assert values.reads == 1


@pytest.mark.parametrize("other", [2, 4])
def test_another_format_is_an_error_and_no_damage(tmp_path, other):
    """Format 2 had no runs and no numbers of saves."""
    checkpoint = Checkpoint(tmp_path, model=torch.nn.Linear(1, 1))
    folder = checkpoint.save(epoch=0, step=1)
    written = store.read(folder)
    store.Manifest(**{**vars(written), "format": other}).write(folder)
    with pytest.raises(RuntimeError, match=rf"has format {other}, this hvkit reads format 3"):
        checkpoint.restore()


TORCH = """
import json, sys, torch, hvkit
from hvkit.checkpoint import Checkpoint
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR
torch.manual_seed(hvkit.rank())
model = torch.nn.Linear(8, 1)
used = []
class Watched(torch.optim.SGD):
    def _init_group(self, group, *rest):  # called by the update
        used.append(group["lr"])
        return super()._init_group(group, *rest)
optimizer = Watched(model.parameters(), lr=0.02, momentum=0.5)
hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=8)
first = LinearLR(optimizer, 0.5, total_iters=2)
scheduler = SequentialLR(optimizer, [first, StepLR(optimizer, 100)], [2])
checkpoint = Checkpoint(sys.argv[1], model=model, optimizer=optimizer, scheduler=scheduler)
start = checkpoint.restore()
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
losses = []
for step in range(start.step, start.step + 5):
    loss = (model(x) - x[:, :1]).square().mean()
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
checkpoint.save(epoch=0, step=start.step + 5, extras={"losses": losses})
rate, base = optimizer.param_groups[0]["lr"], scheduler._schedulers[1].base_lrs[0]
weight = model.weight.tolist()
"""

REPORT = """
if len({json.dumps(each) for each in hvkit.allgather(weight)}) != 1:
    sys.exit("the ranks have different weights")
if hvkit.rank() == 0:
    before = start.extras.get("losses", [])
    print(json.dumps([start.step, start.size, rate, base, [used[0], used[-1]], before, losses]))
"""


def run(ranks, folder):
    """Train five steps on some ranks; return what rank 0 reports, and the log."""
    launcher = ["mpirun", "--oversubscribe", "-np", str(ranks)] if ranks > 1 else []
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HVKIT_RANK"))}
    done = subprocess.run(
        [*launcher, sys.executable, "-c", TORCH + REPORT, str(folder)],
        capture_output=True, text=True, timeout=240, env=in_less_time(clean), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@MORE
@pytest.mark.parametrize("sizes", cases([[2, 3], [1, 2], [2, 3, 1]], name=str))
def test_the_rate_stays_the_users_and_steps_use_it_for_the_new_number_of_ranks(sizes, tmp_path):
    """A warm-up continues in the middle too."""
    for run_number, ranks in enumerate(sizes):
        (step, saved, rate, base, used, before, losses), log = run(ranks, tmp_path)
        assert step == 5 * run_number
        assert (rate, base) == pytest.approx((0.02, 0.02))
        multiplied = [0.02 * (1 + (ranks - 1) * min(1, at / 8)) for at in (step, step + 4)]
        if run_number == 0:
            multiplied[0] /= 2  # by its scheduler
        assert used == pytest.approx(multiplied)
        if run_number == 0:
            assert saved is None
            assert "resumed" not in log
            continue
        assert saved == sizes[run_number - 1]
        new = f"; rank {ranks - 1}: random state as the script set it" if ranks > saved else ""
        assert (
            f"hvkit: resumed {tmp_path}/step-{step:09d} (epoch 0, step {step}) saved on "
            f"{saved} rank{'s' * (saved > 1)}; {ranks} rank{'s' * (ranks > 1)} now{new}\n"
        ) in log
        assert before[-1] > losses[0] > losses[-1]


@pytest.mark.parametrize(
    ("read", "then", "now", "skipped"),
    [
        (3, (2, 8), (2, 8), 3),
        (3, (2, 8), (1, 16), 6),  # batches of a rank are as large as before
        (3, (1, 9), (2, 5), 1),
        (3, (2, 8), (4, 4), 1),
        (3, (2, 0), (1, 16), 6),
        (3, (2, 8), (1, 8), 3),  # those of all ranks together are
        (3, (1, 8), (4, 8), 3),
        (4, (2, 8), (1, 4), 2),
    ],
)
def test_the_position_in_an_epoch_on_other_ranks(read, then, now, skipped):
    assert batches_after(read, then, now) == skipped
