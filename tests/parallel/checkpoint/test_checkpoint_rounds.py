"""State of strategies and compressions: a run that was stopped continues as without a stop."""

import keras
import numpy as np
import pytest
import torch
from cases import MORE, cases
from keras_models import eager_tape
from keras_models import regression as keras_batches
from ranks import error_of, identical, my_part, same_on_all_ranks
from runs import DILOCO, KerasGraphRun, KerasRun, Past, TorchRun
from torch import nn
from torch.nn import functional as F
from torch_nets import arrays

import hvkit

pytestmark = pytest.mark.two_ranks

BESIDE = hvkit.DiLoCo(5, outer_lr=0.6, outer_momentum=0.8, overlap=3)
DEMO = hvkit.DeMo(top_k=1, chunk=4, sign=False)


STRATEGIES = [
    DILOCO,
    BESIDE,
    hvkit.Gossip(2),
    hvkit.ElasticAveraging(5),
    hvkit.ParameterServer(0),
    hvkit.LocalSGD(5),
]


@pytest.fixture(scope="module")
def past(tmp_path_factory):
    return Past(tmp_path_factory)


RUNS = pytest.mark.parametrize("run", [TorchRun, KerasRun], ids=["torch", "keras"])
# `make test` leaves Keras to `make test-all`: its own part of the code is shown by other tests.
FEWER = pytest.mark.parametrize("run", cases([TorchRun, KerasRun]), ids=["torch", "keras"])


@pytest.mark.parametrize(
    ("run", "strategy"),
    cases(
        [
            *((TorchRun, strategy) for strategy in STRATEGIES),
            (KerasGraphRun, BESIDE),
        ],
        2,
        name=lambda case: f"{case[0].__name__}-{case[1]}",
    ),
)
def test_stopped_in_the_middle_of_a_round(run, strategy, past):
    undisturbed = past.undisturbed(run, strategy)
    at = 7 if strategy is BESIDE else 8  # while the agreement runs
    resumed = run(past.saved(run, at, strategy), 2, strategy).train(14).state()
    assert not same_on_all_ranks(undisturbed)
    assert len(undisturbed) == len(resumed)
    assert identical(undisturbed, resumed)


class TorchParts(TorchRun):
    """Saves the model's parts, each under its name."""

    def __init__(self, folder, *args, **kwargs):
        super().__init__(folder, *args, **kwargs)
        parts = {"first": self.model[:2], "rest": self.model[2:]}
        self.checkpoint = hvkit.Checkpoint(folder, **parts, optimizer=self.optimizer)


class Pair(keras.Model):
    """Only wraps other models, as autoencoders do."""

    def __init__(self, whole):
        super().__init__()
        self.first = keras.Sequential([keras.Input((8,)), *whole.layers[:2]])
        self.rest = keras.Sequential([keras.Input((16,)), *whole.layers[2:]])

    def call(self, x, training=False):
        return self.rest(self.first(x, training=training), training=training)


class KerasParts(KerasRun):
    """The same, of a model that cannot be saved itself."""

    def __init__(self, folder, *args, **kwargs):
        super().__init__(folder, *args, **kwargs)
        parts = {"first": self.model.first, "rest": self.model.rest}
        self.checkpoint = hvkit.Checkpoint(folder, **parts, optimizer=self.optimizer)

    def make(self):
        model = Pair(super().make())
        model.build((None, 8))
        return model


@pytest.mark.parametrize("run", cases([TorchParts, KerasParts]), ids=["torch", "keras"])
def test_parts_of_a_model_are_stopped_in_the_middle_of_a_round(run, past):
    undisturbed = past.undisturbed(run)
    folder = past.saved(run, 8)
    assert len(list(folder.glob("*/*-strategy.npz"))) == 1
    resumed = run(folder, 2).train(14).state()
    assert identical(undisturbed, resumed)


def test_stopped_right_after_a_round(past):
    resumed = TorchRun(past.saved(TorchRun, 10), 2).train(14).state()
    assert identical(past.undisturbed(TorchRun), resumed)


@FEWER
def test_saving_does_not_change_the_training_and_a_run_can_go_back(run, folder, past):
    script = run(folder, 1)
    once = script.train(14, save_at=8).state()
    again = script.train(14).state()
    for state in (once, again):
        assert identical(past.undisturbed(run), state)


@FEWER
def test_a_resumed_run_can_settle_before_its_first_step(run, folder):
    first = run(folder, 1).train(8, save_at=8)
    second = run(folder, 2)
    second.checkpoint.restore()
    with hvkit.settled(second.model):
        assert same_on_all_ranks(second.weights())
    if run is TorchRun:  # fit has ended the round of the first
        with hvkit.settled(first.model):
            expected = first.weights()
        with hvkit.settled(second.model):
            assert identical(second.weights(), expected)


