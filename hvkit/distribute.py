"""The one call: checks what it was given, picks the adapter, runs the shared steps in order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

from hvkit import registry, runtime
from hvkit.adapters import Adapter, Options, adapter_for, framework_of
from hvkit.agreement import raise_together, require_equal
from hvkit.learning_rate import scale_factor

Model = TypeVar("Model")
Optimizers = TypeVar("Optimizers")


def distribute(
    model: Model,
    optimizer: Optimizers,
    *,
    lr_scaling: str = "linear",
    warmup_steps: int = 0,
    accumulate: int = 1,
) -> tuple[Model, Optimizers]:
    """Train this model with its optimizer on all ranks together.

    Call it on every rank, after the model and the optimizer were made (and loaded from a
    checkpoint, if they are), before the first step and before learning-rate schedulers are
    attached. Each update then uses the mean over ranks of the ranks' gradients, so that N ranks
    with batch size B train the model that one process trains with batch size N*B. With one
    process it changes nothing.

    In PyTorch the gradients are averaged when ``loss.backward()`` returns. Parameters that some
    ranks did not use count as zero there; those that no rank used keep a gradient of None. In
    Keras the gradients are averaged inside ``optimizer.apply``, which ``fit`` and
    ``apply_gradients`` call. A Keras model that has no weights yet gets rank 0's in its first
    call, which every rank has to make.

    What each rank measures stays its own: average a validation loss with :func:`hvkit.average`
    before a scheduler or an early stop decides by it. Batch-norm statistics are those of the
    rank's own batches. A rate that comes with a checkpoint was multiplied when that was saved:
    load it after the call, or pass ``lr_scaling="none"``.

    Args:
        model: a ``torch.nn.Module`` or a ``keras.Model`` (Keras 3 on TensorFlow).
        optimizer: a ``torch.optim.Optimizer`` or ``keras.optimizers.Optimizer`` that updates the
            model, or a list or tuple of several, with those of later phases of training.
        lr_scaling: what the learning rate is multiplied by: ``"linear"`` the world size,
            ``"sqrt"`` its square root, ``"none"`` one. Rates of ``LearningRateSchedule`` objects
            are multiplied as they are read.
        warmup_steps: over so many optimizer steps the learning rate grows linearly from the
            single-process rate to the multiplied one; 0 for none.
        accumulate: PyTorch only: gradients add up locally over this many backward passes and are
            averaged over ranks in the last, for scripts that call ``optimizer.step()`` once in so
            many passes. As without hvkit, the script divides the loss by it. Keras has
            ``gradient_accumulation_steps`` on the optimizer.

    Returns:
        The model and the optimizer (or the list) that were passed in, the same objects.

    Raises:
        TypeError: the model or optimizer is of an unsupported type or of another framework.
        ValueError: an argument has a wrong value, the optimizer does not hold the model's
            parameters, or one of them was passed to an earlier call.
        RanksDisagreeError: the ranks' models, optimizers or arguments differ.
        HorovodNotFoundError: several ranks were launched, but there is no usable Horovod.
    """
    runtime.init(framework_of(model))
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    adapter: Adapter | None = None
    problem: Exception | None = None
    try:
        factor = scale_factor(lr_scaling, runtime.size())
        options = Options(
            accumulate=_count("accumulate", accumulate, 1),
            warmup_steps=_count("warmup_steps", warmup_steps, 0),
        )
        if not optimizers:
            raise ValueError(f"optimizer must hold at least one optimizer, got {optimizer!r}")
        adapter = adapter_for(model, optimizers, options)
        _refuse_second_call(model, optimizers)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = error
    raise_together(problem)
    assert adapter is not None
    records = [(each, registry.Record(factor)) for each in optimizers]
    if runtime.size() > 1:
        arguments = f"lr_scaling={lr_scaling}, {options}"
        require_equal(
            "model or call",
            [type(model).__name__, arguments, *adapter.facts()],
            "build the same model and optimizer, and pass the same arguments, on every rank",
        )
        adapter.synchronise()
        rates = adapter.scale_learning_rate(factor)
        records = adapter.average_gradients()
        _announce(rates, lr_scaling, warmup_steps)
    registry.record(model, records)
    return model, optimizer


def _count(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def _refuse_second_call(model: object, optimizers: Sequence[object]) -> None:
    for role, thing in (("model", model), *(("optimizer", each) for each in optimizers)):
        if registry.is_distributed(thing):
            raise ValueError(
                f"this {role} ({type(thing).__name__}) was passed to hvkit.distribute before; "
                "call it once for each model, with all of its optimizers, also those of later "
                "phases of training: distribute(model, [first, second])"
            )


def _announce(rates: list[tuple[float, float]], lr_scaling: str, warmup_steps: int) -> None:
    if runtime.rank() != 0:
        return
    changes = ", ".join(dict.fromkeys(f"{old:g} -> {new:g}" for old, new in rates))
    warmup = f", warm-up over {warmup_steps} steps" if warmup_steps else ""
    print(
        f"hvkit: {runtime.size()} ranks; learning rate {changes or 'none'} ({lr_scaling}){warmup}",
        file=sys.stderr,
        flush=True,
    )
