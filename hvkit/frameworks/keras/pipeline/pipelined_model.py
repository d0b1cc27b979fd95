"""A pipeline under ``fit`` and under loops of a script, which do not know of it.

``model(x)`` runs all stages for all micro-batches, and gives the outputs of the whole batch to
every rank, so that losses and metrics are computed as ever. When the gradients of the script, or of
``fit``, reach these outputs, all stages run backward for all micro-batches.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism" (2019).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src import backend, tree

from hvkit.errors import HvkitError, RankLostError, RanksDisagreeError, ranks_text
from hvkit.frameworks.keras.pipeline.layer_graph import LayerGraph
from hvkit.frameworks.keras.pipeline.model_parts import ModelParts
from hvkit.frameworks.keras.pipeline.penalties import Penalties, penalties_of
from hvkit.frameworks.keras.pipeline.stage import Stage
from hvkit.frameworks.keras.pipeline.stage_messages import StageLinks
from hvkit.frameworks.keras.pipeline.tensors import (
    COMPILER,
    add_gradients,
    added,
    connected,
    in_graph,
    is_dense,
    is_recording,
    norm_of,
    recorded,
    remainder,
    set_mask,
    wants_gradient,
)
from hvkit.frameworks.stage_division import sizes_of

# In the place of a norm: the weight has no gradient.
_NO_GRADIENT = -1.0


# The outputs of a stage, and their masks.
_Results = tuple[list[Any], list[Any]]


@dataclass
class _Computed:
    """What this rank's stage has computed for a micro-batch."""

    received: Any
    outputs: list[Any]
    gradients: Callable[..., list[Any]] | None


@dataclass
class Pass:
    """A forward pass, as backward needs it.

    Attributes:
        sizes: the samples of each micro-batch.
        trained: this rank's weights that get a gradient.
        sends_back: whether the stage before needs a gradient.
        computed: by micro-batch; emptied by backward.
    """

    sizes: list[int]
    trained: list[Any]
    sends_back: bool
    computed: list[_Computed] = field(default_factory=list)


