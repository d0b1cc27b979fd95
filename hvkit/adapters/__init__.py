"""One sub-package a framework, behind one small protocol.

An adapter is made for one call of :func:`hvkit.distribute`. TensorFlow and PyTorch are imported
only when the model handed in is theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvkit.learning_rate import Multiplier
from hvkit.registry import Record


@dataclass(frozen=True)
class Options:
    """The keyword arguments of :func:`hvkit.distribute` that adapters act on."""

    accumulate: int
    warmup_steps: int
    compression: str
    batch_norm: str
    check_every: int | None


COMPRESSIONS = ("none", "fp16", "bf16")
BATCH_NORMS = ("average", "local", "sync")


class Adapter(Protocol):
    """What :func:`hvkit.distribute` does to a model and its optimizers, in the order of the calls.

    The constructor checks its arguments and raises TypeError or ValueError; it uses no collective.
    """

    framework: str
    """``"torch"`` or ``"tensorflow"``: the engine it runs on."""

    def facts(self) -> Sequence[str]:
        """One line for every parameter and optimizer: what all ranks must have alike."""

    def synchronise(self) -> None:
        """Give every rank rank 0's weights and optimizer state, bit for bit."""

    def scale_learning_rate(self, multiplier: Multiplier) -> list[tuple[float, Multiplier | None]]:
        """From now on every update uses multiplied learning rates.

        Returns each of the user's rates with what multiplies it, None for a step length.
        """

    def average_gradients(self) -> list[tuple[Any, Record]]:
        """From now on every update uses the mean over ranks of the gradients.

        Returns what was done to each optimizer.
        """


def framework_of(model: object) -> str | None:
    """``"torch"`` or ``"tensorflow"`` for a model of theirs, None for any other object."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.Model):
        return "tensorflow"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return "torch"
    return None


def adapter_for(model: Any, optimizers: Sequence[Any], options: Options) -> Adapter:
    """The adapter for a model that one of the frameworks knows.

    Raises:
        TypeError: the model is of no supported framework, or an optimizer is of another one.
        ValueError: an argument has a wrong value.
    """
    framework = framework_of(model)
    if framework == "tensorflow":
        from hvkit.adapters.keras import KerasAdapter

        return KerasAdapter(model, optimizers, options)
    if framework == "torch":
        from hvkit.adapters.pytorch import PyTorchAdapter

        return PyTorchAdapter(model, optimizers, options)
    hint = ""
    if type(model).__module__.startswith("tf_keras"):
        hint = " (tf_keras is Keras 2; unset TF_USE_LEGACY_KERAS and use Keras 3)"
    raise TypeError(
        "model must be a torch.nn.Module or a keras.Model, "
        f"got {type(model).__module__}.{type(model).__qualname__}{hint}"
    )
