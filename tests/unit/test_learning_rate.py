import pytest

from hvkit.learning_rate import scale_factor, warmup_multiplier


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4), ("sqrt", 2), ("none", 1)])
def test_the_factor_on_four_ranks(rule, factor):
    assert scale_factor(rule, 4) == factor
    assert scale_factor(rule, 1) == 1


def test_an_unknown_rule_is_named():
    with pytest.raises(ValueError, match="linear, sqrt, none; got 'cubic'"):
        scale_factor("cubic", 2)


def test_warm_up_grows_linearly_from_the_single_process_rate():
    rates = [8 * warmup_multiplier(step, 4, 8) for step in range(6)]
    assert rates == pytest.approx([1, 1 + 7 / 4, 1 + 14 / 4, 1 + 21 / 4, 8, 8])


def test_without_warm_up_the_rate_is_full_at_once():
    assert warmup_multiplier(0, 0, 8) == 1
