"""The decay of the learning rate over the epochs, the same for all frameworks.

The warm-up is not here: ``hvkit.distribute`` does it.
"""

import math

SCHEDULES = ("cosine", "step", "none")

# As in He et al. (2015), who divide the rate by 10 after half and three quarters of the steps.
STEP_FACTOR, STEPS_AT = 0.1, (0.5, 0.75)

MNIST_DECAY = 0.8
"""The factor between the learning rates of successive epochs in the MNIST recipes."""


def rate_factor(schedule: str, epoch: int, epochs: int) -> float:
    """The factor on the learning rate in an epoch.

    Args:
        schedule: ``"cosine"`` (Loshchilov and Hutter 2017, without restarts), ``"step"`` or
            ``"none"``.
        epoch: from 0.
        epochs: the total number of epochs.
    """
    done = epoch / epochs
    if schedule == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    if schedule == "step":
        return STEP_FACTOR ** sum(done >= at for at in STEPS_AT)
    return 1.0
