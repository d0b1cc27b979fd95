"""Two groups of two ranks each train a model of their own at the same time."""

import keras
import numpy as np
import pytest
from group_frameworks import Keras, PyTorch
from ranks import batches, error_of, identical, largest_difference, my_part, same_on_all_ranks

import hvkit
from hvkit.communication.collectives import gather

ROWS, COLUMNS = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
LOOP_OF_EACH = [(PyTorch, "loop"), (Keras, "fit")]
EAGER = {PyTorch: "loop", Keras: "eager"}


def in_loops(pairs):
    ids = [f"{each.__name__}-{loop}" for each, loop in pairs]
    return pytest.mark.parametrize(("framework", "loop"), pairs, indirect=["framework"], ids=ids)


@pytest.fixture(autouse=True)
def _ranks_end_together():
    yield
    hvkit.barrier()


def data_of(framework, group, steps):
    """Batches of the whole group in float64, and this rank's part of them."""
    seed = group.first + 10 * group.members[-1]
    both = [
        tuple(framework.array(each.astype("float64")) for each in batch)
        for batch in batches(steps, 3, (8,), (4,), seed=seed)
    ]
    return both, [tuple(my_part(each, group) for each in batch) for batch in both]


def of_its_own(framework, group, seed):
    """A model: groups have different ones, of other shapes and numbers of weights."""
    return framework.mlp(seed) if group.first else framework.deeper(seed)


def trained_like_one_process(framework, group, loop, steps, make="sgd", **options):
    both, own = data_of(framework, group, steps)
    make, loop, weights = getattr(framework, make), framework.loops[loop], framework.weights
    reference = of_its_own(framework, group, seed=group.first)
    start = weights(reference)
    factor = group.size if options.get("lr_scaling") == "linear" else 1
    framework.in_one_process(loop)(reference, make(reference, factor), both)

    model = of_its_own(framework, group, seed=hvkit.rank())
    optimizer = make(model)
    hvkit.distribute(model, optimizer, _group=group, **options)
    assert identical(weights(model), start)
    loop(model, optimizer, own)

    assert same_on_all_ranks(weights(model), group)
    assert largest_difference(weights(model), weights(reference)) < 1e-12
    assert largest_difference(weights(model), start) > 1e-3


@pytest.mark.parametrize(
    ("framework", "loop", "make", "lr_scaling", "group"),
    [
        (PyTorch, "loop", "sgd", "linear", ROWS),
        (PyTorch, "loop", "adam", "none", COLUMNS),
        (Keras, "fit", "sgd", "linear", ROWS),
        (Keras, "function", "adam", "none", COLUMNS),
        (Keras, "eager", "sgd", "linear", COLUMNS),
    ],
    indirect=["framework", "group"],
)
def test_each_group_trains_the_model_of_one_process_with_both_batches(
    framework, group, make, lr_scaling, loop
):
    steps = 9 if group.first == 0 else 14
    trained_like_one_process(framework, group, loop, steps, make, lr_scaling=lr_scaling)


@in_loops([(PyTorch, "loop"), (Keras, "fit"), (Keras, "eager")])
def test_the_state_of_an_optimizer_is_divided_within_a_group(framework, group, loop):
    steps, strategy = 9 if group.first == 0 else 14, hvkit.ShardedOptimizer()
    trained_like_one_process(framework, group, loop, steps, "adam", strategy=strategy)


@in_loops([(PyTorch, "loop"), (Keras, "fit"), (Keras, "eager")])
@pytest.mark.parametrize("strategy", [hvkit.LocalSGD(1), hvkit.DiLoCo(1, 1.0, 0.0)], ids=str)
def test_rounds_of_one_step_give_the_weights_of_one_process(framework, group, strategy, loop):
    trained_like_one_process(framework, group, loop, 5 + group.first, strategy=strategy)


@in_loops([(PyTorch, "loop"), (Keras, "function"), (Keras, "eager")])
@pytest.mark.parametrize("strategy", [hvkit.LocalSGD(4), hvkit.DiLoCo(4, overlap=2)], ids=str)
def test_rounds_end_in_each_group_by_itself(framework, group, strategy, loop):
    """The agreed weights are those of the group, which no other rank takes part in."""
    model = of_its_own(framework, group, seed=hvkit.rank())
    optimizer, weights = framework.sgd(model), framework.weights
    hvkit.distribute(model, optimizer, strategy=strategy, _group=group)
    _, own = data_of(framework, group, 11 if group.first == 0 else 22)
    framework.loops[loop](model, optimizer, own)
    before = gather("test", weights(model), group)
    assert largest_difference(*before) > 1e-6
    with hvkit.settled(model):
        if isinstance(strategy, hvkit.LocalSGD):
            mean = [(a + b) / 2 for a, b in zip(*before, strict=True)]
            assert largest_difference(weights(model), mean) < 1e-12
        assert same_on_all_ranks(weights(model), group)


