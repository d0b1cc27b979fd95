"""The one call: checks what it was given, picks the adapter, runs the shared steps in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeVar

from hvkit import runtime
from hvkit.adapters.adapter import (
    BATCH_NORMS,
    Adapter,
    Options,
    Record,
    adapter_for,
    framework_of,
    is_distributed,
    record,
)
from hvkit.adapters.transport import COMPRESSIONS
from hvkit.agreement import raise_together, require_equal
from hvkit.learning_rate import Multiplier, describe, make_multiplier
from hvkit.log import logger
from hvkit.watch.calls import named

Model = TypeVar("Model")
Optimizers = TypeVar("Optimizers")


@named("hvkit.distribute")
def distribute(
    model: Model,
    optimizer: Optimizers,
    *,
    lr_scaling: str = "none",
    warmup_steps: int = 0,
    warmup_epochs: float = 0,
    steps_per_epoch: int | None = None,
    accumulate: int = 1,
    compression: str = "none",
    batch_norm: str = "average",
    check_every: int | None = None,
) -> tuple[Model, Optimizers]:
    """Train this model with its optimizer on all ranks together.

    Call it on every rank, after the model and the optimizer were made (and loaded from a
    checkpoint, if they are) and before the first step. Each update then uses the mean over ranks of
    the ranks' gradients, so that N ranks with batch size B train the model that one process trains
    with batch size N*B. With one process it changes nothing. A loss that divides by something else
    than the number of samples (class weights, tokens that count) is a mean of means then: where
    that matters, sum it, and divide by the mean over ranks of the divisor, :func:`hvkit.average`.

    A loss that is itself a sum over samples (``reduction="sum"``) grows with the batch, and the
    mean of N ranks' sums is 1/N of the sum that one process has. Take a mean, or multiply the sum
    by the number of ranks: ``(loss * hvkit.size()).backward()`` in PyTorch,
    ``model.compile(..., loss_weights=float(hvkit.size()))`` in Keras. Adam hardly notices; SGD,
    clipping and weight decay do.

    In PyTorch the gradients are averaged when ``loss.backward()`` returns. Parameters that some
    ranks did not use count as zero there; those that no rank used keep a gradient of None. In
    Keras the gradients are averaged inside ``optimizer.apply``, which ``fit`` and
    ``apply_gradients`` call. A Keras model that has no weights yet gets rank 0's in its first
    call, which every rank has to make.

    Random numbers stay each rank's own: seed with ``seed + hvkit.rank()``, so that dropout,
    augmentation and environments differ between ranks. The start needs no equal seeds, since every
    rank gets rank 0's weights. Rank 0 warns if all ranks compute the same gradients in the first
    step. Weights that some ranks load or change alone after the call are an error; what belongs to
    one rank goes into a buffer or a non-trainable variable. A copy of the model, as by
    ``copy.deepcopy``, is not distributed. In PyTorch an optimizer that was not
    passed must not update the model, nor may ``torch.distributed`` train it as well.

    What a rank measures in its own loop stays its own: average a validation loss with
    :func:`hvkit.average` before a scheduler or an early stop decides by it. In Keras ``fit`` and
    ``evaluate`` give the metrics of all ranks, and every rank has to call them. The states of
    metrics are added up, as totals, counts and confusion matrices are; variables of a metric of
    your own that do not add up need another ``aggregation`` in ``add_variable``.

    The learning rate is yours: what you set in the optimizer, what schedulers and callbacks read
    and write, before or after the call, and what checkpoints hold, is never changed. By default
    updates use it as it is, as one process with the N times larger batch would. Scaling and
    warm-up multiply it inside the update, and nowhere else. Rank 0 says in one line what a step
    uses.

    Args:
        model: a ``torch.nn.Module`` or a ``keras.Model`` (Keras 3 on TensorFlow).
        optimizer: a ``torch.optim.Optimizer`` or ``keras.optimizers.Optimizer`` that updates the
            model, or a list or tuple of several, with those of later phases of training.
        lr_scaling: what an update multiplies the learning rate by: ``"none"`` one, ``"linear"``
            the world size, ``"sqrt"`` its square root. The last two are for rates that were chosen
            for one process and one rank's batch. The ``lr`` of LBFGS is never multiplied: it is
            the length of a step that has the right length already, for batches of any size.
        warmup_steps: over so many optimizer steps what an update uses grows linearly from the
            rate of a single process to the whole one; 0 for none. The rate of a single process is
            yours where it is scaled, and else yours divided by the world size. Schedulers and
            ``LearningRateSchedule`` objects go on undisturbed underneath.
        warmup_epochs: the same in epochs, which may be a fraction; needs ``steps_per_epoch``.
        steps_per_epoch: optimizer steps that each rank takes in an epoch.
        accumulate: PyTorch only: gradients add up locally over this many backward passes and are
            averaged over ranks in the last, for scripts that call ``optimizer.step()`` once in so
            many passes. As without hvkit, the script divides the loss by it. Keras has
            ``gradient_accumulation_steps`` on the optimizer.
        compression: ``"fp16"`` or ``"bf16"``: gradients travel between ranks in 16 bits, half the
            bytes, and are still summed in 32. bf16 has the range of float32 and 8 bits of
            precision; fp16 has 11, gradients beyond 65504 become infinite and those below 6e-8
            zero. Only float64 gradients travel as they are.
        batch_norm: ``"average"``: each rank normalises with the statistics of its own batch, and
            the running statistics are averaged over ranks with every update, so that every rank
            evaluates and saves the same model. ``"local"``: they stay each rank's own.
            ``"sync"``: batches are normalised with the statistics of all ranks' batches together,
            as in one process with the larger batch; for small batches, at the cost of a
            collective a layer.
        check_every: compare the ranks' weights in every so many optimizer steps, and raise if they
            are no longer the same. None: only before the first update, in
            :meth:`hvkit.Checkpoint.save`, and in Keras at the end of each epoch of ``fit``. Steps
            are counted as backward passes that an update follows.

    Returns:
        The model and the optimizer (or the list) that were passed in, the same objects.

    Raises:
        TypeError: the model or optimizer is of an unsupported type or of another framework.
        ValueError: an argument has a wrong value, the optimizer does not hold the model's
            parameters, one of them was passed to an earlier call, or a layer cannot be
            synchronised.
        RanksDisagreeError: the ranks' models, optimizers or arguments differ. Later, in
            ``backward``, an update, ``fit`` or a save: their weights do, since some ranks loaded
            or changed theirs alone; in PyTorch, also their learning rates or frozen parameters.
        HorovodNotFoundError: several ranks were launched, but there is no usable Horovod.
    """
    runtime.init(framework_of(model))
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    adapter: Adapter | None = None
    options: Options | None = None
    problem: Exception | None = None
    multiplier = Multiplier()
    try:
        options = Options(
            accumulate=_count("accumulate", accumulate, 1),
            warmup_steps=_warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch),
            compression=_one_of("compression", compression, COMPRESSIONS),
            batch_norm=_one_of("batch_norm", batch_norm, BATCH_NORMS),
            check_every=(None if check_every is None else _count("check_every", check_every, 1)),
        )
        multiplier = make_multiplier(lr_scaling, runtime.size(), options.warmup_steps)
        if not optimizers:
            raise ValueError(f"optimizer must hold at least one optimizer, got {optimizer!r}")
        adapter = adapter_for(model, optimizers, options)
        _refuse_second_call(model, optimizers)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = error
    raise_together(problem)
    assert adapter is not None
    assert options is not None
    records = [(each, Record()) for each in optimizers]
    if runtime.size() > 1:
        arguments = f"lr_scaling={lr_scaling}, {options}"
        require_equal(
            "model or call",
            [type(model).__name__, arguments, *adapter.facts()],
            "build the same model and optimizer, and pass the same arguments, on every rank",
        )
        adapter.synchronise()
        rates = adapter.scale_learning_rate(multiplier)
        records = adapter.average_gradients()
        if runtime.rank() == 0:
            said = describe(rates, lr_scaling, runtime.size())
            logger.info(f"{runtime.size()} ranks; {said}")
    record(model, records)
    return model, optimizer


def _count(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if (count := int(value)) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return count


def _one_of(name: str, value: object, accepted: tuple[str, ...]) -> str:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}; got {value!r}")
    return str(value)


def _warmup_steps(steps: int, epochs: float, steps_per_epoch: int | None) -> int:
    """The length of the warm-up in optimizer steps, from whichever way it was given."""
    steps = _count("warmup_steps", steps, 0)
    if steps_per_epoch is not None:
        steps_per_epoch = _count("steps_per_epoch", steps_per_epoch, 1)
    if isinstance(epochs, bool) or not isinstance(epochs, Real):
        raise TypeError(f"warmup_epochs must be a number, got {epochs!r}")
    if not 0 <= epochs < math.inf:
        raise ValueError(f"warmup_epochs must be a finite number from 0, got {epochs!r}")
    if not epochs:
        return steps
    if steps:
        raise ValueError(
            f"warmup_steps={steps} and warmup_epochs={epochs:g} were both given: choose one"
        )
    if steps_per_epoch is None:
        raise ValueError(
            f"warmup_epochs={epochs:g} needs steps_per_epoch, the optimizer steps that a rank "
            "takes in an epoch: steps_per_epoch=len(loader) for a sharded loader"
        )
    return round(epochs * steps_per_epoch)


def _refuse_second_call(model: object, optimizers: Sequence[object]) -> None:
    for role, thing in (("model", model), *(("optimizer", each) for each in optimizers)):
        if is_distributed(thing):
            raise ValueError(
                f"this {role} ({type(thing).__name__}) was passed to hvkit.distribute before; "
                "call it once for each model, with all of its optimizers, also those of later "
                "phases of training: distribute(model, [first, second])"
            )
