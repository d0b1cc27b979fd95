"""The files of a checkpoint of one process, which the framework alone can load; errors."""

import io
import json

import keras
import numpy as np
import pytest
import torch
from scripts import run_script

from hvkit.checkpoint import Checkpoint
from hvkit.checkpoint.saved_object import ContentReader


def torch_parts(dtype=torch.float32):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, dtype=dtype), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer


def train(model, optimizer):
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()


def keras_parts():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    optimizer = keras.optimizers.Adam(0.1)
    return model, optimizer


def keras_train(model, optimizer):
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)


def values(variables):
    return [v.numpy().tobytes() for v in variables]


def test_pytorch_files_load_with_torch_alone(tmp_path):
    model, optimizer = torch_parts()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scheduler.step(np.float64(0.5))
    scheduler.best = np.float64(0.5)  # NumPy's numbers do not load with weights_only
    train(model, optimizer)
    checkpoint = Checkpoint(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    folder = checkpoint.save(epoch=2, step=7, extras={"best": 0.5})
    state = {
        name: torch.load(folder / f"{name}.pt", weights_only=True)
        for name in ("model", "optimizer", "scheduler")
    }
    other, other_optimizer = torch_parts()
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    assert state["scheduler"]["best"] == 0.5
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["epoch"], manifest["step"], manifest["size"]) == (2, 7, 1)
    assert manifest["extras"] == {"best": 0.5}
    assert manifest["versions"]["torch"] == torch.__version__
    assert set(manifest["files"]) == {"model.pt", "optimizer.pt", "scheduler.pt", "ranks.npz"}


def test_a_compiled_model_saves_the_names_of_the_plain_one(tmp_path):
    model, _ = torch_parts()
    folder = Checkpoint(tmp_path, model=torch.compile(model)).save(epoch=0, step=1)
    other, _ = torch_parts()
    other.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    Checkpoint(tmp_path, model=torch.compile(other)).restore()
    assert torch.equal(other[0].weight, model[0].weight)


def test_optimizer_state_keeps_more_bits_than_the_parameters(tmp_path):
    layer = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    fine = torch.rand(3, 4)
    optimizer.state[layer.weight]["master"] = fine
    Checkpoint(tmp_path, optimizer=optimizer).save(epoch=0, step=1)
    other = torch.optim.SGD(layer.parameters(), lr=0.1)
    Checkpoint(tmp_path, optimizer=other).restore()
    assert torch.equal(other.state[layer.weight]["master"], fine)


def test_keras_files_load_with_keras_and_numpy_alone(tmp_path):
    model, optimizer = keras_parts()
    keras_train(model, optimizer)
    folder = Checkpoint(tmp_path, model=model, optimizer=optimizer).save(epoch=0, step=1)
    other, other_optimizer = keras_parts()
    other.load_weights(folder / "model.weights.h5")
    other_optimizer.build(other.trainable_variables)
    with np.load(folder / "optimizer.npz") as saved:
        for i, variable in enumerate(other_optimizer.variables):
            variable.assign(saved[str(i)])
    assert values(other.weights) == values(model.weights)
    assert values(other_optimizer.variables) == values(optimizer.variables)
    size = (folder / "model.weights.h5").stat().st_size
    model.save_weights(tmp_path / "with_optimizer.weights.h5")
    assert size < (tmp_path / "with_optimizer.weights.h5").stat().st_size
    assert model.optimizer is optimizer


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_several_models_and_optimizers(kind, tmp_path):
    """As in a GAN; unbuilt Keras optimizers get the variables that they had."""
    (first, one), (second, two) = keras_parts(), keras_parts()
    keras_train(first, one)
    keras_train(second, two)

    def parts(a, b):
        return [a, b] if kind == "list" else {"generator": a, "critic": b}

    folder = Checkpoint(tmp_path, model=parts(first, second), optimizer=parts(two, one)).save(
        epoch=0, step=1
    )
    names = ["0", "1"] if kind == "list" else ["generator", "critic"]
    assert all((folder / f"model-{name}.weights.h5").exists() for name in names)
    (other, three), (another, four) = keras_parts(), keras_parts()
    Checkpoint(tmp_path, model=parts(other, another), optimizer=parts(four, three)).restore()
    assert values([*other.weights, *another.weights]) == values([*first.weights, *second.weights])
    assert values(four.variables) == values(two.variables)
    assert four._trainable_variables[0] is another.trainable_variables[0]
    keras_train(other, three)
    keras_train(another, four)