@pytest.mark.parametrize("framework", [PyTorch], indirect=True)
def test_a_model_of_a_group_and_one_of_all_ranks_train_in_one_script(framework, group):
    both, own = data_of(framework, group, 4)
    everyones, theirs = framework.mlp(hvkit.rank()), framework.mlp(hvkit.rank())
    if group.first == 0:  # whose names of collectives then run ahead
        other = framework.mlp()
        hvkit.distribute(other, framework.sgd(other), _group=group)
    optimizers = framework.sgd(everyones), framework.sgd(theirs)
    hvkit.distribute(everyones, optimizers[0])
    hvkit.distribute(theirs, optimizers[1], _group=group)
    for x, y in own:
        for each in optimizers:
            each.zero_grad()
        sum((model(x) - y).square().mean() for model in (everyones, theirs)).backward()
        for each in optimizers:
            each.step()
    alone = framework.mlp(group.first)
    framework.loops["loop"](alone, framework.sgd(alone), both)
    assert largest_difference(framework.weights(theirs), framework.weights(alone)) < 1e-12
    assert same_on_all_ranks(framework.weights(everyones))


@pytest.mark.parametrize("framework", [Keras], indirect=True)
def test_fit_shows_the_metrics_of_the_group_and_stops_when_one_of_its_ranks_does(framework, group):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training |= group.rank == 1 and batch == 2 + group.first

    _, own = data_of(framework, group, 8)
    model = of_its_own(framework, group, seed=0)
    optimizer = framework.sgd(model)
    hvkit.distribute(model, optimizer, _group=group)
    model.compile(optimizer, "mse")
    x, y = (np.concatenate(part) for part in zip(*own, strict=True))
    history = model.fit(x, y, batch_size=6, epochs=2, verbose=0, callbacks=[Stop()]).history
    assert int(optimizer.iterations) == 3 + group.first
    assert len(set(gather("test", str(history), group))) == 1
    both = np.concatenate(gather("test", x, group)), np.concatenate(gather("test", y, group))
    loss = model.evaluate(x, y, verbose=0)
    predicted = model.predict(both[0], verbose=0)
    assert abs(loss - np.mean((predicted - both[1]) ** 2)) < 1e-6


@in_loops(LOOP_OF_EACH)
@pytest.mark.parametrize("batch_norm", ["sync", "average"])
def test_batch_norm_is_that_of_the_group(framework, group, loop, batch_norm):
    both, own = data_of(framework, group, 4)
    model, alone = framework.normalised(), framework.normalised()
    optimizer = framework.sgd(model)
    hvkit.distribute(model, optimizer, batch_norm=batch_norm, _group=group)
    framework.loops[loop](model, optimizer, own)

    def state(model):
        buffers = [each.numpy() for each in model.buffers()] if framework is PyTorch else []
        return [*framework.weights(model), *buffers]

    assert same_on_all_ranks(state(model), group)
    if batch_norm == "sync":
        framework.loops[EAGER[framework]](alone, framework.sgd(alone), both)
        assert largest_difference(state(model), state(alone)) < 1e-12


def fails_in_the_group_of_rank_3_alone(group, call, text):
    kind, found = error_of(call)
    concerned = group.members[-1] == 3
    assert kind is (hvkit.RanksDisagreeError if concerned else None), found
    assert (text in found) == concerned
    return True


def change_weights(framework, model, optimizer):
    framework.add_to_a_weight(model)


def change_rate(framework, model, optimizer):
    framework.set_rate(optimizer, 0.5)


