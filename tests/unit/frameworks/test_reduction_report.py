from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.pytorch import checks
from hvkit.frameworks.pytorch.checks import Disagreement
from hvkit.frameworks.pytorch.gradients.bucket_layout import StepReport
from hvkit.frameworks.pytorch.gradients.reduction import ReportVector
from hvkit.frameworks.pytorch.learning_rate import checksum_of_rates, rates_of
from hvkit.runtime import Group


def report(dense=(), sparse=(), outdated=(), trained=(0, 1, 2, 3)):
    return StepReport(*map(frozenset, (dense, sparse, outdated, trained)))


def encoded(steps, checksum=5, shapes=0, **kinds):
    return ReportVector(4).encode(report(**kinds), checksum, steps, shapes=shapes).copy()


def decoded(mean, size):
    """As by a rank whose own report is another one."""
    return ReportVector(4).decode(mean, size)


@pytest.mark.parametrize("steps", [[3, 3, 3], [7, 8, 7], [0, 0, 1]])
def test_the_report_holds_what_any_rank_had(steps):
    ranks = [
        encoded(steps[0], dense={0}),
        encoded(steps[1], dense={0, 1}, sparse={2}, outdated={1}),
        encoded(steps[2], sparse={2}),
    ]
    assert len(ranks[0]) == ReportVector(4).length
    found, disagreement = decoded(np.mean(ranks, axis=0), size=3)
    assert found == report(dense={0, 1}, sparse={2}, outdated={1})
    assert disagreement == Disagreement(steps=len(set(steps)) > 1)


@pytest.mark.parametrize("size", [2, 3, 7, 100, 1000])
def test_one_rank_that_differs_is_noticed_among_many(size):
    usual = encoded(7)

    def seen(odd):
        """What all ranks see: those that are as usual, and the one that is not."""
        # As Horovod computes it.
        mean = (usual * (size - 1) + odd) * np.float32(1 / size)
        everyone = []
        for steps in (7, 6):
            vector = ReportVector(4)
            vector.encode(report(), 5, steps)
            everyone.append(vector.decode(mean, size))
        assert everyone[0] == everyone[1]
        return everyone[0][1]

    assert seen(encoded(6)) == Disagreement(steps=True)
    assert seen(encoded(7, shapes=7)) == Disagreement(shapes=True)
    assert seen(encoded(7, trained=(0, 1, 3))) == Disagreement(frozen=True)
    assert seen(encoded(7, checksum=5 + (1 << 20))) == Disagreement(checksums=True)
    assert seen(usual) == Disagreement()


def test_a_report_that_all_ranks_share_is_not_read_again():
    vector, usual = ReportVector(4), report(dense={0, 1})
    for steps in range(20):
        mine = vector.encode(usual, 5, steps)
        found, disagreement = vector.decode(mine.copy(), size=2)
        assert found is usual
        assert disagreement == Disagreement()
    other = vector.encode(report(dense={2}), 6, 3).copy()
    assert (other == encoded(3, checksum=6, dense={2})).all()


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")


@pytest.mark.parametrize("there", [0.01, torch.tensor(0.01), torch.tensor(0.01).as_subclass(OnGpu)])
def test_a_rate_on_the_gpu_of_one_rank_is_compared(monkeypatch, there):
    def optimizer(rate):
        return torch.optim.SGD([torch.zeros(1)], rate, foreach=False)

    ranks = [optimizer(0.5), optimizer(there)]

    def gather(call, mine, group):
        return [rates_of([each], fetch=True) for each in ranks]

    monkeypatch.setattr(checks, "Wire", lambda *_: None)
    monkeypatch.setattr(checks.collectives, "gather", gather)
    options = SimpleNamespace(group=Group(0, (0, 1)), accumulate=1, check_every=None)
    compared = checks.Checks({}, [], options, "model", lambda: ([], []))
    assert len({checksum_of_rates([each]) for each in ranks}) == 2
    with pytest.raises(
        RanksDisagreeError, match=r"SGD is 0\.5 on rank 0 but 0\.0(1|09)\d* on rank 1"
    ):
        compared.require_same_rates([ranks[0]])
