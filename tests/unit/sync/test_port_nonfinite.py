"""The sentence about gradients that are not finite, the same in PyTorch and in Keras."""

import pytest

from hvkit.sync.port import describe_nonfinite


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        ("a", "parameter a"),
        ("ab", "parameters a, b"),
        ("abc", "parameters a, b, c"),
        ("abcde", "parameters a, b, c and 2 more"),
    ],
)
def test_up_to_three_parameters_are_named(names, listed):
    assert (
        describe_nonfinite([[], list(names)])
        == f"rank 1 has a NaN or infinite gradient of {listed}"
    )