class PipelinedModel:
    """Replaces the ``call`` of a model.

    Args:
        model: with this rank's weights.
        graph: of the model.
        parts: who holds what.
        links: to the ranks of this pipeline.
        microbatches: how many a batch is divided into.
    """

    def __init__(
        self,
        model: keras.Model,
        graph: LayerGraph,
        parts: ModelParts,
        links: StageLinks,
        microbatches: int,
    ) -> None:
        self._model, self._graph, self._parts, self._links = model, graph, parts, links
        self._microbatches = microbatches
        self._rank, self._last = links.rank, len(parts.stages) - 1
        self.stage = Stage(graph, parts.stages, links.rank)
        self._passes = 0
        # Of what fit passes to a step beside the model's inputs.
        self._targets = 0
        # Called before the gradients of a pass are added up, and returns what to call after it.
        self.around_backward: Callable[[], Callable[[], None]] = lambda: _nothing

    def note_targets(self, data: Any) -> None:
        """Compare this data, too, in the next forward pass: a batch of ``fit`` or ``evaluate``."""
        self._targets = _checksum_of(tree.flatten(data))

    def __call__(
        self, inputs: Any, training: bool | None = None, mask: Any = None, **kwargs: Any
    ) -> Any:
        """The outputs of the whole batch; a collective of the pipeline.

        Raises:
            ValueError: it is called in a graph, with a mask, or with inputs that cannot be divided.
            RanksDisagreeError: the ranks have different batches, or make different calls.
        """
        try:
            return self._call(inputs, training, mask, kwargs)
        except Exception as error:
            # Keras would wrap the message in the values of all inputs.
            vars(error)["_keras_call_info_injected"] = True
            raise

    def _call(self, inputs: Any, training: bool | None, mask: Any, kwargs: dict[str, Any]) -> Any:
        self._refuse_call(mask, kwargs)
        flat = self._graph.functional._standardize_inputs(inputs)
        sizes = self._sizes(flat)
        self._passes += 1
        self._links.step = self._passes
        with self._links.in_call():
            recording = is_recording()
            self._require_same_batch(flat, recording, training)
            done, outputs, masks = self._forward(flat, sizes, recording, training)
            penalties = penalties_of(self._model, self._parts, self._links)
            if recording and self._model.trainable_variables:
                outputs = self._connected(done, outputs, penalties)
                outputs, penalties.values = outputs[: len(masks)], outputs[len(masks) :]
            self._model._losses_override[:] = penalties.values
        for t, each in zip(outputs, masks, strict=True):
            if each is not None:
                set_mask(t, each)
        return self._structured(outputs)

    def _structured(self, outputs: list[Any]) -> Any:
        found = tree.pack_sequence_as(self._graph.functional._outputs_struct, outputs)
        single = isinstance(found, list | tuple) and len(found) == 1
        return found[0] if single else found

    def _refuse_call(self, mask: Any, kwargs: dict[str, Any]) -> None:
        name = self._model.name
        if in_graph():
            raise ValueError(
                f"model {name!r} is called in a {COMPILER}, but a pipeline sends tensors between "
                f"ranks, which a graph cannot do: leave {COMPILER} out around the call, and fit "
                "needs no change"
            )
        given = {"mask": mask, **kwargs}
        if passed := [k for k, v in given.items() if any(x is not None for x in tree.flatten(v))]:
            raise ValueError(
                f"model {name!r} in a pipeline takes inputs and training=, got {passed[0]}=: make "
                "it one of the model's inputs"
            )

    def _sizes(self, inputs: Sequence[Any]) -> list[int]:
        lengths = set()
        for t in inputs:
            if not is_dense(t) or not len(t.shape):
                raise ValueError(
                    f"inputs of model {self._model.name!r} in a pipeline must be dense tensors "
                    f"with the batch as their first dimension, got {type(t).__name__} {t!r}"
                )
            if wants_gradient(t):
                raise ValueError(
                    f"an input of model {self._model.name!r} requires a gradient, which no rank of "
                    "a pipeline computes: detach it, or call the model before hvkit.distribute"
                )
            lengths.add(int(t.shape[0]))
        if len(lengths) > 1:
            raise ValueError(
                f"inputs of model {self._model.name!r} have first dimensions of {sorted(lengths)}, "
                "but in a pipeline all must have the batch there"
            )
        samples = lengths.pop()
        return sizes_of(samples, max(min(self._microbatches, samples), 1))

    def _require_same_batch(
        self, inputs: Sequence[Any], recording: bool, training: bool | None
    ) -> None:
        """Raise on every rank unless all have the same batch; a collective of the pipeline."""
        kind = [self._passes, recording, training, *((tuple(t.shape), t.dtype) for t in inputs)]
        content, self._targets = _checksum_of(inputs) ^ self._targets, 0
        mine = np.array([zlib.crc32(repr(kind).encode()), content], np.int64)
        found = self._links.gather(mine).tolist()
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                what = "another call" if theirs[0] != found[0][0] else "another batch"
                ranks = self._links.ranks
                raise RanksDisagreeError(
                    f"forward pass {self._passes} of the pipeline of {ranks_text(ranks)}: rank "
                    f"{ranks[rank]} makes {what} than rank {ranks[0]}. Ranks of one pipeline must "
                    "get the same batches in the same order: divide data with "
                    "hvkit.shard(data, mesh=mesh), and where fit shuffles arrays, call "
                    "keras.utils.set_random_seed with the same number, or pass shuffle=False"
                )

    def _forward(
        self, inputs: Sequence[Any], sizes: list[int], recording: bool, training: bool | None
    ) -> tuple[Pass, list[Any], list[Any]]:
        """Run this rank's stage for all micro-batches, and hand the outputs to all ranks.

        Raises:
            HvkitError: another rank could not compute its stage.
        """
        trained = [v for v in self._model.trainable_variables if self._parts.holds(v)]
        before = any(self._holder(v) < self._rank for v in self._model.trainable_variables)
        done = Pass(sizes, trained, before)
        try:
            found = self._run_all(done, inputs, recording, training)
        except RankLostError:
            raise
        except Exception as error:
            self._hand_on(error)
            raise
        return done, *self._on_all_ranks(found)

    def _run_all(
        self, done: Pass, inputs: Sequence[Any], recording: bool, training: bool | None
    ) -> list[_Results]:
        """Run this rank's stage for all micro-batches; return the outputs on the last rank."""
        columns = [_split(t, done.sizes) for t in inputs]
        found: list[_Results] = []
        for i in range(len(done.sizes)):
            row = [column[i] for column in columns]
            received, mask = self._links.receive(self._rank - 1) if self._rank else (None, None)
            records = recording and bool(done.trained or done.sends_back)
            (outputs, masks), gradients = self._run(received, mask, row, training, done, records)
            if self._rank < self._last:
                self._links.send([*outputs, *masks], self._rank + 1)
            else:
                found.append((outputs, masks))
            if recording:
                done.computed.append(_Computed(received, outputs, gradients))
        self._links.flush()
        return found

    def _hand_on(self, error: Exception) -> None:
        """Have the other ranks raise an error that this rank's stage has raised."""
        text = str(error)
        if not isinstance(error, HvkitError):
            rank = self._links.ranks[self._rank]
            text = f"rank {rank} has raised {type(error).__name__} in its stage: {text}"
        if self._rank == self._last:
            for to in range(self._last):
                self._links.send_error(text, to)
        else:
            self._links.send_error(text, self._rank + 1)
        self._links.flush()
        if self._rank < self._last:  # the last rank answers with the same, in place of outputs
            with contextlib.suppress(HvkitError):
                self._links.receive(self._last)

    def _run(
        self,
        received: Any,
        mask: Any,
        inputs: list[Any],
        training: bool | None,
        done: Pass,
        records: bool,
    ) -> tuple[_Results, Callable[..., list[Any]] | None]:
        """A micro-batch through this rank's stage, and what gives gradients of it."""
        if not records:
            return self.stage(received, mask, inputs, training), None
        watched = [v._value for v in done.trained]
        if done.sends_back and received is not None and _is_float(received):
            watched.append(received)
        return recorded(lambda: self.stage(received, mask, inputs, training), watched)

    def _on_all_ranks(self, found: list[_Results]) -> tuple[list[Any], list[Any]]:
        """The outputs of the whole batch and their masks, from the last stage."""
        whole = None
        if self._rank == self._last:
            rows = [[*outputs, *masks] for outputs, masks in found]
            whole = [
                None if column[0] is None else ops.concatenate(column, 0)
                for column in zip(*rows, strict=True)
            ]
        joined = self._links.from_rank(self._last, whole)
        count = len(self._graph.outputs)
        return joined[:count], joined[count:]

    def _holder(self, variable: Any) -> int:
        return self._parts.stages.holder(variable)

    def _connected(self, done: Pass, outputs: list[Any], penalties: Penalties) -> list[Any]:
        """Outputs and penalties, for a tape the results of an operation on all weights."""
        variables = self._model.trainable_variables

        def gradients(given: Sequence[Any]) -> list[Any]:
            of_penalties = penalties.gradients(given[len(outputs) :])
            return self._backward(done, variables, given[: len(outputs)], of_penalties)

        return connected([*outputs, *penalties.values], variables, gradients)

    def _backward(
        self,
        done: Pass,
        variables: Sequence[Any],
        of_outputs: Sequence[Any],
        of_penalties: dict[int, Any],
    ) -> list[Any]:
        """The gradients of all trainable variables; a collective of the pipeline.

        Of those of other stages, the norms, as vectors of one element.

        Args:
            done: the forward pass; its tensors are dropped.
            variables: all that are trained, of the whole model.
            of_outputs: the gradients of the model's outputs.
            of_penalties: by the id of a variable of this rank, what to add to its gradient.
        """
        if not done.computed:
            raise RuntimeError(
                "a second gradient through one forward pass of a pipeline, whose stages have "
                "dropped what they had kept of it: add the losses, and take the gradient once"
            )
        with self._links.in_call():
            sums = [of_penalties.get(id(v)) for v in done.trained]
            columns = [_split(g, done.sizes) for g in of_outputs]
            for i in range(len(done.sizes)):
                mine = self._backward_of(done, done.computed[i], [c[i] for c in columns])
                done.computed[i] = _Computed(None, [], None)
                for j in range(len(mine)):  # one after the other, to free what was added up
                    sums[j], mine[j] = added(sums[j], mine[j]), None
            done.computed.clear()
            self._links.flush()
            return self._with_norms(done, variables, sums)

    def _backward_of(self, done: Pass, computed: _Computed, of_outputs: list[Any]) -> list[Any]:
        """The gradients by one micro-batch; sends that of its input to the stage before."""
        if self._rank == self._last:
            given: list[Any] = list(of_outputs)
        elif done.trained or done.sends_back:
            given = self._links.receive(self._rank + 1)
        else:
            return []
        targets = [t for t in computed.outputs if _is_float(t)]
        given = [g for t, g in zip(computed.outputs, given, strict=True) if _is_float(t)]
        received = computed.received
        found: list[Any] = [None] * len(done.trained)
        if computed.gradients is not None and targets:
            found = computed.gradients(targets, given)
        if done.sends_back and received is not None:
            gradient = found.pop() if len(found) > len(done.trained) else None
            back = ops.zeros_like(received) if gradient is None else gradient
            self._links.send([back], self._rank - 1)
        return found

    def _with_norms(self, done: Pass, variables: Sequence[Any], own: list[Any]) -> list[Any]:
        held = add_gradients(done.trained, own, self.around_backward)
        mine = dict(zip(map(id, done.trained), held, strict=True))
        norms = np.zeros(len(variables), np.float64)
        for i, v in enumerate(variables):
            if id(v) in mine:
                gradient = mine[id(v)]
                norms[i] = _NO_GRADIENT if gradient is None else norm_of(gradient)
        everyone = self._links.gather(norms)
        found: list[Any] = []
        for i, v in enumerate(variables):
            norm = everyone[self._holder(v), i]
            if id(v) in mine:
                total = mine[id(v)]
            else:
                missing = norm == _NO_GRADIENT
                total = None if missing else ops.convert_to_tensor([norm], v._dtype)
            found.append(remainder(v, total))
        return found


def _split(tensor: Any, sizes: Sequence[int]) -> list[Any]:
    """The parts of a tensor along its first dimension."""
    if len(sizes) == 1:  # which Keras cannot do
        return [tensor]
    parts: list[Any] = ops.split(tensor, np.cumsum(sizes)[:-1].tolist())
    return parts


def _is_float(tensor: Any) -> bool:
    return bool(backend.is_float_dtype(backend.standardize_dtype(tensor.dtype)))


def _checksum_of(things: Sequence[Any]) -> int:
    """A number for arrays and tensors, the same in every process."""
    found = 0
    for thing in things:
        if thing is None:
            continue
        array = ops.convert_to_numpy(thing) if ops.is_tensor(thing) else np.asarray(thing)
        data = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        found = zlib.crc32(data, found)
    return found


def _nothing() -> None:
    """After a pass without gradients to average."""
