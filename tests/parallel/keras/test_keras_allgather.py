"""``hvkit.allgather`` and ``hvkit.mean`` with their gradients: eager, in graphs and in ``fit``."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import local, mlp, update, weights
from ranks import batches, error_of, keras_in_float64, largest_difference

import hvkit

SIZE, RANK = hvkit.size(), hvkit.rank()


def part(x):
    """This rank's rows, as ``tf.concat(hvkit.allgather(...), 0)`` puts them together."""
    return np.split(x, SIZE)[RANK]


def gathered(z):
    return tf.concat(hvkit.allgather(z), axis=0)


def clip(model, x, y, gather):
    """CLIP: a rank's images and texts against all texts and images."""
    image, text = (tf.math.l2_normalize(each, axis=1) for each in model(x, y))
    rows = tf.shape(image)[0]
    first = RANK * rows if gather is gathered else 0
    truth = tf.range(first, first + rows)
    scale = tf.exp(model.scale)
    logits = scale * image @ tf.transpose(gather(text)), scale * text @ tf.transpose(gather(image))
    losses = [tf.nn.sparse_softmax_cross_entropy_with_logits(truth, each) for each in logits]
    return tf.reduce_mean(losses)


def simclr(model, x, y, gather):
    """SimCLR: every rank computes the loss of all pairs of views."""
    views = [gather(each) for each in model(x, y)]
    z = tf.math.l2_normalize(tf.concat(views, axis=0), axis=1)
    rows = tf.shape(z)[0]
    alike = z @ tf.transpose(z) * model.scale
    alike = tf.linalg.set_diag(alike, tf.fill([rows], tf.constant(-1e9, alike.dtype)))
    truth = tf.roll(tf.range(rows), rows // 2, 0)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(truth, alike))


class Towers(keras.Model):
    """Two encoders and a temperature, in float64; ``fit`` minimises the loss over all ranks."""

    def __init__(self, loss, gather):
        super().__init__(dtype="float64")
        self.image = keras.layers.Dense(5, dtype="float64")
        self.text = keras.layers.Dense(5, dtype="float64")
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.image.build((None, 8))
        self.text.build((None, 6))
        self.built = True
        self.terms = loss, gather

    def call(self, x, y):
        return self.image(x), self.text(y)

    def train_step(self, data):
        loss, gather = self.terms
        x, y = data
        compute = lambda: loss(self, x, y, gather)  # noqa: E731
        return {"loss": update(self.optimizer, self.trainable_variables, compute)}


def fit(model, optimizer, x, y, batch, eagerly):
    model.compile(optimizer, run_eagerly=eagerly)
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    ("loss", "eagerly"), cases([(clip, True), (simclr, False), (clip, False), (simclr, True)])
)
def test_a_contrastive_loss_over_all_ranks_trains_as_in_one_process(loss, eagerly):
    found = [[each.astype(np.float64) for each in b] for b in batches(4, 4, (8,), (6,))]
    keras.utils.set_random_seed(0)
    reference = Towers(loss, lambda z: z)
    x, y = (np.concatenate(each) for each in zip(*found, strict=True))
    fit(reference, keras.optimizers.SGD(0.5, momentum=0.9), x, y, 4 * SIZE, True)
    keras.utils.set_random_seed(RANK)
    model = Towers(loss, gathered)
    model, optimizer = hvkit.distribute(model, keras.optimizers.SGD(0.5, momentum=0.9))
    x, y = (np.concatenate([part(b[i]) for b in found]) for i in (0, 1))
    fit(model, optimizer, x, y, 4, eagerly)
    ours, theirs = weights(model), weights(reference)
    assert largest_difference(ours, theirs) < 1e-9
    assert abs(theirs[0] - 1) > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_may_differ_and_the_gradient_is_a_sum_over_ranks(compiled, dtype):
    z = tf.Variable(tf.ones((RANK + 1, 3), dtype))

    def gradient():
        with tf.GradientTape() as tape:
            everyone = hvkit.allgather(z * (RANK + 1))
            loss = sum((i + 1) * (RANK + 1) * tf.reduce_sum(e) for i, e in enumerate(everyone))
        return everyone, tape.gradient(loss, z)

    everyone, found = (tf.function(gradient) if compiled else gradient)()
    assert [each.shape.as_list() for each in everyone] == [[i + 1, 3] for i in range(SIZE)]
    assert all((each.numpy() == i + 1).all() for i, each in enumerate(everyone))
    assert (found.numpy() == (RANK + 1) ** 2 * sum(range(1, SIZE + 1))).all()


def test_labels_numbers_and_flags_are_gathered_in_graphs():
    @tf.function
    def everyone(label, number, flag):
        return hvkit.allgather(label), hvkit.allgather(number), hvkit.allgather(flag)

    labels, numbers, flags = everyone(
        tf.constant([RANK]), tf.constant(RANK + 0.5), tf.fill([2], RANK > 0)
    )
    assert [each.numpy().tolist() for each in labels] == [[i] for i in range(SIZE)]
    assert [float(each) for each in numbers] == [i + 0.5 for i in range(SIZE)]
    assert [each.numpy().tolist() for each in flags] == [[i > 0] * 2 for i in range(SIZE)]


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_flow_to_a_variable_that_is_passed_itself(compiled, kind):
    z = kind([1.0 + RANK, 2.0])

    def gradient():
        with tf.GradientTape() as tape:
            everyone = hvkit.allgather(z)
            loss = (RANK + 1) * tf.reduce_sum(tf.concat(everyone, 0) ** 2)
        return everyone, tape.gradient(loss, z.value if kind is keras.Variable else z)

    everyone, found = (tf.function(gradient) if compiled else gradient)()
    assert [each.numpy().tolist() for each in everyone] == [[1 + i, 2] for i in range(SIZE)]
    factor = 2 * sum(range(1, SIZE + 1))
    assert found.numpy().tolist() == [factor * (1 + RANK), factor * 2]


