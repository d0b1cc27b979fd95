"""Arguments of distribute that are checked before anything else happens."""

from typing import get_args

import pytest
import torch

import hvkit
from hvkit.compression import BY_NAME, CompressionName


def distribute(**options):
    model = torch.nn.Linear(2, 1)
    return hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"warmup_epochs": 5}, ValueError, "warmup_epochs=5 needs steps_per_epoch"),
        ({"warmup_epochs": -1, "steps_per_epoch": 3}, ValueError, "at least 0 and finite, got -1"),
        ({"warmup_epochs": float("inf"), "steps_per_epoch": 3}, ValueError, "finite"),
        ({"warmup_epochs": "five", "steps_per_epoch": 3}, TypeError, "number, got 'five'"),
        ({"warmup_epochs": 5, "steps_per_epoch": 0}, ValueError, "at least 1, got 0"),
        ({"warmup_epochs": 5, "steps_per_epoch": 2.0}, TypeError, "an int, got 2.0"),
        (
            {"warmup_epochs": 5, "steps_per_epoch": 3, "warmup_steps": 2},
            ValueError,
            "warmup_steps=2 and warmup_epochs=5 were both given",
        ),
        ({"check_every": 0}, ValueError, "check_every must be at least 1, got 0"),
        ({"check_every": 2.0}, TypeError, "check_every must be an int, got 2.0"),
        ({"compression": "fp8"}, ValueError, "one of none, fp16, bf16, int8, or an object .*'fp8'"),
        ({"compression": hvkit.DeMo()}, TypeError, "is a strategy: pass strategy=hvkit.DeMo"),
        ({"batch_norm": True}, ValueError, "one of average, local, sync; got True"),
    ],
)
def test_wrong_arguments_are_named_with_what_is_accepted(options, kind, message):
    with pytest.raises(kind, match=message):
        distribute(**options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda model, optimizer: hvkit.distribute(
                model, optimizer, [], torch.optim.lr_scheduler.StepLR(optimizer, 1)
            ),
            r"hvkit.shard\(loader\), schedulers .* stay as they are.*; got also list, StepLR$",
        ),
        (
            lambda model, optimizer: hvkit.Checkpoint("d", model, optimizer),
            r"by name: Checkpoint\(\"runs/a\", model=model, optimizer=optimizer\); got also Linear",
        ),
        (
            lambda model, optimizer: hvkit.Checkpoint(model),
            r"directory must be a path, got Linear.*: Checkpoint\(\"runs/a\", model=model",
        ),
        (lambda *_: hvkit.Monitor(5), r"a path, got 5: Monitor\(\"runs/a\", every=5\)"),
        (lambda *_: hvkit.Monitor("d", 5), r"by name: Monitor\(\"runs/a\", every=5\).*also int$"),
    ],
    ids=["distribute", "Checkpoint", "Checkpoint without a directory", "Monitor", "Monitor, every"],
)
def test_an_argument_without_its_name_gets_the_right_call(call, message):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(TypeError, match=message):
        call(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_types_list_the_words_that_compression_takes():
    assert get_args(CompressionName) == tuple(BY_NAME)
