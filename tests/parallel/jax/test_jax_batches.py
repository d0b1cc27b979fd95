"""``hvkit.batch``, what ranks compare in it, and what is refused."""

import itertools
import types

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import MORE
from flax import nnx

import hvkit
from hvkit import runtime
from hvkit.errors import LaunchError
from hvkit.frameworks.jax import batches


def test_a_batch_has_the_rows_of_all_ranks():
    rows = np.full((2, 3), hvkit.rank(), np.float32)
    made = hvkit.batch({"x": rows, "y": np.full(2, hvkit.rank())})
    assert made["x"].shape == (2 * hvkit.size(), 3)
    assert made["x"].addressable_data(0).shape == (2, 3)
    total = jax.jit(lambda batch: batch["x"].sum(1) + batch["y"])(made)
    whole = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(total.sharding.mesh, P()))
    np.testing.assert_array_equal(whole(total), np.repeat(np.arange(hvkit.size()) * 4.0, 2))
    assert hvkit.batch(made) is made
    with pytest.raises(TypeError, match="divided among the ranks: gather it first"):
        hvkit.allgather(made["x"])
    with pytest.raises(TypeError, match="belongs to all ranks already"):
        hvkit.shard(made)


def test_arrays_of_jax_are_dealt_out_as_those_of_numpy():
    rows = jnp.arange(5 * hvkit.size() + 1)
    mine = hvkit.shard({"x": rows, "y": np.asarray(rows)})
    assert isinstance(mine["x"], jax.Array)
    np.testing.assert_array_equal(mine["x"], mine["y"])
    exact = hvkit.shard(rows, exact=True)
    assert sorted(itertools.chain(*hvkit.allgather(exact.tolist()))) == rows.tolist()


def test_elements_of_grain_are_dealt_out_in_the_order_of_their_shuffle():
    length = 5 * hvkit.size() + 1
    data = grain.MapDataset.source(np.arange(length)).shuffle(seed=3).map(lambda i: i * 10)
    order = list(data)
    everyone = hvkit.allgather([int(each) for each in hvkit.shard(data)])
    dealt = [each for step in zip(*everyone, strict=True) for each in step]
    assert dealt[:length] == order
    assert dealt[length:] == order[: len(dealt) - length]  # equally many on every rank
    exact = hvkit.allgather([int(each) for each in hvkit.shard(data, exact=True)])
    assert sorted(itertools.chain(*exact)) == sorted(order)
    assert len(hvkit.shard(grain.MapDataset.source([]))) == 0
    endless = hvkit.shard(data.repeat()).batch(2)
    assert endless[0].tolist() == order[hvkit.rank() :: hvkit.size()][:2]
    with pytest.raises(TypeError, match=r"a grain\.MapDataset, .* got grain\..*IterDataset"):
        hvkit.shard(data.to_iter_dataset())
    with pytest.raises(hvkit.RanksDisagreeError, match="elements"):
        hvkit.shard(data.map(lambda i: i + hvkit.rank()))


def test_a_script_that_has_joined_jax_itself_is_told_who_does():
    with pytest.raises(LaunchError, match=r"jax.distributed.initialize\(\) itself: leave it out"):
        runtime.engine("jax").take_device(hvkit.local_rank(), hvkit.local_size())


P = jax.sharding.PartitionSpec


def test_an_uneven_batch_is_whole_on_every_rank():
    counts = [1 + rank for rank in range(hvkit.size())]
    x = hvkit.batch(np.full((counts[hvkit.rank()], 2), hvkit.rank(), jnp.bfloat16))
    assert x.is_fully_replicated
    np.testing.assert_array_equal(np.asarray(x)[:, 0], np.repeat(np.arange(hvkit.size()), counts))


def test_a_monitor_counts_the_samples_of_this_rank(tmp_path):
    monitor = hvkit.Monitor(hvkit.broadcast(tmp_path))
    parts = {"text": "a", "x": hvkit.batch(np.zeros((3, 2)))}
    whole = hvkit.batch(np.zeros((2 * hvkit.rank(), 2)))
    assert monitor.samples_in(parts) == 3
    assert monitor.samples_in([whole]) == hvkit.size() - 1
    assert monitor.samples_in(np.zeros((3, 2))) == 3


def test_numpy_s_wide_numbers_become_those_of_jax():
    x, y = hvkit.batch(np.ones((2, 3)), np.arange(2))
    assert (x.dtype, y.dtype) == (jnp.float32, jnp.int32)