@pytest.mark.parametrize(
    ("run", "strategy", "compression"),
    cases(
        [
            (TorchRun, hvkit.Synchronous(), hvkit.TopK(0.1)),
            (TorchRun, DEMO, "none"),
            (TorchRun, hvkit.Synchronous(), hvkit.PowerSGD(1)),
            (TorchRun, hvkit.LocalSGD(5), hvkit.TopK(0.1)),
            (KerasGraphRun, hvkit.LocalSGD(5), hvkit.PowerSGD(1)),
        ],
        2,
    ),
)
def test_residuals_are_saved(run, strategy, compression, past):
    undisturbed = past.undisturbed(run, strategy, compression)
    saved = past.saved(run, 8, strategy, compression)
    resumed = run(saved, 2, strategy, compression).train(14).state()
    assert len(undisturbed) == len(resumed)
    assert identical(undisturbed, resumed)


SYNCHRONOUS = (hvkit.Synchronous(), "none")


@FEWER
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ((DILOCO, "none"), SYNCHRONOUS),
        ((DILOCO, "none"), (hvkit.LocalSGD(4), "none")),
        (SYNCHRONOUS, (DILOCO, "none")),
        ((hvkit.Synchronous(), hvkit.TopK(0.1)), (hvkit.Synchronous(), hvkit.PowerSGD(1))),
    ],
    ids=["synchronous", "other rounds", "rounds", "another compression"],
)
def test_another_strategy_begins_with_the_saved_weights(run, saved, resumed, past):
    second = run(past.saved(run, 8, *saved), 2, *resumed)
    assert second.checkpoint.restore().step == 8
    # Up to the end of a round.
    second.train(13 if resumed[0] == DILOCO else 12)
    assert same_on_all_ranks(second.state()[:2])


@pytest.mark.parametrize(
    ("run", "strategy"),
    cases(
        [
            (TorchRun, hvkit.Gossip(2)),
            (KerasRun, hvkit.Gossip(2)),
            (TorchRun, BESIDE),
            (KerasRun, DILOCO),
        ],
        2,
    ),
)
def test_agreed_weights_are_shown_before_a_resumed_run_takes_a_step(run, strategy, past):
    resumed = run(past.saved(run, 7, strategy), 2, strategy)
    for _ in range(2):
        resumed.checkpoint.restore()
        own = resumed.weights()
        with hvkit.settled(resumed.model):
            assert same_on_all_ranks(resumed.weights()[0])
        assert identical(resumed.weights(), own)
        assert not same_on_all_ranks(own[0])


def test_the_model_file_holds_the_agreed_weights(folder):
    run = TorchRun(folder, 1).train(8, save_at=8)
    with hvkit.settled(run.model):
        agreed = arrays(run.model.parameters())
    saved = torch.load(folder / "step-000000008" / "model.pt", weights_only=True)
    names = [name for name, _ in run.model.named_parameters()]
    assert identical(arrays(saved[name] for name in names), agreed)
    assert (folder / "step-000000008" / "model-strategy.npz").exists()


@MORE
def test_the_epoch_callback_saves_each_ranks_own_weights(folder):
    first = KerasRun(folder, 1)
    save = first.checkpoint.callback()
    x = np.random.default_rng(hvkit.rank()).normal(size=(42, 8)).astype(np.float32)
    own = []

    def end_batch(batch, logs):
        own[:] = [np.array(w.numpy()) for w in first.variables()]

    seen = keras.callbacks.LambdaCallback(on_train_batch_end=end_batch)
    options = {"batch_size": 6, "shuffle": False, "verbose": 0}
    first.model.fit(x, x[:, :4], callbacks=[seen, save], **options)
    second = KerasRun(folder, 2)
    assert second.checkpoint.restore().epoch == 1
    found = [np.array(w.numpy()) for w in second.variables()]
    assert not same_on_all_ranks(own)
    assert identical(found, own)


@MORE
def test_the_callback_counts_steps_whose_update_one_rank_skips(folder):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0)
    hvkit.distribute(model, scaler, strategy=hvkit.LocalSGD(4))
    model.compile(scaler, "mse")
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=scaler)
    x = np.ones((60, 8), np.float32)
    if hvkit.rank() == 0:
        x[12] = np.inf
    save = checkpoint.callback(every=4)
    model.fit(x, x[:, :4], batch_size=6, shuffle=False, verbose=0, callbacks=[save])
    assert int(scaler.inner_optimizer.iterations) == (9 if hvkit.rank() == 0 else 10)
    assert [path.name for path in sorted(folder.iterdir()) if path.is_dir()] == [
        f"step-{step:09}" for step in (4, 8, 10)
    ]


