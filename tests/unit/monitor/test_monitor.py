"""``hvkit.Monitor`` in one process."""

import gc
import json
import re
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hvkit
from hvkit.monitor import monitor as monitor_module
from hvkit.monitor.recorded_run import read
from hvkit.monitor.records import Means
from hvkit.monitor.step_times import Step


def train(folder, steps=20, watched=True, **options):
    """Train a small model; return its weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(steps)]
    if not watched:
        hvkit.distribute(model, optimizer)
        for x, y in data:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        return model.weight.detach()
    with hvkit.Monitor(folder, **options) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor)
        for x, y in monitor.batches(data):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
        monitor.log(accuracy=0.5)
    return model.weight.detach()


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def records(folder):
    return [line for line in lines(folder) if "samples_per_second" in line]


def test_records_hold_metrics_rate_norm_and_samples(tmp_path):
    train(tmp_path, every=5)
    found = records(tmp_path)
    assert [each["step"] for each in found] == [5, 10, 15, 20]
    assert all(each["learning_rate"] == 0.1 and each["gradient_norm"] > 0 for each in found)
    assert all(each["samples_per_second"] > 0 for each in found)
    assert found[0]["loss"] > found[-1]["loss"] > 0
    first, *_, end = lines(tmp_path)
    assert len(first["start"]["hosts"]) == 1
    assert end["end"]["busy"] == 1


def test_a_record_is_the_mean_over_its_steps(tmp_path):
    with hvkit.Monitor(tmp_path, every=2) as monitor:
        for value in (1.0, 3.0, torch.tensor(5.0), 9):
            monitor.step(loss=value, samples=8)
    assert [each["loss"] for each in records(tmp_path)] == [2, 7]


def test_losses_of_few_bits_add_up_in_32(tmp_path):
    with hvkit.Monitor(tmp_path, every=1000) as monitor:
        for _ in range(1000):
            monitor.step(loss=torch.tensor(2.296875, dtype=torch.bfloat16))
    assert [each["loss"] for each in records(tmp_path)] == [2.296875]


def test_a_tensor_that_is_filled_anew_counts_with_each_of_its_values(tmp_path):
    loss = torch.zeros(())
    with hvkit.Monitor(tmp_path, every=4) as monitor:
        for value in (1.0, 2.0, 3.0, 4.0):
            monitor.step(loss=loss.fill_(value))
    assert [each["loss"] for each in records(tmp_path)] == [2.5]


def test_a_loss_of_tensorflow_is_read_at_a_record_only(tmp_path, monkeypatch):
    values = [tf.constant([2.0], tf.bfloat16), tf.constant(3.0), tf.Variable(4.0)]
    means = Means()
    with monkeypatch.context() as patched:
        patched.setattr(type(values[1]), "__float__", lambda _: pytest.fail("read too early"))
        for value in values:
            means.add("loss", value)
        values[2].assign(100.0)
    assert means.read() == {"loss": 3.0}


def test_what_is_logged_before_the_first_record_comes_after_the_start(tmp_path):
    with hvkit.Monitor(tmp_path, every=100) as monitor:
        monitor.log(accuracy=0.25)
        monitor.step(loss=1.0)
        monitor.log(accuracy=0.5)
    assert "start" in lines(tmp_path)[0]
    assert [line["logged"] for line in lines(tmp_path) if "logged" in line] == [
        {"accuracy": 0.25},
        {"accuracy": 0.5},
    ]


@pytest.mark.parametrize("name", ["step", "epoch", "start", "gradient_norm"])
def test_names_of_hvkits_own_are_refused(tmp_path, name):
    monitor = hvkit.Monitor(tmp_path)
    with pytest.raises(ValueError, match=f"'{name}' is a name that hvkit uses"):
        monitor.step(**{name: 1.0})


def test_a_closed_monitor_says_so(tmp_path):
    with hvkit.Monitor(tmp_path) as monitor:
        monitor.step(loss=1.0)
    for use in (monitor.step, monitor.log, monitor.flush):
        with pytest.raises(ValueError, match="is closed: use it inside its with block"):
            use()


def test_a_folder_that_cannot_be_made_is_an_error_of_distribute(tmp_path):
    (tmp_path / "file").touch()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(hvkit.HvkitError, match="name a folder that rank 0 can make"):
        hvkit.distribute(model, optimizer, monitor=hvkit.Monitor(tmp_path / "file" / "x"))


def test_a_monitor_is_for_one_model(tmp_path):
    monitor = hvkit.Monitor(tmp_path)
    for number in range(2):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if number == 0:
            hvkit.distribute(model, optimizer, monitor=monitor)
    with pytest.raises(ValueError, match="pass it with one model"):
        hvkit.distribute(model, optimizer, monitor=monitor)


def test_a_tensorboard_that_cannot_be_imported_ends_no_training(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    train(tmp_path, every=5)
    assert "TensorBoard's event file failed" in caplog.text
    assert len(records(tmp_path)) == 4


def test_training_gives_the_same_bits(tmp_path):
    assert torch.equal(train(tmp_path), train(tmp_path, watched=False))


def test_tensorboard_reads_the_event_files(tmp_path):
    train(tmp_path, every=5)
    events = EventAccumulator(str(tmp_path))
    events.Reload()

    def read(name):
        return {event.step: event.value for event in events.Scalars(name)}

    assert {*read("loss")} == {5, 10, 15, 20}
    assert read("loss")[5] == pytest.approx(records(tmp_path)[0]["loss"], rel=1e-6)
    assert {"gradient_norm", "learning_rate", "seconds/compute", "samples_per_second"} <= {
        *events.Tags()["scalars"]
    }
    assert read("accuracy") == {20: 0.5}


def test_tensorboard_shows_each_step_once_when_a_restart_repeats_some(tmp_path):
    def run(begin, losses):
        second = int(time.time())
        while int(time.time()) == second:  # TensorBoard reads files in the order of these
            time.sleep(0.01)
        with hvkit.Monitor(tmp_path, every=5) as monitor:
            monitor.load_state_dict({"step": begin})
            for loss in losses:
                monitor.step(loss=loss)
            monitor.log(accuracy=losses[0])

    def points(name):
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(name)]

    run(0, [1.0] * 15)
    run(5, [2.0] * 15)
    assert points("loss") == [(5, 1.0), (10, 2.0), (15, 2.0), (20, 2.0)]
    assert points("accuracy") == [(20, 2.0)]  # without that of step 15
    run(0, [3.0] * 5)  # another run in the same folder
    assert points("loss") == [(5, 3.0)]


def test_a_hook_gets_numbers_and_the_step(tmp_path):
    seen = []
    train(tmp_path, every=10, tensorboard=False, hook=lambda d, step: seen.append((step, d)))
    assert [step for step, _ in seen] == [10, 20, 20]
    assert all(isinstance(v, int | float) for _, values in seen for v in values.values())
    assert not list(tmp_path.glob("events*"))


def test_a_hook_that_fails_is_logged_once_and_training_goes_on(tmp_path, caplog):
    def hook(values, step):
        raise ConnectionError("no server")

    train(tmp_path, every=5, hook=hook)
    said = [each.message for each in caplog.records if "no server" in each.message]
    assert len(said) == 1
    assert len(records(tmp_path)) == 4


def test_the_line_at_the_end_is_logged(tmp_path, caplog):
    train(tmp_path)
    (said,) = [each for each in caplog.messages if each.startswith(f"{tmp_path}: ")]
    assert re.fullmatch(r"(data \d+%, )?compute \d+%", said.removeprefix(f"{tmp_path}: "))


def end_of(folder, error):
    """The end of a run whose with block ends with this error."""

    def run():
        with hvkit.Monitor(folder, every=1) as monitor:
            monitor.step(loss=1.0)
            raise error

    with pytest.raises(type(error)):
        run()
    return lines(folder)[-1]["end"]


def test_the_error_that_ends_a_run_is_in_its_file(tmp_path):
    assert end_of(tmp_path, ValueError("boom"))["error"] == "ValueError: boom"


def test_steps_since_the_last_record_are_in_the_file_after_an_error(tmp_path):
    def run():
        with hvkit.Monitor(tmp_path, every=3) as monitor:
            for loss in (1.0, 2.0, 3.0, 4.0, float("nan")):
                monitor.step(loss=loss)
            raise FloatingPointError

    with pytest.raises(FloatingPointError):
        run()
    *_, logged, end = lines(tmp_path)
    assert (logged["step"], logged["logged"], end["end"]["step"]) == (5, {"loss": None}, 5)


def test_steps_of_fit_since_the_last_record_are_in_the_file_after_an_error(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise ValueError("boom")

    def run():
        with hvkit.Monitor(tmp_path, every=3) as monitor:
            x, y = tf.random.normal((40, 4)), tf.random.normal((40, 1))
            watch = monitor.callback(model)
            model.fit(x, y, batch_size=4, callbacks=[watch, Fails()], verbose=0)

    with pytest.raises(ValueError, match="boom"):
        run()
    *_, logged, end = lines(tmp_path)
    assert (logged["step"], end["end"]["step"]) == (5, 5)
    assert logged["logged"]["loss"] > 0


def test_after_fit_the_metrics_of_an_own_loop_are_the_newest(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def run():
        with hvkit.Monitor(tmp_path, every=3) as monitor:
            x, y = tf.ones((16, 4)), tf.zeros((16, 1))
            model.fit(x, y, batch_size=4, callbacks=[monitor.callback(model)], verbose=0)
            monitor.step(loss=1000.0)
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        run()
    *_, logged, end = lines(tmp_path)
    assert (logged["logged"]["loss"], end["end"]["step"]) == (1000.0, 5)


def test_a_line_that_a_kill_has_cut_off_stays_alone(tmp_path):
    train(tmp_path, steps=2, every=1)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    train(tmp_path, steps=3, every=1)
    run = read(tmp_path)
    assert (run.steps, run.unreadable) == (3, 1)
    assert run.before is not None  # the second start was read


def test_a_monitor_that_is_closed_computes_no_norm(tmp_path, monkeypatch):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
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


def test_a_closed_monitor_holds_neither_model_nor_optimizer(tmp_path):
    monitors, gone = [], []
    for kind in ("torch", "keras"):
        monitors.append(hvkit.Monitor(tmp_path / kind, every=1))
        if kind == "torch":
            model = torch.nn.Linear(8, 4)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with monitors[-1] as monitor:
                hvkit.distribute(model, optimizer, monitor=monitor)
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                monitor.step()
        else:
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
            optimizer = keras.optimizers.SGD(0.1)
            with monitors[-1] as monitor:
                hvkit.distribute(model, optimizer, monitor=monitor)
                model.compile(optimizer, "mse")
                model.fit(tf.ones((4, 8)), tf.ones((4, 4)), verbose=0)
        gone += [weakref.ref(model), weakref.ref(optimizer)]
        del model, optimizer
    keras.utils.clear_session()
    gc.collect()
    assert [each() for each in gone] == [None] * 4


def test_a_callback_list_for_fit_gets_the_monitor_first(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()
    own = keras.callbacks.History()
    given = keras.callbacks.CallbackList([own], model=model)
    with hvkit.Monitor(tmp_path, every=3) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor)
        model.compile(optimizer, "mse")
        for _ in range(2):
            model.fit(tf.zeros((24, 4)), tf.zeros((24, 1)), 4, callbacks=given, verbose=0)
        assert given.callbacks == [own]
    assert [each["step"] for each in records(tmp_path)] == [3, 6, 9, 12]


def test_the_error_of_a_script_without_a_with_block_is_in_the_file_too(tmp_path):
    script = (
        "import sys, hvkit\n"
        "monitor = hvkit.Monitor(sys.argv[1], every=2)\n"
        "for loss in (1.0, 2.0, 3.0):\n    monitor.step(loss=loss)\n"
        "raise ValueError('boom')\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, check=False)
    *_, logged, end = lines(tmp_path)
    assert (logged["logged"], logged["step"]) == ({"loss": 3.0}, 3)
    assert end["end"]["error"] == "ValueError: boom"


def test_a_script_that_exits_well_has_no_error(tmp_path):
    assert "error" not in end_of(tmp_path, SystemExit(0))


def test_what_was_not_recorded_is_recorded_when_all_ranks_leave(tmp_path, monkeypatch):
    def run():
        with hvkit.Monitor(tmp_path, every=3) as monitor:
            for _ in range(4):
                monitor.step(loss=1.0)
            monkeypatch.setattr(monitor_module, "PREEMPTION", SimpleNamespace(left=True))
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        run()
    assert [each["step"] for each in records(tmp_path)] == [3, 4]
    end = lines(tmp_path)[-1]["end"]
    assert end["left"]
    assert "error" not in end


def test_slow_steps_are_recorded_from_the_first_on(tmp_path):
    monitor = hvkit.Monitor(tmp_path)
    for _ in range(2):
        monitor.add_step(Step(duration=60.0, data=0.0, blocked=0.0, samples=8.0), {"loss": 1.0})
    assert [each["step"] for each in records(tmp_path)] == [1, 2]


def test_a_run_begins_with_its_monitor_and_after_the_step_that_it_resumes_from(tmp_path):
    before = time.time()
    monitor = hvkit.Monitor(tmp_path, every=3)
    made = time.time()
    monitor.load_state_dict({"step": 7})
    monitor.add_step(None, {})  # as fit counts the step in which it makes its graph
    time.sleep(0.01)
    for _ in range(2):
        monitor.step(loss=1.0)
    monitor.close()
    start = lines(tmp_path)[0]["start"]
    assert before <= start["time"] <= made
    assert start["step"] == 7


def test_the_line_of_a_resumed_run_says_since_when(tmp_path, caplog):
    with hvkit.Monitor(tmp_path) as monitor:
        monitor.load_state_dict({"step": 7000})
        monitor.step(loss=1.0)
    assert f"{tmp_path}: since step 7,000: compute 100%" in caplog.messages


def test_a_resumed_run_counts_on_in_the_same_file(tmp_path):
    for _ in range(2):
        torch.manual_seed(0)
        with hvkit.Monitor(tmp_path / "seen", every=5) as monitor:
            checkpoint = hvkit.Checkpoint(tmp_path / "saved", monitor=monitor)
            checkpoint.restore()
            for _ in range(5):
                monitor.step(loss=1.0)
            checkpoint.save(epoch=0, step=monitor.state_dict()["step"])
    assert [each["step"] for each in records(tmp_path / "seen")] == [5, 10]
    starts = [line["start"]["step"] for line in lines(tmp_path / "seen") if "start" in line]
    assert starts == [0, 5]


def test_a_run_may_get_a_monitor_when_it_resumes(tmp_path):
    model = torch.nn.Linear(2, 2)
    hvkit.Checkpoint(tmp_path / "saved", model=model).save(epoch=1, step=7)
    with hvkit.Monitor(tmp_path / "seen") as monitor:
        start = hvkit.Checkpoint(tmp_path / "saved", model=model, monitor=monitor).restore()
        monitor.step(loss=1.0)
    assert start.step == 7
    assert lines(tmp_path / "seen")[0]["start"]["step"] == 7
    assert [each["step"] for each in records(tmp_path / "seen")] == [8]


def test_a_restart_says_its_reason(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "HVKIT_RESTART", json.dumps({"restart": 2, "reason": "rank 1 was killed", "reached": 9})
    )
    train(tmp_path)
    start = lines(tmp_path)[0]["start"]
    assert (start["restart"], start["reason"], start["reached"]) == (2, "rank 1 was killed", 9)


@pytest.mark.parametrize("value", ["", "2", "[]", '{"restart": "x"}', "{"])
def test_a_strange_variable_is_no_restart(tmp_path, monkeypatch, value):
    monkeypatch.setenv("HVKIT_RESTART", value)
    train(tmp_path)
    assert "restart" not in lines(tmp_path)[0]["start"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: hvkit.Monitor(folder, every=0), "every must be at least 1, got 0"),
        (lambda folder: hvkit.Monitor(folder, every=1.5), "every must be an int"),
        (lambda folder: hvkit.Monitor(folder, hook=3), "hook must be a function"),
        (lambda folder: hvkit.Monitor(folder).step(loss="high"), "metrics are numbers"),
        (lambda folder: hvkit.Monitor(folder).log(loss=torch.ones(2)), "metrics are numbers"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(tmp_path)


def test_distribute_takes_only_a_monitor():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match=r"monitor must be a hvkit\.Monitor, got 'runs'"):
        hvkit.distribute(model, optimizer, monitor="runs")
