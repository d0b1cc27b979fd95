"""``hvkit.Monitor`` in one process."""

import copy
import gc
import itertools
import json
import re
import sys
import time
import weakref
from functools import partial
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
import torch
from scripts import run_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

import hvkit
from hvkit.monitor import monitor as monitor_module
from hvkit.monitor.measurements import Means, Step
from hvkit.monitor.recorded_run import read


def torch_parts():
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def keras_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def train(folder, steps=20, **options):
    """Train a small model; return its weights, and those that it gets without a monitor."""
    torch.manual_seed(0)
    data = [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(steps)]
    model, optimizer = torch_parts()
    plain = copy.deepcopy(model)
    step_of_plain = torch.optim.SGD(plain.parameters(), 0.1)
    for x, y in data:
        step_of_plain.zero_grad()
        (plain(x) - y).square().mean().backward()
        step_of_plain.step()
    with hvkit.Monitor(folder, **options) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor)
        for x, y in monitor.batches(data):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
        monitor.log(accuracy=0.5)
    return model.weight.detach(), plain.weight.detach()


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def records(folder):
    return [line for line in lines(folder) if "samples_per_second" in line]


def steps_of(folder):
    return [each["step"] for each in records(folder)]


def test_records_hold_metrics_rate_norm_and_samples_and_change_no_weights(tmp_path, caplog):
    weights, without_monitor = train(tmp_path, every=5)
    assert torch.equal(weights, without_monitor)
    found = records(tmp_path)
    assert steps_of(tmp_path) == [5, 10, 15, 20]
    assert all(each["learning_rate"] == 0.1 and each["gradient_norm"] > 0 for each in found)
    assert all(each["samples_per_second"] > 0 for each in found)
    assert found[0]["loss"] > found[-1]["loss"] > 0
    first, *_, end = lines(tmp_path)
    assert len(first["start"]["hosts"]) == 1
    assert end["end"]["busy"] == 1
    (said,) = [each for each in caplog.messages if each.startswith(f"{tmp_path}: ")]
    assert re.fullmatch(r"(data \d+%, )?compute \d+%", said.removeprefix(f"{tmp_path}: "))


REUSED = torch.zeros(())


@pytest.mark.parametrize(
    ("every", "losses", "means"),
    [
        (2, [1.0, 3.0, torch.tensor(5.0), 9], [2, 7]),
        (1000, [torch.tensor(2.296875, dtype=torch.bfloat16)] * 1000, [2.296875]),
        (4, map(REUSED.fill_, (1.0, 2.0, 3.0, 4.0)), [2.5]),
    ],
    ids=["numbers", "few bits", "a tensor that is filled anew"],
)
def test_a_record_is_the_mean_over_its_steps(every, losses, means, tmp_path):
    with hvkit.Monitor(tmp_path, every=every) as monitor:
        for loss in losses:
            monitor.step(loss=loss, samples=8)
    assert [each["loss"] for each in records(tmp_path)] == means


def test_a_loss_of_tensorflow_is_read_at_a_record_only(tmp_path, monkeypatch):
    values = [tf.constant([2.0], tf.bfloat16), tf.constant(3.0), tf.Variable(4.0)]
    means = Means()
    with monkeypatch.context() as patched:
        patched.setattr(type(values[1]), "__float__", lambda _: pytest.fail("read too early"))
        for value in values:
            means.add("loss", value)
        values[2].assign(100.0)
    assert means.read() == {"loss": 3.0}


def test_numbers_logged_before_the_first_record_come_after_the_start(tmp_path):
    with hvkit.Monitor(tmp_path, every=100) as monitor:
        monitor.log(accuracy=0.25)
        monitor.step(loss=1.0)
        monitor.log(accuracy=0.5)
    start, *logged, _ = [line for line in lines(tmp_path) if "loss" not in line]
    assert "start" in start
    assert [line["logged"] for line in logged] == [{"accuracy": 0.25}, {"accuracy": 0.5}]


def test_a_closed_monitor_says_so(tmp_path):
    with hvkit.Monitor(tmp_path) as monitor:
        monitor.step(loss=1.0)
    for use in (monitor.step, monitor.log, monitor.flush):
        with pytest.raises(ValueError, match="is closed: use it inside its with block"):
            use()


