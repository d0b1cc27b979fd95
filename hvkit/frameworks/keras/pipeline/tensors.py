"""What a pipeline does with tensors that is not the same on all of Keras's backends."""

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
from hvkit.communication.mailboxes import open_mailbox
from hvkit.frameworks.keras.backends import numpy_dtype
from hvkit.mesh import MeshOptions
from hvkit.pipeline.channel import Channel, TensorSpec
from hvkit.transport.mailbox import Mailbox

_tags = itertools.count()


@functools.cache
def _mailbox() -> Mailbox:
    """One for all models; the first call is a collective of all ranks."""
    return open_mailbox("a pipeline of Keras models")


class MailboxChannel(Channel):
    """Sends through the host's memory, by hvkit's mailbox.

    Args:
        ranks: of the pipeline, in its order.
        name: of the model.
    """

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


class Tensors(ABC):
    """A backend of Keras."""

    @abstractmethod
    def channel(self, mesh: MeshOptions, name: str) -> Channel:
        """To the other ranks of this pipeline; a collective of all ranks.

        Raises:
            LaunchError: a rank cannot send messages; on every rank, with the fix.
        """

    @abstractmethod
    def tracer(self) -> str:
        """What traces the call for a graph, in which nothing can be sent; empty if nothing does."""

    @abstractmethod
    def is_recording(self) -> bool:
        """Whether the script may want gradients of what is computed now."""

    @abstractmethod
    def is_dense(self, value: Any) -> bool:
        """Whether this is a tensor that can be divided into micro-batches."""

    @abstractmethod
    def compiled(self, run: Callable[..., Any], variables: Sequence[Any]) -> Callable[..., Any]:
        """A stage that uses these variables: faster where the backend can, and not recorded.

        It has a recording of its own, beside which the script's would take time.
        """

    @abstractmethod
    def recorded(
        self, run: Callable[[], Any], watched: Sequence[Any]
    ) -> tuple[Any, Callable[[Sequence[Any], Sequence[Any]], list[Any]]]:
        """What a function returns, and what gives gradients of it.

        That is called with some of the tensors that the function has computed and their gradients.
        It returns those of the variables and tensors that are watched, None for what has none.
        """

    @abstractmethod
    def connected(
        self,
        results: Sequence[Any],
        variables: Sequence[Any],
        backward: Callable[[Sequence[Any]], list[Any]],
    ) -> list[Any]:
        """Tensors that were computed apart, as results of an operation on variables of Keras.

        Args:
            backward: gives the gradients of the variables, from those of the results.
        """

    @abstractmethod
    def sum_of(self, a: Any, b: Any) -> Any:
        """The sum of two gradients, either of which may be of a few rows."""

    @abstractmethod
    def norm_of(self, gradient: Any) -> float:
        """The norm of a gradient, in float64: squares of float32 may overflow."""

    @abstractmethod
    def add_gradients(
        self,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        begin: Callable[[], Callable[[], None]],
    ) -> list[Any]:
        """Add gradients to those that variables of Keras hold, and return what they hold then.

        Args:
            gradients: None for what has none.
            begin: called before, and what it returns afterwards: it may average what they hold.
        """

    @abstractmethod
    def remainder(self, variable: Any, total: Any) -> Any:
        """What a backward pass returns for a variable, so that the script finds the total."""

    @abstractmethod
    def placeholder_of(self, variable: Any) -> Any:
        """What stands for the values of a variable that other ranks hold."""

    @abstractmethod
    def hold(self, variable: Any, values: Any) -> None:
        """Let a variable of Keras hold a placeholder, or an array."""