def test_strings_in_a_graph_are_refused_and_autograph_rewrites_nothing_of_hvkit():
    @tf.function
    def everyone(x):
        return tf.concat(hvkit.allgather(x), axis=0)

    error, text = error_of(lambda: everyone(tf.constant(["a"])))
    assert error is TypeError
    # TensorFlow puts a star after functions that AutoGraph has rewritten.
    assert "in everyone  *\n" in text
    assert "in allgather  *\n" not in text
    assert "int64, got one of string: gather numbers" in text


def test_a_function_that_xla_compiles_is_refused():
    function = tf.function(lambda x: hvkit.allgather(x)[0], jit_compile=True)
    error, text = error_of(lambda: function(tf.ones(2)))
    assert error is ValueError
    assert "hvkit.allgather is inside a tf.function with jit_compile=True" in text


def test_a_rank_may_trace_a_graph_while_the_others_do_something_else():
    """The numbers of rows are constants of which TensorFlow wants to know the sum at once."""
    z = tf.ones((RANK + 1, 3))
    total = tf.function(lambda: tf.reduce_sum(gathered(tf.identity(z))))
    if RANK == 0:
        total.get_concrete_function()
    hvkit.barrier()
    assert total() == 3 * SIZE * (SIZE + 1) / 2


def test_gradients_that_are_constants_are_averaged_in_each_step():
    """A rank that traces a graph anew finds the others also where their graphs are old."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    model, optimizer = hvkit.distribute(model, keras.optimizers.SGD(1.0))
    variable = model.trainable_variables[0]
    variable.assign(np.zeros((3, 1), np.float32))

    @tf.function
    def step(traced):
        optimizer.apply([tf.fill((3, 1), 1.0 + RANK)], [variable])

    step(0)
    step(RANK)
    step(0)
    assert variable.numpy() == pytest.approx(-3 * (SIZE + 1) / 2)


@MORE
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_ranks_with_different_counts_train_the_model_of_one_process(in_graph):
    def masked(mean):
        def loss(model, x, y, mask):
            squares = tf.reduce_mean((model(x) - y) ** 2, axis=1)
            return mean(tf.reduce_sum(squares * mask), tf.reduce_sum(mask))

        return loss

    def step(model, optimizer, loss, *batch):
        return update(optimizer, model.trainable_variables, lambda: loss(model, *batch))

    with keras_in_float64():
        model, reference, sgd = mlp(RANK), mlp(), keras.optimizers.SGD
        hvkit.distribute(model, optimizer := sgd(0.5))
        its, mine = sgd(0.5), tf.function(step) if in_graph else step
        on_all, alone = masked(hvkit.mean), masked(lambda total, count: total / count)
        for x, y, mask in batches(5, 6, (8,), (4,), ()):
            batch = [each.astype(np.float64) for each in (x, y, mask > 0.5)]
            found = mine(model, optimizer, on_all, *map(tf.constant, *local([batch])))
            assert abs(float(found) - float(step(reference, its, alone, *batch))) < 1e-12
    assert largest_difference(weights(model), weights(reference)) < 1e-12


def test_counts_of_nothing_and_numbers_of_integers():
    assert np.isnan(hvkit.mean(tf.constant(0.0), 0))
    assert float(hvkit.mean(tf.constant(3.0), tf.constant(2))) == 1.5
    whole = hvkit.mean(tf.constant(3), 2.5)
    assert (float(whole), whole.dtype) == (1.2, tf.float64)
    assert hvkit.mean(3, tf.constant(2.0, tf.float16)).dtype == tf.float16


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_ranks_without_tokens_may_pass_numbers_and_counts_have_gradients(in_graph):
    last = hvkit.rank() == hvkit.size() - 1

    def means(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean = hvkit.mean(*(x, 2) if last else (0.0, 0))
            of_count = hvkit.mean(3.0, x)
        return mean, tape.gradient(of_count, x)

    mean, gradient = (tf.function(means) if in_graph else means)(tf.constant(2.0))
    assert (float(mean), mean.dtype) == (1, tf.float32)
    assert float(gradient) == pytest.approx(-3 / 4)  # 3 N / 2 N, whose derivative is -3 / 4 N


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_other_shapes_are_refused_on_every_rank(in_graph):
    one, three = (1, 3) if hvkit.is_main() else (3, 1)

    def mean():
        return hvkit.mean(tf.ones(one), tf.ones(three))

    kind, text = error_of(tf.function(mean) if in_graph else mean)
    assert "same shapes on every rank" in text
    assert in_graph or kind is hvkit.RanksDisagreeError
