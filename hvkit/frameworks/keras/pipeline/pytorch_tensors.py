"""What a pipeline does with tensors of PyTorch, as ``tensorflow_tensors`` does with TensorFlow's.

Gradients go to the ``grad`` of variables, as ``backward()`` leaves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch

COMPILER = "torch.compile"


def in_graph() -> bool:
    """Whether ``torch.compile`` traces the call, in which nothing can be sent."""
    return torch.compiler.is_compiling()


def is_recording() -> bool:
    """Whether the script may want gradients of what is computed now."""
    return torch.is_grad_enabled()


def is_dense(value: Any) -> bool:
    """Whether this is a tensor that can be divided into micro-batches."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is."""
    return run


def wants_gradient(tensor: Any) -> bool:
    """Whether the script asks for the gradient of an input."""
    return bool(torch.is_grad_enabled() and tensor.requires_grad)


@contextmanager
def unwatched(variables: Sequence[Any]) -> Iterator[None]:
    """Nothing to do: what a stage records ends at its own inputs."""
    yield


def recorded(run: Callable[[], Any], watched: Sequence[Any]) -> tuple[Any, Callable[..., Any]]:
    """What a function returns, and what gives gradients of it.

    Args:
        run: computes tensors.
        watched: the backend's variables, and tensors that the function uses.

    Returns:
        The second is called with some of the tensors and their gradients. It returns those of what
        is watched, None for what has none.
    """
    for each in watched:
        each.requires_grad_()
    with torch.enable_grad():
        results = run()

    def gradients(targets: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        pairs = [(t, g) for t, g in zip(targets, given, strict=True) if t.requires_grad]
        if not pairs or not watched:
            return [None] * len(watched)
        found = torch.autograd.grad(
            [t for t, _ in pairs], list(watched), [g for _, g in pairs], allow_unused=True
        )
        return list(found)

    return results, gradients


class _Operation(torch.autograd.Function):
    """Connects results with the variables that they depend on."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[Any], backward: Any, *variables: Any) -> Any:
        ctx.of_variables = backward
        found = tuple(t.detach().view_as(t) for t in results)
        ctx.mark_non_differentiable(*(t for t in found if not t.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return None, None, *ctx.of_variables(given)


def connected(
    results: Sequence[Any], variables: Sequence[Any], backward: Callable[[Sequence[Any]], list[Any]]
) -> list[Any]:
    """The tensors as results of an operation on all these variables of Keras.

    Args:
        results: computed apart.
        variables: that are trained.
        backward: gives the gradients of the variables, from those of the results.
    """
    values = (v._value for v in variables)
    return list(_Operation.apply(results, backward, *values))  # type: ignore[no-untyped-call]


def added(a: Any, b: Any) -> Any:
    """The sum of two gradients, each of which may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def norm_of(gradient: Any) -> float:
    """The norm of a gradient, in float64: squares of float32 may overflow."""
    return float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64))


def add_gradients(
    variables: Sequence[Any], gradients: Sequence[Any], begin: Callable[[], Callable[[], None]]
) -> list[Any]:
    """Add gradients to those that variables of Keras hold, and return what they hold then.

    Args:
        variables: of Keras.
        gradients: None for what has none.
        begin: called before, and what it returns afterwards: it may average what they hold.
    """
    end = begin()
    pairs = [(v._value, g) for v, g in zip(variables, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])
    end()
    return [v._value.grad for v in variables]


def remainder(variable: Any, total: Any) -> Any:
    """What to return for a variable from a backward pass, so that the script finds the total."""
    held = variable._value.grad
    if total is held or total is None:
        return None
    return total if held is None else total - held


def placeholder_of(variable: Any) -> Any:
    """What stands for the values of a variable that other ranks hold.

    It has one element, as the norm that stands for the gradient: not a number, for scripts that
    compute with weights which are not there.
    """
    kind = variable._dtype
    value = math.nan if keras.backend.is_float_dtype(kind) else 0
    return keras.ops.full((1,), value, kind)


def values_for(variable: Any, array: Any) -> Any:
    """An array, as ``hold`` takes it."""
    return keras.ops.convert_to_tensor(array)


def hold(variable: Any, values: Any) -> None:
    """Let a variable of Keras hold a placeholder, or values; the parameter stays the same."""
    if variable._value is None:
        variable._initialize(values)
    else:
        variable._value.data = values
        variable._value.grad = None
