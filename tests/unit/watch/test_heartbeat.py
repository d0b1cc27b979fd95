"""When ranks report where they are."""

import pytest

from hvkit.watch import heartbeat


@pytest.mark.parametrize(("now", "left"), [(1e9 + 0.25, 0.75), (1e9, 1.0), (1e9 + 0.999, 0.001)])
def test_ranks_report_at_the_full_seconds_of_the_clock(now, left):
    assert heartbeat._until_next(now) == pytest.approx(left, abs=1e-6)
