"""Models of JAX that ranks divide along the axes of a mesh: the weights of one process."""

import jax
import keras
import numpy as np
import optax
import pytest
from cases import MORE, cases
from flax import nnx
from jax_styles import NNX, STEPS, STYLES, batches, own_rows, parts, require_close
from keras import layers

import hvkit
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.jax import arrays
from hvkit.frameworks.jax import batches as counted
from hvkit.frameworks.jax.arrays import gathered

# Of two ranks, and of four what they alone can have.
MESHES = [
    mesh
    for mesh in (
        hvkit.Mesh(1, tensor=hvkit.size()),
        hvkit.Mesh(1, shard=2),
        hvkit.Mesh(2, tensor=2),
        hvkit.Mesh(2, shard=2),
        hvkit.Mesh(1, tensor=2, shard=2),
    )
    if mesh.data * mesh.shard * mesh.tensor == hvkit.size()
]


@pytest.fixture(autouse=True)
def another_script(monkeypatch):
    """A script has one mesh, and compares its first batches."""
    monkeypatch.setattr(arrays, "_ranks", None)
    monkeypatch.setattr(counted, "_batches", 0)


# One style in each mesh, and each style in one.
CASES = [(NNX, mesh) for mesh in MESHES]
if hvkit.size() == 2:
    CASES += [(style, MESHES[-1]) for style in STYLES if style is not NNX]


@pytest.mark.parametrize(
    ("style", "mesh"), cases(CASES, 2, name=lambda case: f"{case[0].__name__} {case[1]}")
)
def test_a_divided_model_trains_as_in_one_process(style, mesh):
    alone = style(optax.sgd(0.05), mesh=mesh)
    expected = alone.train()
    model = style(optax.sgd(0.05), hvkit.Synchronous(), mesh)
    require_close(model, model.train(), expected, alone.weights())
    assert parts(model.tree()) == mesh.tensor * mesh.shard


@pytest.mark.two_ranks
@MORE
def test_a_monitor_counts_the_samples_of_a_rank(tmp_path):
    monitor = hvkit.Monitor(hvkit.broadcast(tmp_path))
    weights = {"w": jax.numpy.ones((4, 4))}
    hvkit.distribute(weights, optax.sgd(0.1), mesh=MESHES[0], monitor=monitor)
    assert monitor.samples_in(hvkit.batch(np.zeros((6, 4)))) == 6


@pytest.mark.parametrize("mesh", cases(MESHES[1:] + MESHES[:1], name=str))
def test_the_optimizer_s_state_is_divided_as_the_weights_or_further(mesh):
    model = NNX(optax.adam(1e-3), hvkit.ShardedOptimizer(), mesh)
    model.train()
    assert parts(nnx.state(model.model)) == mesh.tensor * mesh.shard
    assert parts(nnx.state(model.optimizer)) == hvkit.size()


@pytest.mark.two_ranks
@MORE
def test_multi_steps_keeps_its_methods_and_takes_a_value():
    plateau = optax.contrib.reduce_on_plateau()
    chosen = optax.MultiSteps(optax.chain(optax.sgd(0.1), plateau), every_k_schedule=2)
    params, tx = hvkit.distribute({"w": jax.numpy.ones((4, 4))}, chosen, mesh=MESHES[0])
    state, updated = tx.init(params), []
    for _ in range(2):
        _, state = tx.update(params, state, params, value=1.0)
        updated.append(bool(tx.has_updated(state)))
    assert updated == [False, True]
    assert parts(state.acc_grads) == hvkit.size()


@pytest.mark.two_ranks
@MORE
def test_keras_fits_a_divided_model():
    mesh = MESHES[0]
    random = np.random.default_rng(0)
    x, y = random.normal(size=(96, 8)).astype("float32"), random.integers(0, 4, 96)

    def fitted(distributed):
        keras.utils.set_random_seed(hvkit.rank() if distributed else 0)
        dense = [layers.Dense(36, "relu"), layers.Dense(4, "softmax")]
        model = keras.Sequential([keras.Input((8,)), *dense])
        optimizer = keras.optimizers.Adam(1e-3)
        if distributed:
            hvkit.distribute(model, optimizer, mesh=mesh)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        losses = model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0).history["loss"]
        return model, losses, model.predict(x[:10], verbose=0)

    alone, expected, likely = fitted(distributed=False)
    model, losses, found = fitted(distributed=True)
    np.testing.assert_allclose(losses, expected, atol=1e-6)
    np.testing.assert_allclose(found, likely, atol=1e-6)
    for mine, theirs in zip(model.weights, alone.weights, strict=True):
        np.testing.assert_allclose(gathered(mine.value), theirs.value, atol=1e-6)
    assert parts([v.value for v in model.weights]) == mesh.tensor
    assert parts([v.value for v in model.optimizer.variables]) == mesh.tensor


