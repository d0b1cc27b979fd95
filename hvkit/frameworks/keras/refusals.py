"""Refuses updates of a distributed model that cannot work.

An optimizer that was not passed to ``distribute`` averages nothing, so the ranks would silently
train different models: ``compile`` may get another optimizer, a second phase of training may make a
new one, and a ``train_step`` may have its own. All of them call the ``apply`` of the base class, so
the check is there. In the same way, ``fit`` of the base class refuses a model that was not passed
but contains one that was: nothing would share its metrics, files and decisions.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import keras

from hvkit.frameworks.keras.backends import backend_variable, not_converted
from hvkit.frameworks.keras.initial_state import has_weights
from hvkit.frameworks.keras.loss_checks import warn_of_own_count
from hvkit.frameworks.keras.optimizers import inner_optimizer, is_overwritten, parts_of, updating
from hvkit.main_rank import warn_once
from hvkit.strategies.parameter_server import ParameterServer
from hvkit.strategies.strategy import Averaging, Rounds
from hvkit.sync.port import Options, warn_of_own_models

_models: WeakSet[Any] = WeakSet()
_averaged: WeakSet[Any] = WeakSet()
# Optimizers in which Horovod's DistributedOptimizer averages.
_averaged_by_horovod: WeakSet[Any] = WeakSet()
# Models and optimizers whose variables differ between ranks until a round ends.
_differing: WeakSet[Any] = WeakSet()
# Weights that an averaged optimizer has updated, by id. They may outlive their model, in another
# one. A WeakSet cannot hold them: variables compare by value.
_updated: WeakValueDictionary[int, Any] = WeakValueDictionary()


def refuse_optimizers(models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
    """Raise for optimizers and options with which models of Keras cannot be kept in step."""
    for each in optimizers:
        _refuse_foreign(each)
    _refuse_optimizers_of_others(models, optimizers)
    if isinstance(options.strategy, Rounds | ParameterServer):
        for each in updating(optimizers):
            if each.use_ema:
                raise ValueError(
                    f"{type(each).__name__} has use_ema=True, with which each rank would end fit "
                    f"with averages of its own weights under {options.strategy}: leave use_ema "
                    "out, or use hvkit.Synchronous()"
                )
    if options.on_nonfinite != "ignore":
        _refuse_scaled_or_accumulated(options, models, optimizers)


def refuse_loss_scale(options: Options, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Raise for options that exclude a loss scale, where Keras runs on PyTorch."""
    scaled = _source_of_loss_scale(models, optimizers)
    advice = 'train in "mixed_bfloat16", without a LossScaleOptimizer'
    if scaled and isinstance(strategy := options.strategy, Rounds):
        raise ValueError(
            f"{strategy} ends rounds after equally many updates on every rank, but {scaled}, which "
            f"skips updates that overflow on one rank: with Keras on PyTorch, {advice}"
        )
    if (
        scaled
        and isinstance(strategy := options.strategy, Averaging)
        and (travels := strategy.gradient_compression(options.compression))
        and travels.keeps_state
    ):
        raise ValueError(
            f"{travels} adds what earlier steps have not sent to the gradients of this one, but "
            f"{scaled}, which scales each step's differently: {advice}, or choose a compression "
            "without residuals"
        )


def _source_of_loss_scale(models: Sequence[Any], optimizers: Sequence[Any]) -> str:
    """The source of a loss scale, for messages; empty if there is none."""
    if any(isinstance(each, keras.optimizers.LossScaleOptimizer) for each in optimizers):
        return "there is a LossScaleOptimizer"
    for model in models:
        if model.dtype_policy.name == "mixed_float16":
            return f"compile makes a LossScaleOptimizer for model {model.name!r} (mixed_float16)"
    return ""


def _refuse_scaled_or_accumulated(
    options: Options, models: Sequence[Any], optimizers: Sequence[Any]
) -> None:
    asked = f"on_nonfinite={options.on_nonfinite!r}"
    if scaled := _source_of_loss_scale(models, optimizers):
        raise ValueError(
            f"{asked}: {scaled}, which skips steps whose gradients overflow, and needs them to set "
            'its scale: use on_nonfinite="ignore"'
        )
    if any(each.gradient_accumulation_steps for each in optimizers):
        raise ValueError(
            f"{asked}: an optimizer with gradient_accumulation_steps would add NaN to what it has "
            'accumulated: use on_nonfinite="ignore"'
        )


