import pytest
import torch

from hvkit.adapters.pytorch.step_report import StepReport


def encoded(steps, dense=(), sparse=(), outdated=(), trained=(0, 1, 2, 3), rates=5):
    return StepReport.encode(
        4,
        dense=dense,
        sparse=sparse,
        outdated=outdated,
        trained=trained,
        rates=rates,
        steps=steps,
    )


@pytest.mark.parametrize("steps", [[3, 3, 3], [7, 8, 7], [0, 0, 1]])
def test_the_report_holds_what_any_rank_had(steps):
    ranks = [
        encoded(steps[0], dense={0}),
        encoded(steps[1], dense={0, 1}, sparse={2}, outdated={1}),
        encoded(steps[2], sparse={2}),
    ]
    assert len(ranks[0]) == StepReport.length(4)
    report = StepReport.decode(torch.stack(ranks).mean(0), size=3)
    assert (report.dense, report.sparse, report.outdated) == ({0, 1}, {2}, {1})
    assert report.steps_differ == (len(set(steps)) > 1)
    assert not report.frozen_on_some
    assert not report.rates_differ


@pytest.mark.parametrize("size", [2, 3, 7, 100, 1000])
def test_one_rank_that_differs_is_noticed_among_many(size):
    usual = encoded(7)

    def seen(odd):
        # As Horovod computes it.
        return StepReport.decode((usual * (size - 1) + odd) * (1 / size), size)

    assert seen(encoded(6)).steps_differ
    assert seen(encoded(7, trained=(0, 1, 3))).frozen_on_some == {2}
    assert seen(encoded(7, rates=5 + (1 << 20))).rates_differ
    alike = seen(usual)
    assert (alike.steps_differ, alike.frozen_on_some, alike.rates_differ) == (False, set(), False)