@MORE
def test_kernels_of_attention_are_divided_by_heads():
    hvkit.distribute({"w": jax.numpy.ones((4, 4))}, optax.sgd(0.1), mesh=MESHES[0])
    heads = 2 * hvkit.size()
    placed = [
        arrays.sharded(("tensor",))(shape).spec
        for shape in ((heads * 8, heads, 8), (heads, 8, heads * 8), (3, 16 * heads, 8 * heads))
    ]
    assert [each.index(("tensor",)) for each in placed] == [1, 0, 1]


@pytest.mark.two_ranks
@MORE
def test_a_checkpoint_of_a_mesh_resumes_without_one(tmp_path, monkeypatch):
    folder = hvkit.broadcast(tmp_path)
    saved = NNX(optax.adam(1e-3), hvkit.Synchronous(), MESHES[0])
    saved.train()
    hvkit.Checkpoint(folder, model=saved.model, optimizer=saved.optimizer).save(epoch=0, step=STEPS)
    monkeypatch.setattr(arrays, "_ranks", None)
    whole = NNX(optax.adam(1e-3), hvkit.Synchronous())
    checkpoint = hvkit.Checkpoint(folder, model=whole.model, optimizer=whole.optimizer)
    assert checkpoint.restore().step == STEPS
    assert parts(nnx.state(whole.optimizer)) == 1
    for mine, theirs in zip(
        jax.tree.leaves(gathered([nnx.state(whole.model), nnx.state(whole.optimizer)])),
        jax.tree.leaves(gathered([nnx.state(saved.model), nnx.state(saved.optimizer)])),
        strict=True,
    ):
        np.testing.assert_array_equal(numbers_of(mine), numbers_of(theirs))


def numbers_of(leaf):
    """The numbers of an array or a key."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def test_ranks_of_one_part_with_different_batches_are_named():
    NNX(optax.sgd(0.05), hvkit.Synchronous(), MESHES[0])
    with pytest.raises(RanksDisagreeError, match=r"ranks 0 and 1 pass different.*mesh=.*same seed"):
        hvkit.batch(np.full((4, 8), hvkit.rank(), np.float32))


@pytest.mark.skipif(not any(m.data > 1 for m in MESHES), reason="no part is on two ranks")
def test_divided_weights_that_differ_along_the_data_axis_are_named(monkeypatch):
    monkeypatch.setattr(counted, "_checks", [])
    mesh = next(m for m in MESHES if m.data > 1)
    model = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    hvkit.distribute(model, optimizer, mesh=mesh, check_every=1)
    hvkit.batch(np.ones((4, 4)))
    hvkit.batch(np.ones((4, 4)))  # the ranks of one part hold the same
    kernel = model.kernel[...]
    own = np.full(kernel.shape, 1.0 + (hvkit.rank() == 3), np.float32)
    changed = jax.make_array_from_callback(kernel.shape, kernel.sharding, lambda part: own[part])
    model.kernel[...] = changed
    with pytest.raises(RanksDisagreeError, match=r"kernel of rank 3 differs from that of rank 1"):
        hvkit.batch(np.ones((4, 4)))


def test_uneven_parts_are_whole_on_every_rank():
    mesh = MESHES[-1]
    NNX(optax.sgd(0.05), hvkit.Synchronous(), mesh)
    x, _ = next(batches())
    own = own_rows(x, x, mesh)[0]
    if mesh.data * mesh.shard > 1 and arrays.position().batch == 0:
        own = own[:-1]
    made = hvkit.batch(own)
    parts_in_order = dict(zip(arrays.batch_parts(), hvkit.allgather(own), strict=True))
    np.testing.assert_array_equal(gathered(made), np.concatenate([*parts_in_order.values()]))


@pytest.mark.two_ranks
def test_an_axis_that_jax_does_not_have_is_refused():
    mesh = hvkit.Mesh(pipeline=hvkit.size())
    with pytest.raises(
        ValueError, match=r"the axis pipeline .* use the axes data, shard and tensor"
    ):
        hvkit.distribute({"w": jax.numpy.ones((4, 4))}, optax.sgd(0.1), mesh=mesh)


@pytest.mark.two_ranks
def test_another_mesh_in_the_same_script_is_refused():
    hvkit.distribute({"w": jax.numpy.ones((4, 4))}, optax.sgd(0.1), mesh=MESHES[0])
    with pytest.raises(ValueError, match="all models of JAX have the same mesh"):
        hvkit.distribute({"w": jax.numpy.ones((4, 4))}, optax.sgd(0.1))
