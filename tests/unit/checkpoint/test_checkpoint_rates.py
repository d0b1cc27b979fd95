"""Learning rates in saved states follow the number of ranks."""

import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CyclicLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from hvkit.checkpoint.rates import Ratio, rescale_groups, rescale_scheduler

UNCHANGED = Ratio()


def chained(optimizer, rate):
    return ChainedScheduler([LinearLR(optimizer, 0.1), StepLR(optimizer, 3, 0.5)])


def sequential(optimizer, rate):
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1), StepLR(optimizer, 3, 0.5)], [3])


SCHEDULERS = {
    "step": lambda o, rate: StepLR(o, 3, 0.5),
    "cosine": lambda o, rate: CosineAnnealingLR(o, 10),
    "one cycle": lambda o, rate: OneCycleLR(o, 3 * rate, total_steps=12),
    "cyclic": lambda o, rate: CyclicLR(o, rate, 3 * rate, step_size_up=4),
    "plateau": lambda o, rate: ReduceLROnPlateau(o, factor=0.5, patience=0),
    "sequential": sequential,
    "chained": chained,
}


def rates(make, rate, *, change_at=None, ratio=UNCHANGED):
    """The rates of 10 steps, resumed at ``change_at`` in fresh objects with another factor."""
    found = []
    optimizer, scheduler = fresh(make, rate)
    for step in range(10):
        if step == change_at:
            state, of_scheduler = optimizer.state_dict(), scheduler.state_dict()
            optimizer, scheduler = fresh(make, rate * ratio.now / ratio.saved)
            rescale_groups(state["param_groups"], ratio)
            rescale_scheduler(of_scheduler, ratio)
            optimizer.load_state_dict(state)
            scheduler.load_state_dict(of_scheduler)
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
        found.append(optimizer.param_groups[0]["lr"])
    return found


def fresh(make, rate):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    return optimizer, make(optimizer, rate)


def test_a_run_resumed_with_another_factor_goes_on_as_one_that_had_it_from_the_start():
    for name, make in SCHEDULERS.items():
        resumed = rates(make, 0.02, change_at=4, ratio=Ratio(2.0, 3.0))
        torch.testing.assert_close(
            torch.tensor(resumed[4:]), torch.tensor(rates(make, 0.03)[4:]), msg=name
        )
        assert resumed[:4] == rates(make, 0.02)[:4], name


def test_equal_factors_change_nothing():
    tensor = torch.tensor(0.1)
    group = {"lr": tensor, "initial_lr": 0.3}
    assert rescale_groups([group], Ratio(3.0, 3.0)) == [(float(tensor), float(tensor))]
    assert group["lr"] is tensor
    assert group["initial_lr"] == 0.3


def test_a_rate_in_a_tensor_stays_a_tensor():
    group = {"lr": torch.tensor(0.2)}
    rescale_groups([group], Ratio(2.0, 3.0))
    torch.testing.assert_close(group["lr"], torch.tensor(0.3))


def test_groups_without_a_rate_are_left_alone():
    group = {"weight_decay": 0.1, "lr": None}
    assert rescale_groups([group], Ratio(1.0, 2.0)) == []
    assert group == {"weight_decay": 0.1, "lr": None}
