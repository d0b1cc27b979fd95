import pytest

from hvkit.learning_rate import Multiplier, describe, length_of_warmup, make_multiplier


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4), ("sqrt", 2), ("none", 1)])
def test_the_factor_on_four_ranks(rule, factor):
    assert make_multiplier(rule, 4, 0).at(0) == factor
    assert make_multiplier(rule, 4, 0).changes_nothing == (factor == 1)


@pytest.mark.parametrize("rule", ["linear", "sqrt", "none"])
@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_one_process_changes_nothing(rule, warmup_steps):
    assert make_multiplier(rule, 1, warmup_steps).changes_nothing


def test_an_unknown_rule_is_named():
    with pytest.raises(ValueError, match="none, linear, sqrt; got 'cubic'"):
        make_multiplier("cubic", 2, 0)


@pytest.mark.parametrize(
    ("rule", "multipliers"),
    [
        ("linear", [1, 2.75, 4.5, 6.25, 8, 8]),
        ("none", [1 / 8, 11 / 32, 18 / 32, 25 / 32, 1, 1]),
    ],
)
def test_a_warm_up_grows_linearly_from_the_rate_of_a_single_process(rule, multipliers):
    multiplier = make_multiplier(rule, 8, 4)
    assert [multiplier.at(step) for step in range(6)] == pytest.approx(multipliers)
    assert not multiplier.changes_nothing


@pytest.mark.parametrize(("epochs", "steps"), [(0, 0), (0.5, 5), (5, 50)])
def test_a_warm_up_over_epochs_has_their_steps(epochs, steps):
    assert length_of_warmup(0, epochs, 10) == steps


def test_rates_are_described_by_what_multiplies_them():
    linear = make_multiplier("linear", 4, 0)
    assert describe([(0.1, linear), (1.0, None), (0.2, linear), (0.1, linear)], "linear", 4) == (
        'learning rate 0.1, 0.2; steps use 0.4, 0.8 (lr_scaling="linear"); '
        "step length 1 of LBFGS, never scaled"
    )
    assert describe([(0.1, Multiplier())], "none", 4) == (
        "learning rate 0.1, not scaled (the global batch is 4 times one rank's: "
        'lr_scaling="linear" would use 0.4)'
    )
    assert describe([(0.5, make_multiplier("linear", 4, 30))], "linear", 4) == (
        "learning rate 0.5; steps use 0.5 at first and 2 after 30 steps "
        '(lr_scaling="linear", warm-up)'
    )
    assert describe([(0.5, make_multiplier("none", 4, 30))], "none", 4) == (
        "learning rate 0.5; steps use 0.125 at first and 0.5 after 30 steps "
        '(lr_scaling="none", warm-up)'
    )
    # Of ranks that train one model together, on the same batches.
    assert describe([(0.1, make_multiplier("linear", 1, 0))], "linear", 1) == "learning rate 0.1"
    assert describe([], "linear", 4) == "no learning rate"
