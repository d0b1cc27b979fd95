"""``hvkit.launch`` in a script: results, models, errors, and what is refused before any start."""

import os
import sys
import threading

import pytest
import torch
from cases import MORE

import hvkit
from hvkit.errors import HostfileError, LaunchError, UsageError

lock = threading.Lock()


def train(rate, *, steps):
    assert os.environ["OF_THE_CALL"] == "set"
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    model, optimizer = hvkit.distribute(model, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(4, 2)) * (hvkit.rank() + 1)).square().sum().backward()
        optimizer.step()
    print(f"rank {hvkit.rank()} has trained", file=sys.stderr)
    return model, optimizer


def test_trained_models_come_back_as_plain_objects_that_train_on(capfd):
    (model, optimizer), (other, _) = hvkit.launch(
        train, 0.1, np=2, steps=3, options="--prefix", env={"OF_THE_CALL": "set"}
    )
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    assert type(optimizer) is torch.optim.Adam
    assert next(iter(optimizer.state.values()))["step"] == 3
    before = model[0].weight.clone()
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    errors = capfd.readouterr().err
    assert "[0 " in errors
    assert "rank 1 has trained" in errors


@MORE
def test_a_killed_rank_is_named():
    def killed():
        if hvkit.rank() == 1:
            os.kill(os.getpid(), 9)
        hvkit.barrier()

    with pytest.raises(hvkit.RankLostError, match=r"rank 1 on \S+ was killed by signal 9"):
        hvkit.launch(killed, np=2)


def ends(status):
    os._exit(status)


def needs(module):
    return __import__(module).Only()


@MORE
@pytest.mark.parametrize(
    ("function", "argument", "kind", "text"),
    [
        (
            lambda _: threading.Lock(),
            0,
            TypeError,
            "the function returned a lock that cannot be pickled",
        ),
        (ends, 0, hvkit.RankLostError, "rank 0 has ended with status 0, but .* not returned"),
        (sys.exit, 3, hvkit.RankLostError, r"rank 0 on \S+ ended with exit status 3"),
        (sys.exit, "no data", hvkit.RankLostError, r"rank 0 on \S+ ended by sys.exit: no data"),
        (needs, "on_ranks_only", hvkit.HvkitError, "what rank 0 returned cannot be unpickled here"),
    ],
    ids=["a lock", "os._exit", "sys.exit", "a reason", "a class that is not here"],
)
def test_a_missing_or_unpicklable_result_is_an_error(
    function, argument, kind, text, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # for results that are kept
    (tmp_path / "on_ranks_only.py").write_text("class Only: pass\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(kind, match=text):
        hvkit.launch(function, argument, np=1)


def without_value():
    """A function that uses a variable which has no value any more."""
    late = 1

    def function():
        return lock, late  # noqa: F821  # deleted below

    del late
    return function


def calls_another():
    """A function that calls one that uses what cannot be pickled."""
    held = {"rate": 1, "lock": lock}

    def takes():
        return held

    return lambda: [takes() for _ in range(2)]


class Worker:
    def __init__(self):
        self.lock = lock

    def work(self):
        """Do nothing."""


async def waits():
    """A function whose call gives a coroutine."""


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "text"),
    [
        ([train], {"np": 0}, ValueError, "np must be at least 1, got 0"),
        ([3], {"np": 2}, TypeError, "pass the function itself, not its result"),
        (
            [lambda: lock],
            {"np": 2},
            TypeError,
            "lock, which <lambda> uses, is a lock, which cannot",
        ),
        ([train, 1, lock], {"np": 2}, TypeError, "argument 2 of train is a lock, which cannot be"),
        ([train], {"hosts": "a:x"}, HostfileError, "host 1: slots must be a positive integer"),
        ([train], {"hosts": ["a:1", "b:1"], "np": 3}, UsageError, "-np 3 is more than the 2 slots"),
        ([train], {"hostfile": "no-such-file"}, HostfileError, "no-such-file"),
        ([train], {"np": 2, "options": "--stahl 9"}, UsageError, "did you mean --stall"),
        ([train], {"np": 2, "options": ["x.py"]}, UsageError, "before COMMAND.*got 'x.py'"),
        ([train], {"np": 2, "options": "-h"}, UsageError, "`hvkit run --help` lists the options"),
        ([train], {"np": 2, "options": "'a"}, UsageError, "No closing quotation.*list of words"),
        ([train], {"np": 2, "options": "-np 3"}, UsageError, "np=2 and options='-np 3' both"),
        ([train], {"np": 99}, UsageError, "np=99 is too many"),
        ([train], {"np": 2, "env": {"A": 1}}, TypeError, "must be str, got 'A': 1"),
        ([without_value()], {"np": 2}, TypeError, "lock, which function uses, is a lock"),
        ([train], {"np": 2, "env": {"A=B": "1"}}, ValueError, "'A=B': '1' of env: a name .* no ="),
        ([train], {"np": 2, "hosts": ["a", 5]}, TypeError, "hosts must be a str or .* got 5"),
        ([train], {"np": 2, "options": 5}, TypeError, 'got 5: options="--stall 60"'),
        (
            [calls_another()],
            {"np": 2},
            TypeError,
            "'lock' of held, which takes uses, is a lock.*of takes",
        ),
        ([Worker().work], {"np": 2}, TypeError, "lock of the object of work is a lock"),
        ([waits], {"np": 2}, TypeError, r"calling waits runs none of it.*asyncio.run\(waits"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_functions_and_options_that_cannot_start_are_refused(arguments, options, kind, text):
    with pytest.raises(kind, match=text):
        hvkit.launch(*arguments, **options)


def test_a_removed_working_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(LaunchError, match=f"the working directory, {tmp_path}, was removed"):
        hvkit.launch(print, np=2)


def test_a_rank_cannot_launch():
    with pytest.raises(LaunchError, match="was called on a rank"):
        hvkit.launch(lambda: hvkit.launch(print, np=2), np=1)


def test_a_missing_cloudpickle_is_named_with_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.delitem(sys.modules, "hvkit.functions.pickling", raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install cloudpickle"):
        __import__("hvkit.functions.pickling")
