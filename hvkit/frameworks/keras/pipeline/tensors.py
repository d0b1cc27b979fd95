"""Operations that differ between backends of Keras, and messages through the host's memory."""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops
from keras.src import backend
from numpy.typing import NDArray

from hvkit import runtime
from hvkit.communication.collectives import open_mailbox
from hvkit.frameworks.keras.backends import numpy_dtype
from hvkit.mesh import MeshOptions
from hvkit.pipeline.messages import Channel, TensorSpec
from hvkit.transport.mailbox import Mailbox

_tags = itertools.count()


@functools.cache
def _mailbox() -> Mailbox:
    """The mailbox of all models; the first call is a collective of all ranks."""
    return open_mailbox("a pipeline of Keras models")


class MailboxChannel(Channel):
    """Sends through the host's memory, by hvkit's mailbox."""

    def __init__(self, ranks: Sequence[int], name: str) -> None:
        super().__init__(ranks, runtime.rank(), name)
        self._mailbox, self._tag = _mailbox(), next(_tags)

    def start(self, data: Any, to: int) -> Callable[[], object]:
        array = np.ascontiguousarray(ops.convert_to_numpy(data)).reshape(-1).view(np.uint8)
        sending = self._mailbox.start_to_send(array, self.ranks[to], self._tag, "activations")
        return functools.partial(self._mailbox.finish, sending)

    def expect(self, spec: TensorSpec, source: int) -> Callable[[], Any]:
        dtype = numpy_dtype(spec.dtype)

        def wait() -> Any:
            data = self.bytes_from(source, math.prod(spec.shape) * dtype.itemsize)
            return ops.convert_to_tensor(data.view(dtype).reshape(spec.shape), spec.dtype)

        return wait

    def bytes_from(self, source: int, size: int) -> NDArray[np.uint8]:
        data = np.empty(size, np.uint8)
        self._mailbox.receive(data, self.ranks[source], self._tag)
        return data

    def spec_of(self, tensor: Any) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), backend.standardize_dtype(tensor.dtype))


Gradients = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""Computes gradients of what was watched, from some results and the gradients of these."""


class Tensors(ABC):
    """What differs between Keras's backends; by default variables hold no gradients."""

    @abstractmethod
    def channel(self, mesh: MeshOptions, name: str) -> Channel:
        """A channel to the other ranks of this pipeline; a collective of all ranks."""

    @abstractmethod
    def tracer(self) -> str:
        """The name of a function that traces this call into a graph; empty if none does."""

    @abstractmethod
    def is_recording(self) -> bool:
        """Whether the script may want gradients of what is computed now."""

    @abstractmethod
    def is_dense(self, value: Any) -> bool:
        """Whether this is a tensor that can be divided into micro-batches."""

    def compiled(self, run: Callable[..., Any], variables: Sequence[Any]) -> Callable[..., Any]:
        """Compile a stage, if the backend can, which tapes of the script then do not record."""
        return run

    @abstractmethod
    def recorded(self, run: Callable[[], Any], watched: Sequence[Any]) -> tuple[Any, Gradients]:
        """Call a function; return its results, and what computes the gradients of ``watched``."""

    @abstractmethod
    def connected(
        self,
        results: Sequence[Any],
        variables: Sequence[Any],
        backward: Callable[[Sequence[Any]], list[Any]],
    ) -> list[Any]:
        """Let autograd see results of one operation on variables, with this ``backward``."""

    def sum_of(self, a: Any, b: Any) -> Any:
        """The sum of two gradients, each of which may be row-sparse."""
        return a + b

    @abstractmethod
    def norm_of(self, gradient: Any) -> float:
        """The norm of a gradient, in float64: squares of float32 may overflow."""

    def add_gradients(
        self,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        begin: Callable[[], Callable[[], None]],
    ) -> list[Any]:
        """Return sums with the gradients that variables hold; ``begin`` returns what ends it."""
        return list(gradients)

    def remainder(self, variable: Any, total: Any) -> Any:
        """The gradient to return to autograd for a variable, so that the script gets the total."""
        return total

    @abstractmethod
    def placeholder_of(self, variable: Any) -> Any:
        """Stands for the values of a variable that another rank holds."""

    @abstractmethod
    def set_value(self, variable: Any, values: Any) -> None:
        """Give a variable of Keras an array, or a placeholder."""
