import jax
import numpy as np
import optax
import pytest
from cases import cases
from flax import nnx
from jax_styles import FEATURES, NNX, STYLES, WIDTH, Equinox, Linen, parts, require_close

import hvkit

# Weights of one process with the whole batch, by style.
_alone = {}


def alone(style):
    """The losses and weights of this process's own training with the whole batch."""
    if style not in _alone:
        model = style(optax.sgd(0.05))
        _alone[style] = model.train(), model.weights()
    return _alone[style]


@pytest.mark.parametrize("style", cases(STYLES, name=lambda style: style.__name__))
def test_ranks_train_the_model_of_one_process(style):
    model = style(optax.sgd(0.05), hvkit.Synchronous())
    require_close(model, model.train(), *alone(style))


@pytest.mark.parametrize(
    ("style", "strategy"),
    cases(
        [
            (NNX, hvkit.ShardedOptimizer()),
            (NNX, hvkit.FullyShard()),
            (Linen, hvkit.FullyShard()),
            (Equinox, hvkit.ShardedOptimizer()),
        ],
        2,
    ),
)
def test_divided_states_and_weights_change_nothing_but_memory(style, strategy):
    model = style(optax.sgd(0.05), strategy)
    require_close(model, model.train(), *alone(style))
    divides_weights = isinstance(strategy, hvkit.FullyShard)
    assert parts(model.tree()) == (hvkit.size() if divides_weights else 1)


@pytest.mark.parametrize("strategy", cases([hvkit.FullyShard(), hvkit.ShardedOptimizer()]))
def test_the_state_of_the_optimizer_stays_divided(strategy):
    model = NNX(optax.adam(1e-2), strategy)
    model.train()
    assert parts(nnx.state(model.optimizer)) == hvkit.size()
    with hvkit.settled(model.model, model.optimizer):
        assert model.model.first.kernel[...].is_fully_replicated
        assert model.model.first.kernel[...].shape == (FEATURES, WIDTH)
        assert parts(nnx.state(model.optimizer)) == 1
    assert parts(nnx.state(model.optimizer)) == hvkit.size()


def test_transformations_in_a_dict_divide_their_states():
    weights = {name: jax.numpy.ones((WIDTH, FEATURES)) for name in ("generator", "critic")}
    rules = {"generator": optax.adam(1e-3), "critic": optax.adam(4e-3)}
    weights, rules = hvkit.distribute(weights, rules, strategy=hvkit.ShardedOptimizer())
    states = {name: rule.init(weights[name]) for name, rule in rules.items()}
    assert parts(states) == hvkit.size()
    changes, states["critic"] = rules["critic"].update(weights["critic"], states["critic"])
    assert parts(states) == hvkit.size()
    assert np.asarray(changes) == pytest.approx(-4e-3, rel=1e-4)  # Adam's first step is the rate