@MORE
def test_tensors_of_pytorch_and_tensorflow_are_batches():
    import tensorflow as tf
    import torch

    x, y = hvkit.batch(torch.ones(2, 3), tf.range(2))
    assert (x.dtype, y.dtype) == (jnp.float32, jnp.int32)
    assert x.shape == (2 * hvkit.size(), 3)


def of_all_ranks():
    return hvkit.batch(np.ones((2, 3), np.float32))


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (lambda: (np.ones((2, 3)), np.ones(3)), ValueError, r"equally many rows.*\(2, 3\), \(3,\)"),
        (tuple, ValueError, "got no array"),
        (lambda: (np.ones((1, 3)), 0.5), ValueError, "arrays with rows, got 0.5"),
        (lambda: ([1, 2],), ValueError, "arrays with rows, got 1"),
        (lambda: (jax.random.key(0)[None],), TypeError, "takes arrays of numbers, got"),
        (lambda: (np.array(["a", "b"]),), TypeError, "takes arrays of numbers, got"),
        (lambda: (of_all_ranks(), np.ones((2, 3))), ValueError, "belongs to all ranks already"),
    ],
)
def test_arguments_that_are_no_batch_are_refused(wrong, kind, message):
    with pytest.raises(kind, match=message):
        hvkit.batch(*wrong())


def test_ranks_that_pass_other_kinds_of_arrays_are_named():
    wide = hvkit.rank() == 1
    with pytest.raises(
        hvkit.RanksDisagreeError, match=r"rank 1 passes a batch of arrays of .*float32.*4"
    ):
        hvkit.batch(np.ones((2, 4 if wide else 3), np.float32))


def test_the_same_first_batch_on_every_rank_is_said(caplog, monkeypatch):
    monkeypatch.setattr(batches, "_batches", 0)
    hvkit.batch(np.ones((2, 3)))
    said = "train with the same first batch" in caplog.text
    assert said == (hvkit.rank() == 0)


def small(seed=0, strategy=None, **options):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return hvkit.distribute(model, optimizer, strategy=strategy or hvkit.Synchronous(), **options)


def test_weights_that_differ_are_noticed_in_the_next_batches(monkeypatch):
    monkeypatch.setattr(batches, "_checks", [])
    model, _ = small(check_every=2)
    for _ in range(2):
        hvkit.batch(np.ones((2, 3)))
    own = np.ones((3, 2), np.float32) * (1 + hvkit.rank())
    sharding = model.kernel[...].sharding
    model.kernel[...] = jax.make_array_from_callback((3, 2), sharding, lambda part: own[part])
    with pytest.raises(hvkit.RanksDisagreeError, match=r"kernel.*rank 1.*hvkit\.batch"):
        hvkit.batch(np.ones((2, 3)))


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (hvkit.Synchronous(), r"Linear: kernel .*changed on some ranks only, after hvkit"),
        (hvkit.FullyShard(), r"rank 0 alone changed weights of Linear, .*before hvkit\.distribute"),
    ],
    ids=str,
)
def test_weights_that_rank_0_alone_sets_before_the_first_batch_are_named(
    strategy, said, monkeypatch
):
    monkeypatch.setattr(batches, "_checks", [])
    model, _ = small(strategy=strategy)
    if hvkit.is_main():
        model.kernel[...] = np.ones((3, 2), np.float32)
    with pytest.raises(hvkit.RanksDisagreeError, match=said):
        hvkit.batch(np.ones((2, 3)))


def test_a_module_whose_ranks_differ_ends_one_batch_of_another(monkeypatch):
    monkeypatch.setattr(batches, "_checks", [])
    model, _ = small(check_every=1)
    small(check_every=1)
    own = np.ones(2, np.float32) * hvkit.rank()
    model.bias[...] = own
    with pytest.raises(hvkit.RanksDisagreeError, match="Linear: bias"):
        hvkit.batch(np.ones((2, 3)))
    for _ in range(3):
        hvkit.batch(np.ones((2, 3)))
    model.bias[...] = own + 1
    with pytest.raises(hvkit.RanksDisagreeError, match="Linear: bias"):
        hvkit.batch(np.ones((2, 3)))


