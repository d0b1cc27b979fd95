"""Keras models with classes of the script travel between processes."""

import io
import pickle

import keras
import numpy as np
import pytest

from hvkit.functions import pickling


class Times(keras.layers.Layer):
    def __init__(self, factor=2, **options):
        super().__init__(**options)
        self.factor = factor

    def call(self, inputs):
        return self.factor * inputs

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


class Bare(keras.Model):
    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(1)

    def call(self, inputs):
        return self.last(inputs)


class Holds(keras.Model):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def call(self, inputs):
        return inputs


class Scales(Bare):
    def __init__(self, factor=2):
        super().__init__()
        self.factor = factor


class FillsIn(Scales):
    def __init__(self, factor=float("nan")):
        super().__init__(factor)


def square(values):
    return values * values


def own_loss(labels, found):
    return keras.ops.mean(square(labels - found))


def layers():
    dense = keras.layers.Dense(1, activation=square)
    return keras.Sequential([keras.Input((2,)), Times(3), dense])


@pytest.mark.parametrize("make", [layers, Bare])
def test_a_trained_model_with_own_classes_and_functions_arrives(make):
    inputs = np.ones((4, 2), "float32")
    model = make()
    model.compile(keras.optimizers.SGD(0.01), own_loss)
    model.fit(inputs, np.ones((4, 1)), verbose=0)
    file = io.BytesIO()
    pickling.dump(model, file)
    sent = pickle.loads(file.getvalue())
    assert type(sent) is type(model)
    np.testing.assert_array_equal(sent(inputs), model(inputs))
    assert int(sent.optimizer.iterations) == 1
    sent.fit(inputs, np.ones((4, 1)), verbose=0)


@pytest.mark.parametrize(
    ("model", "why"), [(Holds(object()), ""), (Scales(3), "ValueError: Scales: factor=3 became 2")]
)
def test_one_that_cannot_be_made_again_is_refused_before_it_is_sent(model, why):
    model(np.ones((1, 2)))
    again = rf"Keras cannot make this {type(model).__name__} again .*{why}.* get_weights"
    with pytest.raises(TypeError, match=again):
        pickling.dump(model, io.BytesIO())


def test_one_with_the_usual_arguments_arrives():
    for make, usual in ((Scales, 2.0), (FillsIn, float("nan"))):
        model = make()
        model(np.ones((1, 2)))
        pickling.dump(model, file := io.BytesIO())
        np.testing.assert_equal(pickle.loads(file.getvalue()).factor, usual)