def test_a_rank_s_own_statistics_and_gradients_are_resumed_in_rounds(folder):
    def run(strategy):
        layers = keras.layers.Dense(4), keras.layers.BatchNormalization()
        model = keras.Sequential([keras.Input((8,)), *layers])
        optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
        hvkit.distribute(model, optimizer, strategy=strategy, batch_norm="local")
        return model, optimizer, hvkit.Checkpoint(folder, model=model, optimizer=optimizer)

    data = [tuple(map(my_part, batch)) for batch in keras_batches(4)]
    model, optimizer, checkpoint = run(hvkit.Synchronous())
    eager_tape(model, optimizer, data[:3])
    checkpoint.save(epoch=0, step=1)
    saved = [np.array(v.numpy()) for v in [*model.weights, *optimizer.variables]]
    model, optimizer, checkpoint = run(hvkit.LocalSGD(2))
    checkpoint.restore()
    found = [np.array(v.numpy()) for v in [*model.weights, *optimizer.variables]]
    assert identical(found, saved)
    eager_tape(model, optimizer, data[3:])


def test_another_number_of_optimizers_is_refused(folder):
    TorchRun(folder, 1).train(8, save_at=8)
    model = TorchRun(folder, 2).model
    twin = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))
    twin.load_state_dict(model.state_dict())
    two = [torch.optim.Adam(twin[0].parameters()), torch.optim.Adam(twin[3].parameters())]
    hvkit.distribute(twin, two, strategy=DILOCO)
    error, text = error_of(hvkit.Checkpoint(folder, model=twin).restore)
    assert error is ValueError
    assert "1 optimizers, here are 2" in text


def train_by(run, steps):
    """Some steps outside of ``fit``, which would end with the same weights on all ranks."""
    batches = np.random.default_rng(hvkit.rank()).normal(size=(steps, 6, 8)).astype(np.float32)
    if isinstance(run, KerasRun):
        eager_tape(run.model, run.optimizer, [(x, x[:, :4]) for x in batches])
        return
    for x in map(torch.from_numpy, batches):
        run.optimizer.zero_grad()
        F.mse_loss(run.model(x), x[:, :4]).backward()
        run.optimizer.step()


def resumed_server(run, folder):
    """Of a parameter server: a resumed run, a rank's own weights, and those of the server."""
    first = run(folder, 1, hvkit.ParameterServer(None))
    # The ranks with fewer steps have not read what the others did later.
    train_by(first, 4 + 4 * hvkit.rank())
    first.checkpoint.save(epoch=0, step=8)
    own = first.weights()
    with hvkit.settled(first.model):
        saved = first.weights()
    assert not same_on_all_ranks(own)
    second = run(folder, 2, hvkit.ParameterServer(None))
    second.checkpoint.restore()
    return second, own, saved


def stop_learning(run):
    if isinstance(run, KerasRun):
        run.optimizer.learning_rate = 0.0
    else:
        run.optimizer.param_groups[0]["lr"] = 0.0


@MORE
@RUNS
def test_a_resumed_server_holds_the_weights_that_it_had(run, folder):
    second, own, saved = resumed_server(run, folder)
    assert identical(second.weights(), own)
    with hvkit.settled(second.model):
        assert identical(second.weights(), saved)
    stop_learning(second)
    train_by(second, 1)
    with hvkit.settled(second.model):  # the first layer: no step changes its statistics
        assert identical(second.weights()[:2], saved[:2])


@MORE
@RUNS
def test_a_resumed_server_holds_also_weights_that_train_later(run, folder):
    second, _, saved = resumed_server(run, folder)
    stop_learning(second)
    for trains in (False, True):
        if run is KerasRun:
            second.model.layers[-1].trainable = trains
        else:
            second.model[-1].requires_grad_(trains)
        train_by(second, 1)
        with hvkit.settled(second.model):
            agreed = second.weights()
        assert same_on_all_ranks(agreed[-2:])
        assert identical(agreed[-2:], saved[-2:]), trains


def train_in_turn(run, begin, end):
    """Every third step leaves out the first layer; so two groups of variables are in a round."""
    batches = np.random.default_rng(hvkit.rank()).normal(size=(end, 6, 8)).astype(np.float32)
    for step in range(begin, end):
        run.model.layers[0].trainable = step % 3 != 2
        eager_tape(run.model, run.optimizer, [(batches[step], batches[step][:, :4])])


@MORE
def test_keras_variables_that_are_updated_in_turn_stopped_in_a_round(folder):
    first = KerasRun(folder, 1)
    train_in_turn(first, 0, 8)
    first.checkpoint.save(epoch=0, step=8)
    train_in_turn(first, 8, 17)
    second = KerasRun(folder, 2)
    second.checkpoint.restore()
    train_in_turn(second, 8, 17)
    assert identical(first.weights(), second.weights())