def test_a_folder_that_cannot_be_made_is_an_error_of_distribute(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(hvkit.HvkitError, match="name a folder that rank 0 can make"):
        hvkit.distribute(*torch_parts(), monitor=hvkit.Monitor(tmp_path / "file" / "x"))


def test_a_monitor_is_for_one_model(tmp_path):
    monitor = hvkit.Monitor(tmp_path)
    hvkit.distribute(*torch_parts(), monitor=monitor)
    with pytest.raises(ValueError, match="pass it with one model"):
        hvkit.distribute(*torch_parts(), monitor=monitor)


def fails(values, step):
    raise ConnectionError("no server")


@pytest.mark.parametrize(
    ("hook", "said"), [(None, "TensorBoard's event file failed"), (fails, "no server")]
)
def test_a_failed_write_is_logged_once_and_training_continues(
    hook, said, tmp_path, monkeypatch, caplog
):
    if hook is None:
        monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    train(tmp_path, every=5, hook=hook)
    assert len([each for each in caplog.messages if said in each]) == 1
    assert len(records(tmp_path)) == 4


def scalars(folder, name):
    """The steps and values that TensorBoard shows."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_reads_the_event_files(tmp_path):
    train(tmp_path, every=5)
    found = {each["step"]: each for each in records(tmp_path)}
    for name in ("loss", "gradient_norm", "learning_rate", "samples_per_second"):
        expected = [(step, pytest.approx(each[name], rel=1e-6)) for step, each in found.items()]
        assert scalars(tmp_path, name) == expected
    assert len(scalars(tmp_path, "seconds/compute")) == 4
    assert scalars(tmp_path, "accuracy") == [(20, 0.5)]


def test_tensorboard_shows_each_step_once_when_a_restart_repeats_some(tmp_path, monkeypatch):
    # TensorBoard reads files in the order of the seconds in their names.
    clock = SimpleNamespace(time=partial(next, itertools.count(1e9)))
    monkeypatch.setattr(event_file_writer, "time", clock)

    def run(begin, losses):
        with hvkit.Monitor(tmp_path, every=5) as monitor:
            monitor.load_state_dict({"step": begin})
            for loss in losses:
                monitor.step(loss=loss)
            monitor.log(accuracy=losses[0])

    run(0, [1.0] * 15)
    run(5, [2.0] * 15)
    assert scalars(tmp_path, "loss") == [(5, 1.0), (10, 2.0), (15, 2.0), (20, 2.0)]
    assert scalars(tmp_path, "accuracy") == [(20, 2.0)]  # without that of step 15
    run(0, [3.0] * 5)  # another run in the same folder
    assert scalars(tmp_path, "loss") == [(5, 3.0)]


def test_a_hook_gets_numbers_and_the_step(tmp_path):
    seen = []
    train(tmp_path, every=10, tensorboard=False, hook=lambda d, step: seen.append((step, d)))
    assert [step for step, _ in seen] == [10, 20, 20]
    assert all(isinstance(v, int | float) for _, values in seen for v in values.values())
    assert not list(tmp_path.glob("events*"))


def ends_with(error, folder, use):
    """Use a monitor in a with block that ends with an error; return the last lines of its file."""

    def run():
        with hvkit.Monitor(folder, every=3) as monitor:
            use(monitor)
            raise error

    with pytest.raises(type(error)):
        run()
    return lines(folder)[-2:]


@pytest.mark.parametrize(
    ("error", "recorded"),
    [(ValueError("boom"), "ValueError: boom"), (SystemExit(0), None)],
)
def test_an_error_that_ends_a_run_is_in_its_file_with_the_steps_since_the_last_record(
    error, recorded, tmp_path
):
    def steps(monitor):
        for loss in (1.0, 2.0, 3.0, 4.0, float("nan")):
            monitor.step(loss=loss)

    logged, end = ends_with(error, tmp_path, steps)
    assert end["end"].get("error") == recorded
    if recorded:
        assert (logged["step"], logged["logged"], end["end"]["step"]) == (5, {"loss": None}, 5)


def test_the_last_steps_are_recorded_when_all_ranks_leave(tmp_path, monkeypatch):
    def leave(monitor):
        for _ in range(4):
            monitor.step(loss=1.0)
        monkeypatch.setattr(monitor_module, "PREEMPTION", SimpleNamespace(left=True))

    _, end = ends_with(SystemExit(143), tmp_path, leave)
    assert steps_of(tmp_path) == [3, 4]
    assert end["end"]["left"]
    assert "error" not in end["end"]


@pytest.mark.parametrize("own_steps", [[], [1000.0]])
def test_after_an_error_the_file_has_the_metrics_of_fit_or_of_an_own_loop_after_it(
    own_steps, tmp_path
):
    keras.utils.set_random_seed(0)
    model = keras_model()

    def fit_and_step(monitor):
        rows = 4 * (5 - len(own_steps))
        x, y = tf.random.normal((rows, 4)), tf.random.normal((rows, 1))
        model.fit(x, y, batch_size=4, callbacks=[monitor.callback(model), fails], verbose=0)
        for loss in own_steps:
            monitor.step(loss=loss)

    def fail_in_fit(batch, logs=None):
        if batch == 4:
            raise ValueError("boom")

    fails = keras.callbacks.LambdaCallback(on_train_batch_end=fail_in_fit)
    logged, end = ends_with(ValueError("boom"), tmp_path, fit_and_step)
    assert (logged["step"], end["end"]["step"]) == (5, 5)
    assert 0 < logged["logged"]["loss"] < 1000 or own_steps == [logged["logged"]["loss"]]


def test_a_line_that_a_kill_has_cut_off_stays_alone(tmp_path):
    train(tmp_path, steps=2, every=1)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    train(tmp_path, steps=3, every=1)
    run = read(tmp_path)
    assert (run.steps, run.unreadable) == (3, 1)
    assert run.before is not None  # the second start was read


def test_a_monitor_that_is_closed_computes_no_norm(tmp_path, monkeypatch):
    model, optimizer = torch_parts()
    computed = []
    monkeypatch.setattr(
        torch.nn.utils, "get_total_norm", lambda *args: computed.append(1) or torch.ones(())
    )
    with hvkit.Monitor(tmp_path, every=1) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor)
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            monitor.step()
    inside = len(computed)
    optimizer.step()
    assert (inside, len(computed)) == (4, 4)  # after backward() and at the update


@pytest.mark.parametrize("kind", ["torch", "keras"])
def test_a_closed_monitor_holds_neither_model_nor_optimizer(kind, tmp_path):
    monitor = hvkit.Monitor(tmp_path, every=1)
    with monitor:
        if kind == "torch":
            model, optimizer = torch_parts()
            hvkit.distribute(model, optimizer, monitor=monitor)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            monitor.step()
        else:
            model, optimizer = keras_model(), keras.optimizers.SGD(0.1)
            hvkit.distribute(model, optimizer, monitor=monitor)
            model.compile(optimizer, "mse")
            model.fit(tf.ones((4, 4)), tf.ones((4, 1)), verbose=0)
    gone = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    keras.utils.clear_session()
    gc.collect()
    assert [each() for each in gone] == [None] * 2


def test_a_callback_list_for_fit_gets_the_monitor_first(tmp_path):
    model, optimizer = keras_model(), keras.optimizers.SGD()
    own = keras.callbacks.History()
    given = keras.callbacks.CallbackList([own], model=model)
    with hvkit.Monitor(tmp_path, every=3) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor)
        model.compile(optimizer, "mse")
        for _ in range(2):
            model.fit(tf.zeros((24, 4)), tf.zeros((24, 1)), 4, callbacks=given, verbose=0)
        assert given.callbacks == [own]
    assert steps_of(tmp_path) == [3, 6, 9, 12]


def test_the_error_of_a_script_without_a_with_block_is_in_the_file_too(tmp_path):
    script = (
        "import sys, hvkit\n"
        "monitor = hvkit.Monitor(sys.argv[1], every=2)\n"
        "for loss in (1.0, 2.0, 3.0):\n    monitor.step(loss=loss)\n"
        "raise ValueError('boom')\n"
    )
    run_script(script, tmp_path)
    *_, logged, end = lines(tmp_path)
    assert (logged["logged"], logged["step"]) == ({"loss": 3.0}, 3)
    assert end["end"]["error"] == "ValueError: boom"


def test_slow_steps_are_recorded_from_the_first_on(tmp_path, monkeypatch):
    monitor = hvkit.Monitor(tmp_path)
    slow = Step(duration=60.0, data=0.0, blocked=0.0, samples=8.0)
    monkeypatch.setattr(monitor.clock, "end", lambda *_: slow)
    for _ in range(2):
        monitor.step(loss=1.0)
    assert steps_of(tmp_path) == [1, 2]


def test_a_run_begins_with_its_monitor_and_after_the_step_that_it_resumes_from(tmp_path):
    before = time.time()
    monitor = hvkit.Monitor(tmp_path, every=3)
    made = time.time()
    monitor.load_state_dict({"step": 7})
    monitor.end_steps(1, 8.0, {}, timed=False)  # as fit counts the step that makes its graph
    time.sleep(0.01)
    for _ in range(2):
        monitor.step(loss=1.0)
    monitor.close()
    start = lines(tmp_path)[0]["start"]
    assert before <= start["time"] <= made
    assert start["step"] == 7


def test_a_resumed_run_counts_on_in_the_same_file(tmp_path):
    for _ in range(2):
        with hvkit.Monitor(tmp_path / "seen", every=5) as monitor:
            checkpoint = hvkit.Checkpoint(tmp_path / "saved", monitor=monitor)
            checkpoint.restore()
            for _ in range(5):
                monitor.step(loss=1.0)
            checkpoint.save(epoch=0, step=monitor.state_dict()["step"])
    assert steps_of(tmp_path / "seen") == [5, 10]
    starts = [line["start"]["step"] for line in lines(tmp_path / "seen") if "start" in line]
    assert starts == [0, 5]


def test_a_run_may_get_a_monitor_when_it_resumes(tmp_path, caplog):
    model, _ = torch_parts()
    hvkit.Checkpoint(tmp_path / "saved", model=model).save(epoch=1, step=7000)
    with hvkit.Monitor(tmp_path / "seen") as monitor:
        hvkit.Checkpoint(tmp_path / "saved", model=model, monitor=monitor).restore()
        monitor.step(loss=1.0)
    assert f"{tmp_path / 'seen'}: since step 7,000: compute 100%" in caplog.messages
    assert lines(tmp_path / "seen")[0]["start"]["step"] == 7000
    assert steps_of(tmp_path / "seen") == [7001]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            '{"restart": 2, "reason": "rank 1 was killed", "reached": 9}',
            {"restart": 2, "reason": "rank 1 was killed", "reached": 9},
        ),
        *[(strange, {}) for strange in ("", "2", "[]", '{"restart": "x"}', "{")],
    ],
)
def test_a_restart_says_its_reason(value, told, tmp_path, monkeypatch):
    monkeypatch.setenv("HVKIT_RESTART", value)
    with hvkit.Monitor(tmp_path) as monitor:
        monitor.step(loss=1.0)
    start = lines(tmp_path)[0]["start"]
    names = "restart", "reason", "reached"
    assert {name: start[name] for name in names if name in start} == told


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: hvkit.Monitor(folder, every=0), "every must be at least 1, got 0"),
        (lambda folder: hvkit.Monitor(folder, every=1.5), "every must be an int"),
        (lambda folder: hvkit.Monitor(folder, hook=3), "hook must be a function"),
        (lambda folder: hvkit.Monitor(folder).step(loss="high"), "metrics are numbers"),
        (lambda folder: hvkit.Monitor(folder).log(loss=torch.ones(2)), "metrics are numbers"),
        *[
            (lambda folder, name=name: hvkit.Monitor(folder).step(**{name: 1.0}), f"'{name}' is a")
            for name in ("step", "epoch", "start", "gradient_norm")
        ],
        (
            lambda folder: hvkit.distribute(*torch_parts(), monitor="runs"),
            r"monitor must be a hvkit\.Monitor, got 'runs'",
        ),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(tmp_path)
