"""What ranks make of the counts of their losses."""

import numpy as np
import pytest

from hvkit import main_rank
from hvkit.frameworks.pytorch.gradients.loss_counts import LossCounts
from hvkit.runtime import Group


@pytest.mark.parametrize(
    ("weights", "warns"), [((-1.0, -2.0), True), ((-1.0, np.nan), True), ((-1.0, -1.0), False)]
)
def test_counts_that_differ_are_named_unless_elements_count_alike(
    weights, warns, monkeypatch, caplog
):
    monkeypatch.setattr(main_rank, "_logged", set())
    LossCounts().compare(np.array([[4, 5], weights]).T, Group(0, (0, 1)))
    assert ("over 4 elements" in caplog.text) == warns
