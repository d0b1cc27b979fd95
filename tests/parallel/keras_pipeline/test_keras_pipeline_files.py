"""Files of a model in a pipeline are those of the whole model."""

import keras
import numpy as np
from cases import MORE
from keras_models import ON_TENSORFLOW
from ranks import error_of, identical, shared_folder
from stages import (
    MESH,
    MICRO,
    PER_ROW,
    ROWS,
    adam,
    built,
    data,
    distributed,
    mine,
    one_pipeline,
    residual,
    row,
    whole,
)

import hvkit
from hvkit.communication.collectives import gather
from hvkit.frameworks.keras.pipeline.tensors import Tensors


@MORE
@one_pipeline
def test_callbacks_save_the_whole_model_and_stop_all_ranks(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    model, optimizer = distributed(residual, seed=0)
    model.compile(optimizer, "mse")
    x, y = data(model, PER_ROW)
    saved, files = str(folder / "best.keras"), str(folder / "{epoch}.weights.h5")
    callbacks = [
        keras.callbacks.ModelCheckpoint(saved, monitor="loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(files, save_weights_only=True),
        keras.callbacks.EarlyStopping(
            "loss", mode="max", patience=1, restore_best_weights=True, start_from_epoch=1
        ),
    ]
    history = model.fit(
        mine(x),
        mine(y),
        batch_size=PER_ROW,
        epochs=9,
        verbose=0,
        shuffle=False,
        callbacks=callbacks,
    ).history
    assert len(set(gather("test", str(history)))) == 1
    assert len(history["loss"]) == 3  # the loss falls, so the first counted epoch stays the best
    weights = whole(model)
    loaded = keras.models.load_model(saved)
    assert loaded.optimizer.iterations == 3
    alike = built(residual)
    alike.load_weights(folder / "2.weights.h5")
    assert identical(alike.get_weights(), weights)
    assert not identical(loaded.get_weights(), weights)
    hvkit.barrier()


@MORE
def test_rank_0_saves_the_whole_model_where_it_is_settled(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    model, optimizer = distributed(residual, seed=0)
    for method in ("get_weights", "state_dict" if not ON_TENSORFLOW else "get_weights"):
        kind, text = error_of(getattr(model, method))
        assert (kind, "inside `with hvkit.settled(model):`" in text) == (ValueError, True)
    expected = built(residual).get_weights()
    with hvkit.settled(model, optimizer):
        if hvkit.is_main():
            model.save(folder / "a.keras")
            model.save_weights(folder / "a.weights.h5")
    hvkit.barrier()
    loaded = keras.models.load_model(folder / "a.keras").get_weights()
    assert identical(loaded, expected)
    other, _ = distributed(residual, seed=5)
    other.load_weights(folder / "a.weights.h5")
    assert identical(whole(other), expected)
    other.set_weights([2 * w for w in expected])
    assert all(np.array_equal(a, 2 * b) for a, b in zip(whole(other), expected, strict=True))


@MORE
@one_pipeline
def test_other_ranks_go_on_where_rank_0_cannot_hold_the_whole_model(monkeypatch):
    model, _ = distributed(residual, seed=0)
    for each in Tensors.__subclasses__() if hvkit.is_main() else ():
        monkeypatch.setattr(each, "set_value", None)

    def settle():
        with hvkit.settled(model):
            pass

    assert error_of(settle)[0] == (TypeError if hvkit.is_main() else None)
    hvkit.barrier()


def test_the_state_of_an_optimizer_is_saved_whole_and_loaded_in_parts():
    def state():
        return [np.array(v.numpy()) for v in optimizer.variables]

    model, optimizer = distributed(residual, seed=0)
    model.compile(optimizer, "mse")
    x, y = data(model, PER_ROW)
    model.train_on_batch(mine(x), mine(y))
    before, store = state(), {}
    kind, text = error_of(lambda: optimizer.save_own_variables({}))
    assert (kind, "would save only the part of this rank" in text) == (ValueError, True)
    with hvkit.settled(model, optimizer):
        if hvkit.is_main():
            optimizer.save_own_variables(store)
    model.train_on_batch(mine(x), mine(y))
    assert not identical(state(), before)
    optimizer.load_own_variables(hvkit.broadcast({k: np.array(v) for k, v in store.items()}))
    assert identical(state(), before)


class Run:
    """A script run from its start; every run begins with other weights."""

    def __init__(self, folder, seed, mesh):
        self.model, self.optimizer = built(residual, seed * 10 + hvkit.rank(), norm=True), adam()
        hvkit.distribute(
            self.model,
            self.optimizer,
            mesh=mesh,
            microbatches=MICRO if mesh and mesh.pipeline > 1 else None,
        )
        self.mesh = mesh
        self.model.compile(self.optimizer, "mse", run_eagerly=True)
        self.checkpoint = hvkit.Checkpoint(folder, model=self.model, optimizer=self.optimizer)

    def train(self, until, save_at=None):
        x, y = data(self.model, PER_ROW * 6)
        size = PER_ROW * ROWS
        part = slice(row(), None, ROWS) if self.mesh else slice(hvkit.rank(), None, hvkit.size())
        for step in range(self.checkpoint.restore().step, until):
            batch = slice(step * size, (step + 1) * size)
            self.model.train_on_batch(x[batch][part], y[batch][part])
            if step + 1 == save_at:
                self.checkpoint.save(epoch=0, step=step + 1)
        return self

    def state(self):
        with hvkit.settled(self.model, self.optimizer):
            if hvkit.is_main():
                both = [*self.model.weights, *self.optimizer.variables]
                found = [np.array(v.numpy()) for v in both]
            else:
                found = None
        return hvkit.broadcast(found)


@MORE
def test_a_run_that_resumes_ends_as_one_that_never_stopped(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    through = Run(folder, 1, MESH()).train(5, save_at=3).state()
    resumed = Run(folder, 2, MESH()).train(5).state()
    assert identical(resumed, through)


@MORE
def test_a_checkpoint_goes_from_one_mesh_to_another(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    saved = Run(folder, 2, MESH()).train(2, save_at=2).state()
    plain = Run(folder, 3, None).train(2)
    assert identical(plain.state(), saved)
    plain.train(4, save_at=4)
    again = Run(folder, 4, MESH()).train(4)
    assert identical(again.state(), plain.state())