def _refuse_foreign(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        hint, class_name = "", f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        if isinstance(optimizer, str):
            hint = f"; make the object with keras.optimizers.get({optimizer!r})"
        elif class_name.startswith("torch.optim."):
            hint = (
                ": one of PyTorch updates models of KERAS_BACKEND=torch only, not in a pipeline, "
                "and not beside optimizers of Keras in one call"
            )
        raise TypeError(
            "optimizer of a Keras model must be a keras.optimizers.Optimizer, or a list of them, "
            f"got {optimizer!r:.40} of type {class_name}{hint}"
        )
    inner = inner_optimizer(optimizer)
    if inner in _averaged_by_horovod:
        raise ValueError(
            f"{type(inner).__name__} {inner.name!r} is a DistributedOptimizer of Horovod, which "
            "averages already: pass the plain optimizer to hvkit.distribute"
        )
    if not parts_of(inner):
        raise ValueError(
            f"{type(inner).__name__} {inner.name!r} has made no optimizers yet: call its "
            "build(model.trainable_variables) before hvkit.distribute"
        )


def is_averaged_by_horovod(optimizer: Any) -> bool:
    return optimizer in _averaged_by_horovod


def note_averaged_by_horovod(optimizer: Any) -> None:
    """Note that Horovod's ``DistributedOptimizer`` averages in this optimizer's updates."""
    name = f"{type(optimizer).__name__} {optimizer.name!r}"
    if optimizer in _averaged:
        raise ValueError(
            f"hvkit.distribute averages the gradients of {name}: leave hvd.DistributedOptimizer out"
        )
    if optimizer in _averaged_by_horovod:
        raise ValueError(
            f"{name} is a DistributedOptimizer already: call hvd.DistributedOptimizer once for "
            "each optimizer"
        )
    _averaged_by_horovod.add(optimizer)


def _refuse_optimizers_of_others(models: Sequence[Any], optimizers: Sequence[Any]) -> None:
    inner = [inner_optimizer(each) for each in optimizers]
    trained = [v for model in models for v in model.trainable_variables]
    if not trained or not all(map(has_weights, models)) or not all(each.built for each in inner):
        return
    updated = {id(v) for each in inner for v in each._trainable_variables}
    if not any(id(v) in updated for v in trained):
        names = ", ".join(repr(each.name) for each in inner)
        raise ValueError(
            f"optimizer {names} was built for {len(updated)} other variables, none of them of "
            f"model {', '.join(repr(model.name) for model in models)}: make a new optimizer for "
            "this model"
        )


def refuse_overwritten(strategy: object, variables: Sequence[Any]) -> None:
    """Raise for local weights if an update overwrites variables with their gradients."""
    if not isinstance(strategy, Rounds | ParameterServer):
        return
    for each in variables:
        if is_overwritten(each):
            raise ValueError(
                f"{each.path} is overwritten in each update, as the scales of float8 are: ranks "
                f"need the largest of all ranks' values, and {strategy} would average them: use "
                "hvkit.Synchronous()"
            )


def refuse_other_optimizers(model: Any, optimizers: Sequence[Any]) -> None:
    """Let only these optimizers, and optimizers of earlier calls, update the model from now on."""
    note_distributed(model)
    _averaged.update(optimizers)
    watch_updates()
    call_before("fit", _refuse_fit_around)


def note_distributed(model: Any) -> None:
    """Warn of models around this one that report metrics of a rank's own, from now on."""
    _models.add(model)
    call_before("evaluate", _warn_of_evaluate_around)


def refuse_left_out(
    models: Sequence[Any], optimizers: Sequence[Any], variables: Iterable[Any]
) -> list[Any]:
    """Raise for variables of a layer or model that was not passed and has a state of its own.

    Where it has none, rank 0 only warns; returned are the layers or models of which it warns. A
    variable does not know its layer, so this looks at all objects of the process: call it for new
    variables only.
    """
    own = {id(backend_variable(w)) for model in models for w in model.weights}
    others = {id(backend_variable(v)) for v in variables} - own
    if not others:
        return []
    # PyTorch's optimizers have no names.
    names = ", ".join(repr(getattr(each, "name", type(each).__name__)) for each in optimizers)
    passed = {id(part) for model in models for part in model._flatten_layers()}
    found = _largest_with(others, passed)
    for layer in found:
        class_name, parts = type(layer).__name__, layer._flatten_layers()
        text = (
            f"optimizer {names} also updates {class_name} {layer.name!r}, which was not passed "
            "to hvkit.distribute"
        )
        fix = "pass all models that it updates: hvkit.distribute([encoder, decoder], optimizer)"
        if any(part._non_trainable_variables for part in parts):
            raise ValueError(
                f"{text}, so that nothing takes care of its batch norm or other statistics: {fix}"
            )
        warn_once(f"left out {class_name}", f"{text} with it; {fix}")
    return found


def _largest_with(numbers: set[int], passed: set[int]) -> list[Any]:
    """The largest layers or models with any of these variables that contain none of the passed."""
    not_passed = [
        each for each in living_layers() if passed.isdisjoint(map(id, each._flatten_layers()))
    ]
    inside = {id(part) for each in not_passed for part in each._flatten_layers(include_self=False)}
    inside |= {id(getattr(each, "_functional", None)) for each in not_passed}  # of a Sequential
    return [
        each
        for each in not_passed
        if id(each) not in inside
        and not numbers.isdisjoint(id(backend_variable(v)) for v in each.trainable_variables)
    ]


def living_layers() -> list[Any]:
    layers = (each for each in gc.get_objects() if issubclass(type(each), keras.layers.Layer))
    return [each for each in layers if hasattr(each, "_layers")]  # not before its __init__


def let_differ(models: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Let the variables of models and their optimizers differ between ranks."""
    _differing.update([*models, *optimizers])


def was_passed(model: Any) -> bool:
    return model in _models


def is_distributed(model: Any) -> bool:
    """Whether the model was passed to ``distribute``, or contains one that was."""
    return any(part in _models for part in model._flatten_layers())


def stays_the_same(optimizer: Any) -> bool:
    """Whether every update keeps this optimizer the same on all ranks, and it scales no loss."""
    return optimizer in _averaged and optimizer not in _differing


def remember_updated(variables: Iterable[Any]) -> None:
    """Let only averaged optimizers update these variables, also once their model is gone."""
    _updated.update((id(each), each) for each in variables)


def weights_of_distributed() -> set[int]:
    """The ids of the weights of distributed models that are the same on all ranks."""
    differing = {id(w) for model in _models if model in _differing for w in model.weights}
    return weights_of_models().union(_updated) - differing


def weights_of_models() -> set[int]:
    return {id(w) for model in _models for w in model.weights}


def watch_updates() -> None:
    """Check at each update that its optimizer averages."""
    call_before_updates(_require_averaged)


@functools.cache
def call_before_updates(check: Callable[[Any, Sequence[Any]], None]) -> None:
    """Call a function with the optimizer and its variables before each update of any optimizer."""
    base = keras.optimizers.Optimizer
    apply = base.apply

    @not_converted
    @functools.wraps(apply)
    def checked(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        given: Any = None if trainable_variables is None else list(trainable_variables)
        check(self, given or getattr(self, "_trainable_variables", []))
        return apply(self, grads, given)

    base.apply = checked


def _require_averaged(optimizer: Any, variables: Sequence[Any]) -> None:
    warn_of_own_count(optimizer in _averaged)
    if optimizer in _averaged:
        return
    described = f"{optimizer.name!r} ({type(optimizer).__name__})"
    ids = {id(v) for v in variables}
    of = [m for m in _models if any(id(w) in ids for w in m.trainable_variables)]
    if of or not ids.isdisjoint(_updated):
        model = f"model {of[0].name!r}" if of else "weights of a distributed model"
        raise ValueError(
            f"optimizer {described} updates {model}, but was not passed to hvkit.distribute, so "
            "the ranks would train apart: use the optimizer that was passed, and pass optimizers "
            "of later phases in the same call: distribute(model, [first, second])"
        )
    if of_layers(variables) and optimizer not in _averaged_by_horovod:
        warn_of_own_models(described)


def of_layers(variables: Sequence[Any]) -> list[Any]:
    """Those that layers have made: others, such as an input that is optimised, have no folder."""
    return [v for v in variables if "/" in getattr(v, "path", "")]


@functools.cache
def call_before(name: str, check: Callable[[Any, str], None]) -> None:
    """Call a function with the model and ``name`` before this method of any model of Keras."""
    method = getattr(keras.Model, name)

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, name)
        return method(self, *args, **kwargs)

    setattr(keras.Model, name, checked)


def _refuse_fit_around(model: Any, name: str) -> None:
    if names := names_of_distributed(model, model.trainable_variables):
        raise ValueError(
            f"{name} of model {model.name!r} would train {names}, passed to hvkit.distribute, but "
            f"{model.name!r} was not passed: each rank would report metrics of its own, write "
            "the same files and stop by itself. Pass the model that fits, with all optimizers, "
            "in place of its parts: hvkit.distribute(gan, [g_optimizer, d_optimizer])"
        )


def _warn_of_evaluate_around(model: Any, name: str) -> None:
    if names := names_of_distributed(model, model.weights):
        warn_once(
            "evaluate of a model around",
            f"{name} of model {model.name!r} reports the metrics of each rank's own data: it "
            f"uses {names}, passed to hvkit.distribute, but {model.name!r} was not passed. Pass "
            "it instead, or average what evaluate returns with hvkit.average",
        )


def names_of_distributed(model: Any, variables: Sequence[Any]) -> str:
    """The distributed models with these variables, or without any, in one that was not passed."""
    if was_passed(model):
        return ""
    own, parts = {id(v) for v in variables}, {id(part) for part in model._flatten_layers()}
    found = [
        each.name
        for each in _models
        if any(id(w) in own for w in each.weights) or (id(each) in parts and not each.weights)
    ]
    return ", ".join(map(repr, sorted(found)))
