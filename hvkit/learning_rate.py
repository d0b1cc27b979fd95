"""How the learning rate follows the number of ranks: plain arithmetic, no collectives.

N ranks with batch size B take one step where a single process takes N. The linear rule multiplies
the rate by N; over the first steps, where that is too much, it is raised gradually. Both are from
Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017). The square-root
rule keeps the variance of the update instead: Krizhevsky, "One weird trick for parallelizing
convolutional neural networks" (2014).
"""

import math

LR_SCALINGS = ("linear", "sqrt", "none")


def scale_factor(lr_scaling: str, size: int) -> float:
    """What the learning rate is multiplied by on ``size`` ranks.

    Raises:
        ValueError: unknown ``lr_scaling``.
    """
    if lr_scaling not in LR_SCALINGS:
        raise ValueError(f"lr_scaling must be one of {', '.join(LR_SCALINGS)}; got {lr_scaling!r}")
    return {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}[lr_scaling]


def warmup_multiplier(step: int, warmup_steps: int, factor: float) -> float:
    """What the scaled learning rate is multiplied by in a step of the warm-up.

    Grows linearly from ``1 / factor`` (the single-process rate) at step 0 to 1 at
    ``warmup_steps``, and stays there.

    Args:
        step: optimizer steps done so far.
        warmup_steps: length of the warm-up in optimizer steps; 0 for none.
        factor: what :func:`scale_factor` gave.
    """
    if step >= warmup_steps:
        return 1.0
    return (1.0 + (factor - 1.0) * step / warmup_steps) / factor