def test_a_keras_model_without_weights_or_with_others_is_an_error(tmp_path):
    model = keras.Sequential([keras.layers.Dense(3)])
    checkpoint = Checkpoint(tmp_path, model=model)
    with pytest.raises(ValueError, match=r"has no weights yet: build it first"):
        checkpoint.save(epoch=0, step=0)
    model.build((None, 4))
    checkpoint.save(epoch=0, step=0)
    with pytest.raises(ValueError, match=r"has no weights yet: build it first"):
        Checkpoint(tmp_path, model=keras.Sequential([keras.layers.Dense(3)])).restore()
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(7)])
    shapes = r"weights\[0\] has shape \[4, 3\] in the file and \[4, 7\]"
    with pytest.raises(ValueError, match=shapes):
        Checkpoint(tmp_path, model=other).restore()


def test_a_wrapped_keras_optimizer_must_be_passed_as_it_is_used(tmp_path):
    model, optimizer = keras_parts()
    model.compile(optimizer=keras.optimizers.LossScaleOptimizer(optimizer), loss="mse")
    checkpoint = Checkpoint(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"pass model\.optimizer to Checkpoint"):
        checkpoint.save(epoch=0, step=0)


def test_a_loss_scale_that_ranks_shared_is_whole_in_one_process(tmp_path, monkeypatch):
    def made():
        model, optimizer = keras_parts()
        scaled = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
        scaled.build(model.trainable_variables)
        return Checkpoint(tmp_path, model=model, optimizer=scaled), scaled

    monkeypatch.setattr("hvkit.checkpoint.keras.ranks_of_scale", lambda optimizer: 4)
    made()[0].save(epoch=0, step=0)
    monkeypatch.undo()
    checkpoint, scaled = made()
    checkpoint.restore()
    assert float(scaled.dynamic_scale) == 4 * 64.0


def test_the_best_weights_of_a_callback_keep_their_dtype(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, dtype="bfloat16")])
    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    stopping.set_model(model)
    stopping.on_train_begin()
    stopping.on_epoch_end(0, {"loss": np.float32(0.5)})
    assert stopping.best_weights[0].dtype == "bfloat16"
    Checkpoint(tmp_path, model=model, stopping=stopping).save(epoch=1, step=8)
    resumed = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    Checkpoint(tmp_path, model=model, stopping=resumed).restore()
    resumed.on_train_begin()
    assert (resumed.best, resumed.best_epoch, resumed.wait) == (0.5, 0, 0)
    assert [w.dtype for w in resumed.best_weights] == [w.dtype for w in stopping.best_weights]
    assert resumed.best_weights[0].tobytes() == stopping.best_weights[0].tobytes()
    resumed.on_train_begin()
    assert resumed.best_weights is None


def test_a_property_of_a_callback_is_restored_with_its_setter(tmp_path):
    class Watched(keras.callbacks.EarlyStopping):
        @property
        def wait(self):
            return self.waited

        @wait.setter
        def wait(self, value):
            self.waited = value

    model, saved, resumed = keras_parts()[0], Watched("loss"), Watched("loss")
    saved.wait = 2
    Checkpoint(tmp_path, model=model, stopping=saved).save(epoch=3, step=3)
    Checkpoint(tmp_path, model=model, stopping=resumed).restore()
    assert resumed.wait == 2
    resumed.on_train_begin()
    assert resumed.wait == 2


def test_a_callback_goes_on_from_one_of_its_class(tmp_path):
    model = keras_parts()[0]
    Checkpoint(tmp_path, model=model, watch=keras.callbacks.EarlyStopping()).save(epoch=0, step=0)
    other = Checkpoint(tmp_path, model=model, watch=keras.callbacks.ReduceLROnPlateau())
    with pytest.raises(ValueError, match="was of class EarlyStopping, here it is of class Reduce"):
        other.restore()


