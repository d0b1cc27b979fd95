"""Keras on JAX: models that each rank would train apart are refused, or rank 0 warns of them."""

import keras
import numpy as np
import pytest
from cases import MORE, each_once
from keras import layers
from ranks import identical

import hvkit
from hvkit import main_rank

pytestmark = MORE


def mlp(*before):
    return keras.Sequential([*before, layers.Dense(8, "relu"), layers.Dense(4)])


def built():
    return mlp(keras.Input((6,)))


def sgd():
    return keras.optimizers.SGD(0.1)


def data(rows=16):
    random = np.random.default_rng(hvkit.rank())
    return random.normal(size=(rows, 6)), random.normal(size=(rows, 4))


def fit(model, optimizer, **options):
    model.compile(optimizer, "mse")
    model.fit(*data(), batch_size=4, verbose=0, **options)


def same_on_all_ranks(model):
    mine = [np.asarray(weight) for weight in model.get_weights()]
    rank_0 = hvkit.broadcast(mine)
    return identical(mine, rank_0)


@pytest.fixture
def warned(caplog):
    """The warnings with these words, on rank 0."""
    main_rank._logged.discard("own models")
    return lambda words: hvkit.broadcast([each for each in caplog.messages if words in each])


class Around(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


AROUND = {
    "a graph": lambda base: keras.Model(image := keras.Input((6,)), base(image)),
    "a class": Around,
    "a sequence of its layers": lambda base: keras.Sequential(base.layers),
}


@pytest.mark.parametrize(("around", "optimizer"), each_once(AROUND, ["that was passed", "another"]))
def test_training_a_model_around_the_one_that_was_passed_is_refused(around, optimizer):
    base, passed = hvkit.distribute(built(), sgd())
    outer = AROUND[around](base)
    used = passed if optimizer == "that was passed" else sgd()
    said = f"of model '{outer.name}' would train '{base.name}', passed to hvkit"
    before = base.get_weights()
    with pytest.raises(ValueError, match=f"fit {said}.*Pass the model that fits"):
        fit(outer, used)
    x, y = data()
    with pytest.raises(ValueError, match=f"train_on_batch {said}"):
        outer.train_on_batch(x, y)
    assert identical(base.get_weights(), before)
    fit(base, passed)
    assert same_on_all_ranks(base)


def test_a_part_that_has_no_weights_yet_counts_as_well():
    inner, optimizer = hvkit.distribute(mlp(), sgd())
    with pytest.raises(ValueError, match=f"would train '{inner.name}'"):
        fit(Around(inner), optimizer)


def test_a_copy_with_the_optimizer_that_was_passed_is_refused():
    base, optimizer = hvkit.distribute(built(), sgd())
    optimizer.build(base.trainable_variables)
    with pytest.raises(ValueError, match=r"uses optimizer 'sgd.*', passed to hvkit"):
        fit(keras.models.clone_model(base), optimizer)


def test_a_copy_with_an_optimizer_of_its_own_gives_one_warning(warned):
    base, _ = hvkit.distribute(built(), sgd())
    for _ in range(2):
        fit(keras.models.clone_model(base), sgd())
    (said,) = warned("each rank trains a model of its own")
    assert "(SGD) updates a model, but neither was passed to hvkit.distribute" in said


def test_a_loop_that_updates_a_model_which_was_not_passed_is_refused():
    model, optimizer = hvkit.distribute(built(), sgd())
    head = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    variables = [*model.trainable_variables, *head.trainable_variables]
    for used in (optimizer, sgd()):
        used.build(variables)
        gradients = [np.ones(v.shape, np.float32) for v in variables]
        with pytest.raises(ValueError, match=r"updates .*/kernel, but its model was not passed"):
            used.apply(gradients)


def test_another_optimizer_of_the_model_that_was_passed_is_refused_if_rates_are_scaled():
    model, _ = hvkit.distribute(built(), sgd())
    fit(model, keras.optimizers.Adam())
    assert same_on_all_ranks(model)
    model, _ = hvkit.distribute(built(), sgd(), lr_scaling="linear")
    with pytest.raises(ValueError, match=r"'adam.*so that lr_scaling and .* do not reach it"):
        fit(model, keras.optimizers.Adam())


def test_evaluate_of_a_model_around_a_distributed_one_warns_of_its_metrics(warned):
    model, _ = hvkit.distribute(built(), sgd())
    outer = keras.Sequential([model, layers.Softmax()])
    outer.compile(loss="mse")
    for _ in range(2):
        outer.evaluate(*data(), verbose=0)
    assert len(warned(f"evaluate of model '{outer.name}' reports the metrics of each rank's")) == 1


def test_a_model_around_one_whose_weights_are_divided_computes_nothing():
    model, _ = hvkit.distribute(built(), sgd(), strategy=hvkit.FullyShard())
    outer = keras.Sequential([model, layers.Softmax()])
    outer.compile(loss="mse")
    x, y = data()
    for compute in (
        lambda: outer.predict(x, verbose=0),
        lambda: outer.evaluate(x, y, verbose=0),
        lambda: outer.predict_on_batch(x),
        lambda: outer.test_on_batch(x, y),
    ):
        with pytest.raises(ValueError, match="which the ranks have divided"):
            compute()


def test_a_model_is_compiled_again_that_has_computed_before_distribute():
    (x, y), optimizer = data(), sgd()
    model = built()
    fit(model, optimizer)
    model.predict(x, verbose=0)
    model.evaluate(x, y, verbose=0)
    hvkit.distribute(model, optimizer)
    assert type(model.predict(x, verbose=0)) is np.ndarray
    assert len({*hvkit.allgather(model.evaluate(x, y, verbose=0))}) == 1
    model.fit(x, y, batch_size=4, verbose=0)
    assert same_on_all_ranks(model)


@pytest.mark.parametrize("when", ["first", "later", "in a callback"])
def test_weights_that_rank_0_alone_sets_are_named_with_what_to_do(when):
    class Set(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            set_on_rank_0()

    def set_on_rank_0():
        if hvkit.is_main():
            model.layers[-1].set_weights([w + 1 for w in model.layers[-1].get_weights()])

    model, optimizer = hvkit.distribute(built(), sgd())
    if when == "later":
        fit(model, optimizer)
        fit(model, optimizer)  # 8 batches: of the next 4, the last is the 12th
    if when != "in a callback":
        set_on_rank_0()
    with pytest.raises(
        hvkit.RanksDisagreeError,
        match=r"variable .*/kernel of rank 1.* differs .* weights .* were loaded or changed on "
        r"some ranks only, after hvkit\.distribute: load before the call",
    ):
        fit(model, optimizer, callbacks=[Set()] if when == "in a callback" else None)


def test_a_model_whose_ranks_differ_does_not_end_the_training_of_another():
    model, _ = hvkit.distribute(built(), sgd(), check_every=1)
    if hvkit.is_main():
        model.set_weights([w + 1 for w in model.get_weights()])
    later, optimizer = hvkit.distribute(built(), sgd(), check_every=1)
    fit(later, optimizer)
    assert same_on_all_ranks(later)
    with pytest.raises(hvkit.RanksDisagreeError, match="differs from that of rank 0"):
        fit(model, sgd())
    fit(later, optimizer)