def test_a_module_whose_arrays_were_donated_to_a_step_is_not_compared(monkeypatch):
    monkeypatch.setattr(batches, "_checks", [])
    model, _ = small(check_every=1)
    _, state = nnx.split(model)
    step = jax.jit(lambda state, x: jax.tree.map(lambda w: w + x.mean(), state), donate_argnums=0)
    for _ in range(3):
        state = step(state, hvkit.batch(np.ones((2, 3))))
    assert model.kernel[...].is_deleted()
    nnx.update(model, state)
    np.testing.assert_array_equal(model.bias[...], 3)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"strategy": hvkit.Gossip(every=2)}, "inside the compiled step"),
        ({"lr_scaling": "linear"}, r"rate \* hvkit.size\(\)"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_options_that_xla_replaces_are_refused_with_the_replacement(options, instead):
    with pytest.raises(ValueError, match=instead):
        small(**options)


def test_a_model_goes_with_its_own_optimizer_once():
    model, optimizer = small()
    with pytest.raises(ValueError, match="was passed to hvkit"):
        hvkit.distribute(model, optimizer)
    with pytest.raises(TypeError, match="goes with its"):
        hvkit.distribute(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1))
    state = optax.adam(0.1).init({"w": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"pass the transformation"):
        hvkit.distribute({"w": jnp.ones(2)}, state, strategy=hvkit.ShardedOptimizer())
    with (
        pytest.raises(TypeError, match=r"not a pytree \(dict\)"),
        hvkit.settled({"w": jnp.ones(2)}),
    ):
        pass


def test_ranks_with_other_models_are_named():
    with pytest.raises(hvkit.RanksDisagreeError, match=r"float32\[2\] on rank 1.*float32\[3\]"):
        hvkit.distribute({"w": jnp.ones(2 if hvkit.rank() == 1 else 3)}, optax.sgd(0.1))


def test_every_array_of_a_model_begins_as_rank_0_s():
    params = {
        "bfloat16": jnp.full(3, 1 + hvkit.rank(), jnp.bfloat16),
        "key": jax.random.key(hvkit.rank()),
        "old key": jax.random.PRNGKey(hvkit.rank()),
        "numpy": np.arange(3) + hvkit.rank(),
        "transposed": (np.ones((2, 3)) * (1 + hvkit.rank())).T,
        "number of NumPy": np.float32(1 + hvkit.rank()),
        "empty": jnp.ones((0, 2)),
        "number": 3,
    }
    params, _ = hvkit.distribute(params, optax.sgd(0.1))
    assert np.asarray(params["bfloat16"]).tolist() == [1, 1, 1]
    assert (jax.random.key_data(params["key"]) == jax.random.key_data(jax.random.key(0))).all()
    assert (np.asarray(params["old key"]) == jax.random.PRNGKey(0)).all()
    assert np.asarray(params["numpy"]).tolist() == [0, 1, 2]
    assert np.asarray(params["transposed"]).tolist() == np.ones((3, 2)).tolist()
    assert float(params["number of NumPy"]) == 1
    assert params["empty"].shape == (0, 2)
    assert params["number"] == 3


def test_allreduce_and_average_take_arrays_of_jax():
    mean = hvkit.allreduce(jnp.full(2, hvkit.rank(), jnp.bfloat16))
    assert (mean.dtype, mean.tolist()) == (jnp.bfloat16, [(hvkit.size() - 1) / 2] * 2)
    assert hvkit.average(jnp.float32(hvkit.rank())) == (hvkit.size() - 1) / 2
    assert [each.tolist() for each in hvkit.allgather(jnp.full(1, hvkit.rank()))] == [
        [rank] for rank in range(hvkit.size())
    ]
    with pytest.raises(TypeError, match="belongs to all ranks"):
        hvkit.allreduce(hvkit.batch(np.ones((2, 3), np.float32)))


def test_a_checkpoint_takes_no_pytree_that_it_could_not_set(tmp_path):
    with pytest.raises(TypeError, match="SimpleNamespace"):
        hvkit.Checkpoint(tmp_path, params={"w": jnp.ones(2)})
    assert hvkit.Checkpoint(tmp_path, run=types.SimpleNamespace(params={"w": jnp.ones(2)}))


def test_a_mean_over_what_is_not_masked_is_that_of_all_ranks():
    rank, size = hvkit.rank(), hvkit.size()
    x = np.arange(4.0 * size, dtype=np.float32).reshape(size, 4)
    mask = x < 5
    rows, shown = hvkit.batch((x[rank : rank + 1], mask[rank : rank + 1]))

    def loss(scale, x, mask):
        return hvkit.mean((x * mask * scale).sum(), mask.sum())

    for function in (loss, jax.jit(loss)):
        mean, slope = jax.value_and_grad(function)(2.0, rows, shown)
        assert (float(mean), float(slope)) == (4.0, 2.0)
    with pytest.raises(TypeError, match="compute both from arrays of all ranks"):
        hvkit.mean(rows.sum(), int(mask[rank].sum()))
    assert hvkit.mean(jnp.float32(rank), 2) == sum(range(size)) / (2 * size)