class Stateful:
    """An object of the user's with a state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_a_small_state_beside_a_keras_model_is_a_json_file(tmp_path):
    model, _ = keras_parts()
    data = Stateful({"epoch": 1, "samples": 20})
    folder = Checkpoint(tmp_path, model=model, data=data).save(epoch=1, step=0)
    assert json.loads((folder / "data.json").read_text()) == {"epoch": 1, "samples": 20}
    data.state = {"array": np.zeros(2)}
    refusal = r"data: next to a Keras model, .* Stateful\.state_dict\(\) returned something else"
    with pytest.raises(TypeError, match=refusal):
        Checkpoint(tmp_path, model=model, data=data).save(epoch=1, step=1)
    Checkpoint(tmp_path, model=model, data=data).restore()
    assert data.state == {"epoch": 1, "samples": 20}


def test_a_state_that_torch_would_not_load_safely_is_refused(tmp_path):
    refusal = r"odd: torch\.load with weights_only=True cannot read the state of Stateful"
    with pytest.raises(TypeError, match=refusal):
        Checkpoint(tmp_path, odd=Stateful({"object": np.zeros(3)})).save(epoch=0, step=0)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


LAYER = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "pass at least model="),
        ({"best": 0.5}, TypeError, r"best is of type builtins\.float, .* extras="),
        (
            {"model": keras_parts()[0], "log": keras.callbacks.CSVLogger("log.csv")},
            TypeError,
            "log is a CSVLogger: a checkpoint saves only these callbacks: EarlyStopping, ReduceLR",
        ),
        ({"manifest": LAYER}, ValueError, "'manifest' cannot be the name of a part"),
        ({"random": LAYER}, ValueError, "'random' cannot be the name of a part"),
        ({"model": {"a/b": LAYER}}, ValueError, "'model-a/b' cannot be the name of a part"),
        ({"model": LAYER, "keep": 0}, ValueError, "keep must be at least 1"),
        ({"model": LAYER, "keep": "3"}, TypeError, "keep must be an int"),
        ({"model": LAYER, "background": 1}, TypeError, "background must be True or False, got 1"),
        ({"model": LAYER, "sharded": 2}, TypeError, "sharded must be True or False"),
        *(
            ({"model": LAYER, "sharded": True, **other}, ValueError, "sharded=True writes at once")
            for other in ({"background": True}, {"replicas": 1})
        ),
    ],
)
def test_wrong_arguments(arguments, error, text, tmp_path):
    with pytest.raises(error, match=text):
        Checkpoint(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"epoch": 0.5, "step": 1}, TypeError, "epoch must be an int, got 0.5"),
        ({"epoch": 0, "step": -1}, ValueError, "step must be at least 0, got -1"),
        ({"epoch": 0, "step": 1, "extras": [1]}, TypeError, "extras must be a dict"),
        ({"epoch": 0, "step": 1, "extras": {1: 2}}, TypeError, "extras has the key 1 of type int"),
        ({"epoch": 0, "step": 1, "extras": {"a": {1}}}, TypeError, r"extras\['a'\] is of type set"),
    ],
)
def test_wrong_arguments_of_save_write_nothing(arguments, error, text, tmp_path):
    with pytest.raises(error, match=text):
        Checkpoint(tmp_path, model=LAYER).save(**arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("every", "error"), [("step", TypeError), (2.5, TypeError), (True, TypeError), (0, ValueError)]
)
def test_wrong_arguments_of_the_callback(every, error, tmp_path):
    checkpoint = Checkpoint(tmp_path, model=keras_parts()[0])
    with pytest.raises(error, match="every must be"):
        checkpoint.callback(every)


def test_buffers_may_be_resized_after_a_save(tmp_path):
    model = torch.nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Checkpoint(tmp_path, model=model, optimizer=optimizer).save(epoch=0, step=1)
    for buffer in model.buffers():
        buffer.resize_(8)


ON_TWO_DEVICES = """
import os, sys, types, jax, numpy as np, hvkit
os.chdir(sys.argv[1])
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rows = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
run = types.SimpleNamespace(w=jax.device_put(np.arange(4.0), rows))
hvkit.Checkpoint("run", run=run).save(epoch=0, step=0)
run.w = jax.device_put(np.zeros(4), rows)
hvkit.Checkpoint("run", run=run).restore()
assert run.w.sharding == rows, run.w.sharding
assert run.w.tolist() == [0, 1, 2, 3]
"""


def test_an_array_of_jax_on_several_devices_of_one_process_comes_back_there(tmp_path):
    two = "--xla_force_host_platform_device_count=2"
    done = run_script(ON_TWO_DEVICES, tmp_path, XLA_FLAGS=two)
    assert done.returncode == 0, done.stderr


def test_the_content_of_a_file_reads_as_any_file_and_archives_open_in_it():
    file = ContentReader(memoryview(b"0123456789"))
    assert file.read(3) == b"012"
    assert file.seek(-2, io.SEEK_END) == 8
    assert file.read() == b"89"
    assert file.read(1) == b""
    file.seek(2)
    assert file.seek(3, io.SEEK_CUR) == file.tell() == 5
    into = bytearray(4)
    assert file.readinto(into) == 4
    assert into == b"5678"
    written = io.BytesIO()
    np.savez(written, x=np.arange(1000))
    with np.load(ContentReader(memoryview(written.getvalue()))) as values:
        assert (values["x"] == np.arange(1000)).all()