def freeze(framework, model, optimizer):
    model[0].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("framework", "change", "strategy", "text"),
    [
        (
            PyTorch,
            change_weights,
            hvkit.Synchronous(),
            "0.weight of rank 3 differs from that of {}",
        ),
        (Keras, change_weights, hvkit.Synchronous(), "kernel of rank 3 differs from that of {}"),
        (PyTorch, change_rate, hvkit.LocalSGD(1), "SGD of rank 3 differs from that of {}"),
        (Keras, change_rate, hvkit.LocalSGD(1), "on {} but 0.5 on rank 3"),
        (PyTorch, freeze, hvkit.Synchronous(), "requires a gradient on {} but not on rank 3"),
    ],
    indirect=["framework"],
)
def test_differences_within_a_group_name_ranks_by_their_numbers_among_all(
    framework, group, change, strategy, text
):
    model = framework.mlp()
    optimizer, train = framework.sgd(model), framework.loops[EAGER[framework]]
    hvkit.distribute(model, optimizer, strategy=strategy, _group=group)
    _, own = data_of(framework, group, 2)
    if change is freeze:
        train(model, optimizer, own[:1])
    if hvkit.rank() == 3:
        change(framework, model, optimizer)
    text = text.format(f"rank {group.first}")
    assert fails_in_the_group_of_rank_3_alone(group, lambda: train(model, optimizer, own[1:]), text)


def test_models_that_differ_within_a_group_are_named_by_their_numbers_among_all_ranks(
    framework, group
):
    model = framework.mlp(outputs=5 if hvkit.rank() == 3 else 4)
    call = lambda: hvkit.distribute(model, framework.sgd(model), _group=group)  # noqa: E731
    text = f"of rank 3 differs from that of rank {group.first}"
    assert fails_in_the_group_of_rank_3_alone(group, call, text)


@pytest.mark.parametrize("framework", [Keras], indirect=True)
def test_an_epoch_that_ends_earlier_on_one_rank_of_a_group_is_an_error_there_alone(
    framework, group
):
    model = framework.mlp()
    optimizer = framework.sgd(model)
    hvkit.distribute(model, optimizer, _group=group)
    own = data_of(framework, group, 5)[1][: 4 if hvkit.rank() == 3 else 5]
    call = lambda: framework.loops["fit"](model, optimizer, own)  # noqa: E731
    assert fails_in_the_group_of_rank_3_alone(group, call, "[5, 4] steps per epoch")


@in_loops(LOOP_OF_EACH)
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_gradients_that_are_not_finite_are_a_matter_of_their_group(
    framework, group, loop, action, capfd
):
    model = framework.mlp()
    optimizer = framework.sgd(model)
    hvkit.distribute(model, optimizer, on_nonfinite=action, _group=group)
    _, ((x, y),) = data_of(framework, group, 1)
    if hvkit.rank() == 3:
        x[0, 0] = np.nan
    before = framework.weights(model)
    kind, text = error_of(lambda: framework.loops[loop](model, optimizer, [(x, y)]))
    of_rank_3 = group.members[-1] == 3
    assert kind is (FloatingPointError if of_rank_3 and action == "stop" else None)
    assert identical(before, framework.weights(model)) == of_rank_3
    text += "".join(gather("test", capfd.readouterr().err, group))
    assert ("rank 3 has a NaN or infinite gradient of parameter" in text) == of_rank_3


@in_loops([(PyTorch, "loop"), (Keras, "eager")])
def test_a_state_that_is_divided_within_a_group_is_not_gathered(framework, group, loop):
    model = framework.mlp()
    optimizer = framework.adam(model)
    hvkit.distribute(model, optimizer, strategy=hvkit.ShardedOptimizer(), _group=group)
    framework.loops[loop](model, optimizer, data_of(framework, group, 1)[1])
    with pytest.raises(ValueError, match="needs all ranks, but"), hvkit.settled(optimizer):
        pass


def test_checkpoint_and_average_buffers_refuse_the_model_of_a_group(framework, group, tmp_path):
    model = framework.mlp()
    optimizer = framework.sgd(model)
    hvkit.distribute(model, optimizer, _group=group)
    with pytest.raises(ValueError, match="is trained by"):
        hvkit.Checkpoint(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="is trained by"):
        hvkit.average_buffers(model)


@pytest.mark.parametrize("options", [{"strategy": hvkit.Gossip()}, {"monitor": "monitor"}])
def test_gossip_and_monitor_refuse_a_group(framework, group, options, tmp_path):
    if "monitor" in options:
        options = {"monitor": hvkit.Monitor(tmp_path)}
    model = framework.mlp()
    with pytest.raises(ValueError, match=r"needs all ranks, but ranks \d, \d train as a group"):
        hvkit.distribute(model, framework.sgd(model), _group=group, **options)
