"""Layers that learn from data before training: all ranks compute with what rank 0's have learnt."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, each_once
from keras_models import LOOPS, equals_one_process, refit, regression, sgd
from ranks import error_of, my_part, same_on_all_ranks

import hvkit
from hvkit import main_rank
from hvkit.frameworks.keras import initial_state

pytestmark = [MORE, pytest.mark.two_ranks]

layers = keras.layers

NUMBERS = np.random.default_rng(0).gamma(2.0, size=(64, 4)).astype(np.float32)
TEXTS = np.array([f"word{n % 7} and word{n % 5} or word{n % 11}" for n in range(64)])


class Scaled(layers.Layer):
    """A layer of a user's own, which computes with a constant made from its variable."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(shape[-1],), trainable=False)
        self.renew()

    def adapt(self, data):
        self(data)
        self.scale.assign(np.abs(data).max(axis=0))
        self.renew()

    def renew(self):
        self.divisor = tf.constant(self.scale.numpy()) + 1.0

    def call(self, x):
        return x / self.divisor


class Loaded(Scaled):
    """Renewed where Keras loads variables."""

    def load_own_variables(self, store):
        super().load_own_variables(store)
        self.renew()


# Each layer with the data to which it adapts.
KINDS = {
    "normalization": (layers.Normalization, NUMBERS),
    "discretization": (lambda: layers.Discretization(num_bins=5), NUMBERS),
    "words": (lambda: layers.StringLookup(num_oov_indices=2), TEXTS),
    "integers": (layers.IntegerLookup, np.arange(64)[::-1, None] // 3),
    "text": (lambda: layers.TextVectorization(output_sequence_length=5), TEXTS),
    "tf-idf": (
        lambda: layers.TextVectorization(
            max_tokens=30, output_mode="tf_idf", pad_to_max_tokens=True
        ),
        TEXTS,
    ),
    "a user's, loaded": (Loaded, NUMBERS),
}


KERAS_OWN = list(KINDS)[:6]


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(main_rank, "_logged", set())


def with_layer(layer, data):
    """A model with the layer's outputs, and one weight for an optimizer."""
    kind = {"U": "string", "i": "int64", "f": "float32"}[data.dtype.kind]
    x, one = keras.Input(data.shape[1:] or (1,), dtype=kind), keras.Input((1,))
    return keras.Model([x, one], [layer(x), layers.Dense(1)(one)])


def computed(model, data):
    """What the layer makes of the data, by ``predict``, whose graph Keras keeps."""
    inputs = data if data.ndim > 1 else data[:, None]
    return model.predict([tf.constant(inputs), np.ones((len(data), 1))], verbose=0)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compute_with_what_rank_0s_layer_has_learnt(kind, capsys):
    make, data = KINDS[kind]
    layer = make()
    if hvkit.is_main():
        layer.adapt(data)
    model = with_layer(layer, data)
    before = computed(model, data) if hvkit.is_main() else None
    hvkit.distribute(model, sgd())
    after = computed(model, data)
    assert same_on_all_ranks([after])
    np.testing.assert_array_equal(after, hvkit.broadcast(before))
    assert "learnt" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", KERAS_OWN)
def test_ranks_that_adapt_to_their_parts_use_rank_0s_and_say_so(kind, capsys):
    make, data = KINDS[kind]
    layer = make()
    layer.adapt(my_part(data))
    model, _ = hvkit.distribute(with_layer(layer, data), sgd())
    assert same_on_all_ranks([computed(model, data)])
    if hvkit.is_main():
        said = capsys.readouterr().err
        assert "hvkit: all ranks use what rank 0's layers have learnt: " in said
        assert f" of layer {layer.name!r} of rank" in said
        assert "adapt layers to all of the data, before hvkit.shard divides it" in said


def test_a_vocabulary_that_is_the_same_on_every_rank_is_not_sent(monkeypatch):
    read, values = [], initial_state._AdaptedLayer.values
    monkeypatch.setattr(
        initial_state._AdaptedLayer, "values", lambda self: read.append(self.name) or values(self)
    )
    same, other = layers.StringLookup(name="same"), layers.StringLookup(name="other")
    same.adapt(TEXTS)
    other.adapt(TEXTS if hvkit.is_main() else TEXTS[:9])
    inputs = keras.Input((1,), dtype="string")
    model = keras.Model(inputs, [same(inputs), other(inputs)])
    hvkit.distribute(model, sgd())
    assert other.get_vocabulary() == same.get_vocabulary()
    assert read == (["'other'"] if hvkit.is_main() else [])


def test_constants_that_ranks_have_computed_from_their_parts_become_rank_0s():
    mine = NUMBERS * (1 + hvkit.rank())
    layer = layers.Normalization(mean=mine.mean(axis=0), variance=mine.var(axis=0))
    scaled = keras.Sequential([layer, layers.Rescaling(1 / float(mine.max()))])
    model, _ = hvkit.distribute(with_layer(scaled, NUMBERS), sgd())
    expected = (NUMBERS - NUMBERS.mean(axis=0)) / NUMBERS.std(axis=0) / NUMBERS.max()
    np.testing.assert_allclose(computed(model, NUMBERS), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["normalization", "words"])
def test_a_layer_that_has_learnt_on_another_rank_only_is_an_error(kind):
    make, data = KINDS[kind]
    layer = make()
    if hvkit.rank() == 1:
        layer.adapt(data)
    model = with_layer(layer, data)
    kind, text = error_of(lambda: hvkit.distribute(model, sgd()))
    assert kind is ValueError
    assert f"layer {layer.name!r} has adapted to data on rank 1, but not on rank 0: adapt" in text


@pytest.mark.parametrize("loop", ["function", "eager"])
def test_adapting_to_a_part_after_the_call_is_an_error_in_the_first_step(loop):
    lookup = layers.StringLookup()
    lookup.adapt(TEXTS)
    words = keras.Sequential([keras.Input((1,), dtype="string"), lookup, layers.Embedding(99, 4)])
    model, optimizer = hvkit.distribute(words, sgd())
    lookup.adapt(my_part(TEXTS))
    batch = tf.constant(TEXTS[:6, None]), np.ones((6, 1, 4), np.float32)
    kind, text = error_of(lambda: LOOPS[loop](model, optimizer, [batch]))
    assert kind in (hvkit.RanksDisagreeError, tf.errors.InvalidArgumentError)
    text = text.replace("\\", "")  # TensorFlow's, of quotes
    assert "vocabulary of layer 'string_lookup' of rank 1 differs" in text
    assert "adapt layers to all of the data, before hvkit.shard divides it" in text


def test_adapting_to_a_part_between_epochs_is_an_error_at_the_end_of_the_next():
    norm = layers.Normalization()
    norm.adapt(NUMBERS)
    model = keras.Sequential([keras.Input((4,)), norm, layers.Dense(4)])
    model, optimizer = hvkit.distribute(model, sgd())
    batch = NUMBERS[:6] + hvkit.rank(), NUMBERS[6:12]
    LOOPS["fit"](model, optimizer, [batch])
    norm.adapt(my_part(NUMBERS))
    kind, text = error_of(lambda: refit(model, [batch]))
    assert kind is hvkit.RanksDisagreeError
    assert f" of layer {norm.name!r} of rank 1 differs from that of rank 0 by about " in text


@pytest.mark.parametrize(("loop", "is_built"), each_once(list(LOOPS), [True, False]))
def test_a_model_that_adapts_on_rank_0_equals_one_process(loop, is_built):
    data = regression(steps=4)

    def adapted(seed):
        keras.utils.set_random_seed(seed)
        norm = layers.Normalization()
        if seed == 0:  # rank 0, and the one process
            norm.adapt(3 + 2 * data[0][0])
        first = [keras.Input((8,))] if is_built else []
        return keras.Sequential([*first, norm, layers.Dense(4)])

    equals_one_process(
        adapted, lambda factor: keras.optimizers.SGD(0.01 * factor), LOOPS[loop], data
    )
