"""``hvkit.Monitor`` on several ranks, in loops of PyTorch and in ``fit``."""

import json
import time

import keras
import numpy as np
import pytest
import torch
from cases import cases
from ranks import my_part, shared_folder
from torch.utils.checkpoint import checkpoint

import hvkit
from hvkit.transport.traffic import of_allreduce

STEPS, ROWS = 12, 6
METRICS = ["mae", "r2_score"]
# Seconds that a slow rank loses in each step: far more than others lose on a busy machine.
LATE = 0.1


@pytest.fixture
def folder(tmp_path_factory):
    return shared_folder(tmp_path_factory)


def data():
    rng = np.random.default_rng(0)
    rows = STEPS * ROWS * hvkit.size()
    return rng.normal(size=(rows, 8)).astype("f"), rng.normal(size=(rows, 4)).astype("f")


def torch_run(folder, *, late=None, every=4, **arguments):
    """Train on this rank's part of each batch; return the model, its losses and gradient norms."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = (torch.from_numpy(each).reshape(STEPS, -1, each.shape[1]) for each in data())
    batches = [(my_part(a), my_part(b)) for a, b in zip(x, y, strict=True)]
    losses, norms = [], []
    with hvkit.Monitor(folder, every=every) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor, **arguments)
        for a, b in monitor.batches(slow(batches) if late == "data" else batches):
            if late == "compute" and hvkit.rank() == hvkit.size() - 1:
                time.sleep(LATE)
            optimizer.zero_grad()
            loss = (model(a) - b).square().mean()
            loss.backward()
            losses.append(loss.item())
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
            optimizer.step()
            if late == "after the update" and hvkit.rank() == hvkit.size() - 1:
                time.sleep(LATE)
            monitor.step(loss=loss)
    return model, losses, norms


def slow(batches):
    for batch in batches:
        if hvkit.rank() == hvkit.size() - 1:
            time.sleep(LATE)
        yield batch


def keras_run(
    folder,
    *,
    every=4,
    epochs=2,
    executed=1,
    optimizer=None,
    callback=False,
    **arguments,
):
    """Train with ``fit`` on this rank's part of each batch; return the model."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    x, y = (each.reshape(STEPS, -1, each.shape[1]) for each in data())
    x, y = (np.concatenate([my_part(batch) for batch in each]) for each in (x, y))
    with hvkit.Monitor(folder, every=every) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor, **arguments)
        model.compile(optimizer, "mse", metrics=METRICS, steps_per_execution=executed)
        own = [monitor.callback(model)] if callback else []
        model.fit(x, y, batch_size=ROWS, shuffle=False, epochs=epochs, verbose=0, callbacks=own)
    return model


def lines(folder):
    """Rank 0's records, on all ranks; they are complete once it has closed its monitor."""
    text = (folder / "metrics.jsonl").read_text() if hvkit.is_main() else ""
    return [json.loads(line) for line in hvkit.broadcast(text).splitlines()]


def records(folder):
    return [line for line in lines(folder) if "samples_per_second" in line]


def test_a_record_is_the_mean_over_steps_and_ranks(folder):
    _, losses, norms = torch_run(folder)
    everyone = np.array(hvkit.allgather(losses)).mean(0).reshape(-1, 4).mean(1)
    found = records(folder)
    assert [each["step"] for each in found] == [4, 8, 12]
    np.testing.assert_allclose([each["loss"] for each in found], everyone, rtol=1e-6)
    np.testing.assert_allclose([each["gradient_norm"] for each in found], norms[3::4], rtol=1e-6)
    assert {each["learning_rate"] for each in found} == {0.1}


def clipped_run(folder, way, **arguments):
    """Train with gradients that are clipped to 0.01 in every step; return the norms before."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=way == "fused")
    scaler = torch.amp.GradScaler("cpu", enabled=way in ("scaled", "fused"), init_scale=1024.0)
    x, y = (torch.from_numpy(my_part(each[: 5 * hvkit.size()])) for each in data())
    norms = []
    with hvkit.Monitor(folder, every=2) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor, **arguments)
        for step in range(8):
            if way == "nested":  # a pass that runs inside another
                out = checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)
            else:
                out = model(x)
            loss = scaler.scale((out - y).square().mean())
            if step == 3 and way == "scaled":  # no update, so no norm
                loss = loss * float("inf")
            optimizer.zero_grad()
            loss.backward()
            if way != "fused":  # which unscales in the update
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            else:
                norms.append(
                    float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
                    / scaler.get_scale()
                )
            scaler.step(optimizer)
            scaler.update()
            monitor.step()
    return norms


CLIPPED = [
    ("plain", {}),
    ("nested", {}),
    ("scaled", {}),
    ("fused", {}),
    ("plain", {"strategy": hvkit.ShardedOptimizer()}),
    ("plain", {"strategy": hvkit.FullyShard()}),
]


@pytest.mark.parametrize(("way", "arguments"), CLIPPED, ids=str)
def test_the_norm_is_that_before_the_script_clips(folder, way, arguments):
    norms = clipped_run(folder, way, **arguments)[1::2]
    found = records(folder)
    if way == "scaled":
        assert "gradient_norm" not in found.pop(1)
        del norms[1]
    np.testing.assert_allclose([each["gradient_norm"] for each in found], norms, rtol=1e-5)
    applied = [each.get("applied_gradient_norm") for each in found]
    if way == "fused":  # not clipped
        assert applied == [None] * 4
    else:
        np.testing.assert_allclose(applied, 0.01, rtol=1e-3)


def test_a_record_says_what_was_sent_and_by_which_ranks_samples_went(folder):
    torch_run(folder)
    first, *_ = lines(folder)
    found = records(folder)[-1]
    # 36 weights, and a report.
    assert found["sent"]["gradients"] >= of_allreduce(4 * 36, hvkit.size())
    assert len(first["start"]["hosts"]) == hvkit.size()
    speeds = found["ranks"]["samples_per_second"]
    assert len(speeds) == hvkit.size()
    assert found["samples_per_second"] == pytest.approx(sum(speeds))
    assert found["slowest"]["samples_per_second"] == min(speeds)
    assert speeds[found["fastest"]["rank"]] == max(speeds)
    parts = found["seconds"]
    assert sum(parts.values()) == pytest.approx(2 * parts["step"])


@pytest.mark.parametrize(("late", "every"), [("data", 4), ("compute", 4), ("after the update", 1)])
def test_a_slow_rank_is_named_with_its_reason(folder, late, every):
    torch_run(folder, late=late, every=every)
    end = lines(folder)[-1]["end"]
    assert end["last"]["rank"] == hvkit.size() - 1
    assert end["last"]["reason"] == ("data" if late == "data" else "compute")
    assert end["last"]["share"] > 0.8
    assert end["parts"]["waiting"] > 0.3 * (hvkit.size() - 1) / hvkit.size()
    assert end["busy"] < 1 - 0.3 / hvkit.size()


def test_skipped_steps_are_counted(folder):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hvkit.Monitor(folder / "torch", every=2) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor, on_nonfinite="skip")
        for value in (1.0, float("nan"), 1.0, 1.0):
            optimizer.zero_grad()
            model(torch.full((3, 4), value)).sum().backward()
            optimizer.step()
            monitor.step(loss=value)
    found = records(folder / "torch")
    assert [each.get("skipped", 0) for each in found] == [1, 0]
    assert [each["loss"] for each in found] == [1, 1]  # without that of a step that none was
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1)
    x = np.ones((8, 4), "f") * np.repeat([1, 1, 1, np.nan], 2).astype("f")[:, None]
    with hvkit.Monitor(folder / "keras", every=2) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor, on_nonfinite="skip")
        model.compile(optimizer, "mse")
        model.fit(x, x[:, :2], batch_size=2, shuffle=False, verbose=0)
    assert [each.get("skipped", 0) for each in records(folder / "keras")] == [0, 1]


STRATEGIES = [
    {},
    {"compression": "int8"},
    {"strategy": hvkit.LocalSGD(every=3)},
    {"strategy": hvkit.ShardedOptimizer()},
    {"strategy": hvkit.FullyShard()},
    {"strategy": hvkit.Gossip()},
    {"strategy": hvkit.ParameterServer(staleness=2)},
]


@pytest.mark.parametrize("arguments", STRATEGIES, ids=str)
def test_every_strategy_is_recorded(folder, arguments):
    torch_run(folder, **arguments)
    found, begun = records(folder), lines(folder)[0]["start"]
    assert begun.get("size", len(begun["hosts"])) == hvkit.size()
    assert [each["step"] for each in found][:3] == [4, 8, 12]
    assert all(each["loss"] > 0 and each["gradient_norm"] > 0 for each in found[:3])


def test_training_gives_the_same_bits(folder, monkeypatch):
    watched = torch_run(folder)[0]
    monkeypatch.setattr(hvkit.Monitor, "attach", lambda *_, **__: None)
    monkeypatch.setattr(hvkit.Monitor, "step", lambda *_, **__: None)
    assert torch.equal(watched.weight, torch_run(folder)[0].weight)


@pytest.mark.two_ranks
@pytest.mark.parametrize("executed", cases([1, 3]))
def test_fit_is_recorded(folder, executed):
    keras_run(folder, executed=executed)
    found = records(folder)
    assert {each["epoch"] for each in found} == {0, 1}
    # Making the graph is no part of a step's time.
    assert sum(each["steps"] for each in found) == 2 * STEPS - executed
    assert found[-1]["step"] == 2 * STEPS
    assert all(each["learning_rate"] == pytest.approx(0.1) for each in found)
    measured = [each for each in found if "gradient_norm" in each]
    assert all(each["gradient_norm"] > 0 for each in measured)
    assert len(measured) >= 4
    parts = [each["seconds"] for each in found]
    assert all(
        each["allreduce"] > 0 and each["compute"] > 0 and each["data"] >= 0 for each in parts
    )
    epochs = [line["logged"]["epoch_loss"] for line in lines(folder) if "logged" in line]
    assert epochs[1] < epochs[0]


def test_a_record_of_fit_is_the_mean_over_its_steps_and_ranks_not_over_the_epoch(folder):
    # With a rate of 0 a step's loss is that of its batch.
    x, y = data()
    model = keras_run(folder, optimizer=keras.optimizers.SGD(0.0))
    error = (model(x).numpy() - y).reshape(STEPS // 4, -1)
    found = records(folder)
    for epoch in (found[:3], found[3:]):
        np.testing.assert_allclose([r["loss"] for r in epoch], (error**2).mean(1), rtol=1e-5)
        np.testing.assert_allclose([r["mae"] for r in epoch], abs(error).mean(1), rtol=1e-5)
    logged = [line["logged"] for line in lines(folder) if "logged" in line]
    np.testing.assert_allclose([e["epoch_loss"] for e in logged], (error**2).mean(), rtol=1e-5)


@pytest.mark.two_ranks
def test_in_fit_no_work_begins_before_it_is_noted_that_the_batch_is_there(folder):
    """Else much of the work would count as waiting for data, wherever it keeps all threads busy."""
    before = set()

    class Traced(keras.layers.Dense):
        def call(self, inputs):
            left = [inputs.op]
            while left:
                operation = left.pop()
                before.add(operation.type)
                left += [*operation.control_inputs, *(each.op for each in operation.inputs)]
            return super().call(inputs)

    x, y = (my_part(each) for each in data())
    model = keras.Sequential([keras.Input((8,)), Traced(4)])
    before.clear()
    with hvkit.Monitor(folder) as monitor:
        optimizer = keras.optimizers.SGD(0.1)
        hvkit.distribute(model, optimizer, monitor=monitor)
        model.compile(optimizer, "mse")
        model.fit(x, y, batch_size=ROWS, verbose=0)
    assert {"Timestamp", "AssignVariableOp"} <= before


def test_the_norm_in_fit_is_that_of_the_mean_gradient(folder):
    # With a rate of 0 all steps have the same weights, which rank 0 sent.
    model = keras_run(folder, optimizer=keras.optimizers.SGD(0.0))
    x, y = (each.reshape(STEPS, -1, each.shape[1])[3] for each in data())
    weights = np.concatenate([model.layers[0].kernel.numpy(), model.layers[0].bias.numpy()[None]])
    inputs = np.concatenate([x, np.ones((len(x), 1), "f")], axis=1)
    gradient = 2 * inputs.T @ (inputs @ weights - y) / y.size
    assert records(folder)[0]["gradient_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)


ACCUMULATED = {"gradient_accumulation_steps": 4}


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("arguments", "of_optimizer"),
    cases(
        [
            ({"strategy": hvkit.LocalSGD(every=3)}, {}),
            ({"executed": 2}, ACCUMULATED),
            ({"callback": True}, {}),
            ({"executed": 1}, ACCUMULATED),
            ({"compression": "fp16"}, {}),
            ({"strategy": hvkit.ShardedOptimizer()}, {}),
            ({"strategy": hvkit.ParameterServer(staleness=2)}, {}),
        ],
        first=3,
    ),
    ids=str,
)
def test_each_step_of_fit_counts_once(folder, arguments, of_optimizer):
    keras_run(folder, optimizer=keras.optimizers.SGD(0.1, **of_optimizer), **arguments)
    found = records(folder)
    assert found[-1]["step"] == 2 * STEPS
    assert all(each["loss"] > 0 for each in found if "loss" in each)


@pytest.mark.two_ranks
def test_the_steps_after_the_last_record_of_fit_have_no_norm(folder):
    """Not even where the step after them would have measured it."""
    keras_run(folder, every=STEPS + 1, epochs=1)
    last = records(folder)[-1]
    assert last["step"] == STEPS
    assert "gradient_norm" not in last


@pytest.mark.two_ranks
def test_batches_outside_of_fit_count(folder):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(0.1)
    x, y = (each[:ROWS] for each in data())
    with hvkit.Monitor(folder, every=4) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor)
        model.compile(optimizer, "mse")
        for _ in range(8):
            model.train_on_batch(x, y)
    assert records(folder)[-1]["step"] == 8


def test_ranks_of_a_parameter_server_may_take_different_numbers_of_steps(folder):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hvkit.Monitor(folder, every=2) as monitor:
        hvkit.distribute(
            model, optimizer, strategy=hvkit.ParameterServer(staleness=None), monitor=monitor
        )
        for _ in range(12 if hvkit.is_main() else 3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            monitor.step()
        assert hvkit.average(float(hvkit.rank())) == (hvkit.size() - 1) / 2
    assert records(folder)[-1]["step"] == 12


def test_a_monitor_on_some_ranks_only_is_an_error_on_all(folder):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = hvkit.Monitor(folder) if hvkit.is_main() else None
    with pytest.raises(hvkit.RanksDisagreeError, match="with a monitor"):
        hvkit.distribute(model, optimizer, monitor=monitor)
