"""A pipeline under ``fit`` and under loops of a script, which do not know of it.

``model(x)`` runs all stages for all micro-batches, and returns the outputs of the whole batch on
every rank, so that losses and metrics need no change. When the gradients of the script, or of
``fit``, reach these outputs, all stages run backward for all micro-batches.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src import backend, tree

from hvkit.frameworks.keras.pipeline.layer_graph import LayerGraph, Stage, set_mask, stage_of
from hvkit.frameworks.keras.pipeline.parts import ModelParts
from hvkit.pipeline.gpipe import GPipe, Specs, sizes_of
from hvkit.pipeline.messages import NO_TENSOR, refuse_other_batches

# Sent instead of a norm if the weight has no gradient.
_NO_GRADIENT = -1.0


class StagePass:
    """Computes this rank's stage for one batch, and keeps what the backward pass needs.

    ``results`` are, by micro-batch, the outputs and their masks on the last rank. ``sums`` are the
    gradients of ``trainable`` over micro-batches; None where there is none.
    """

    def __init__(
        self,
        pipelined: PipelinedModel,
        inputs: Sequence[Any],
        sizes: list[int],
        recording: bool,
        training: bool | None,
    ) -> None:
        self.sizes = sizes
        self.results: list[list[Any]] = []
        self.trainable, self.sums = pipelined.own_trainable(), list[Any]()
        self._pipelined, self._tensors = pipelined, pipelined.parts.tensors
        self._columns = [_split(t, sizes) for t in inputs]
        self._recording, self._training = recording, training
        # By micro-batch: received tensors, outputs that get a gradient, what computes gradients.
        self._computed: dict[int, tuple[Any, list[Any], Callable[..., list[Any]] | None]] = {}
        parts = pipelined.parts
        self.order = GPipe(parts.channel, parts.stages.rank_of, [None] * len(sizes))
        self.order.forward(self)
        self._columns.clear()

    def run(
        self, stage: int, microbatch: int, specs: Specs, tensors: list[Any]
    ) -> tuple[Specs, list[Any]]:
        parts = self._pipelined.parts
        received, mask = tensors or (None, None)
        inputs = [column[microbatch] for column in self._columns]
        run = functools.partial(self._pipelined.stage, received, mask, inputs, self._training)
        watched = [v._value for v in self.trainable]
        watched += [received for spec in specs if spec.requires_grad]
        gradients = None
        if self._recording and watched:
            (outputs, masks), gradients = self._tensors.recorded(run, watched)
        else:
            outputs, masks = run()
        targets = [t for t in outputs if gradients is not None and _is_float(t)]
        if self._recording:
            self._computed[microbatch] = watched[len(self.trainable) :], targets, gradients
        results = [*outputs, *masks]
        if stage == len(parts.stages) - 1:
            self.results.append(results)
        with_gradient = set(map(id, targets))
        return [
            NO_TENSOR
            if t is None
            else replace(parts.channel.spec_of(t), requires_grad=id(t) in with_gradient)
            for t in results
        ], results

    def grad(self, stage: int, microbatch: int, gradients: list[Any]) -> list[Any]:
        received, targets, gradients_of = self._computed.pop(microbatch)
        found: list[Any] = [None] * (len(self.trainable) + len(received))
        if gradients_of is not None and targets:
            found = gradients_of(targets, gradients)
        back = [
            ops.zeros_like(t) if g is None else g
            for t, g in zip(received, found[len(self.trainable) :], strict=True)
        ]
        for i, total in enumerate(self.sums):  # one after the other, to free what was added up
            if found[i] is not None:
                self.sums[i] = found[i] if total is None else self._tensors.sum_of(total, found[i])
            found[i] = None
        return back


class PipelinedModel:
    """Replaces a model's ``call``; ``around_backward`` returns what to call after a pass."""

    def __init__(
        self, model: keras.Model, graph: LayerGraph, parts: ModelParts, microbatches: int
    ) -> None:
        self._model, self._graph, self.parts, self._microbatches = model, graph, parts, microbatches
        self._channel, self._tensors = parts.channel, parts.tensors
        self.stage = Stage(graph, parts.stages, parts.channel.rank, parts.tensors)
        # The checksum of the batch that fit has passed to a step, with its targets.
        self._targets = 0
        self.around_backward: Callable[[], Callable[[], None]] = lambda: lambda: None

    def own_trainable(self) -> list[Any]:
        return [v for v in self._model.trainable_variables if self.parts.holds(v)]

    def note_targets(self, data: Any) -> None:
        """Also compare this batch of ``fit`` or ``evaluate`` in the next forward pass."""
        self._targets = _checksum_of(tree.flatten(data))

    def __call__(
        self, inputs: Any, training: bool | None = None, mask: Any = None, **kwargs: Any
    ) -> Any:
        """The outputs of the whole batch; a collective of the pipeline."""
        try:
            return self._call(inputs, training, mask, kwargs)
        except Exception as error:
            # Else Keras adds the values of all inputs to the message.
            vars(error)["_keras_call_info_injected"] = True
            raise

    def _call(self, inputs: Any, training: bool | None, mask: Any, kwargs: dict[str, Any]) -> Any:
        self._refuse_call(mask, kwargs)
        flat = self._graph.functional._standardize_inputs(inputs)
        recording = self._tensors.is_recording()
        sizes = self._sizes(flat, recording)
        self._channel.step += 1
        with self._channel.in_call(), self._channel.times.passing():
            self._require_same_batch(flat, recording, training)
            done = StagePass(self, flat, sizes, recording, training)
            outputs, masks = self._on_all_ranks(done)
            penalties, of_penalties = self._penalties()
            if recording and self._model.trainable_variables:
                both = self._connected(done, outputs, penalties, of_penalties)
                outputs, penalties = both[: len(masks)], both[len(masks) :]
            self._model._losses_override[:] = penalties
        for t, each in zip(outputs, masks, strict=True):
            if each is not None:
                set_mask(t, each)
        found = tree.pack_sequence_as(self._graph.functional._outputs_struct, outputs)
        single = isinstance(found, list | tuple) and len(found) == 1
        return found[0] if single else found

    def _refuse_call(self, mask: Any, kwargs: dict[str, Any]) -> None:
        name = self._model.name
        if tracer := self._tensors.tracer():
            raise ValueError(
                f"model {name!r} is called in a {tracer}, but a pipeline sends tensors between "
                f"ranks, which a graph cannot do: leave {tracer} out around the call, and fit "
                "needs no change"
            )
        given = {"mask": mask, **kwargs}
        if passed := [k for k, v in given.items() if any(x is not None for x in tree.flatten(v))]:
            raise ValueError(
                f"model {name!r} in a pipeline takes inputs and training=, got {passed[0]}=: make "
                "it one of the model's inputs"
            )

    def _sizes(self, inputs: Sequence[Any], recording: bool) -> list[int]:
        lengths = set()
        for t in inputs:
            if not self._tensors.is_dense(t) or not len(t.shape):
                raise ValueError(
                    f"inputs of model {self._model.name!r} in a pipeline must be dense tensors "
                    f"with the batch as their first dimension, got {type(t).__name__} {t!r}"
                )
            if recording and getattr(t, "requires_grad", False):
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
        call = [recording, training, *((tuple(t.shape), t.dtype) for t in inputs)]
        content, self._targets = _checksum_of(inputs) ^ self._targets, 0
        numbers = zlib.crc32(repr([self._channel.step, *call]).encode()), content
        by_rank = dict(zip(self._channel.ranks, self._channel.gather_numbers(numbers), strict=True))
        refuse_other_batches(
            self._channel.step,
            {rank: int(of_rank[0]) for rank, of_rank in by_rank.items()},
            {rank: int(of_rank[1]) for rank, of_rank in by_rank.items()},
            "hvkit.shard(data, mesh=mesh), and where fit shuffles arrays, call "
            "keras.utils.set_random_seed with the same number, or pass shuffle=False",
        )

    def _on_all_ranks(self, done: StagePass) -> tuple[list[Any], list[Any]]:
        """The outputs of the whole batch and their masks, from the last stage."""
        whole = [
            None if column[0] is None else ops.concatenate(column, 0)
            for column in zip(*done.results, strict=True)
        ]
        done.results.clear()
        joined = self._channel.from_rank(len(self.parts.stages) - 1, whole)
        count = len(self._graph.outputs)
        return joined[:count], joined[count:]

    def _penalties(self) -> tuple[list[Any], Callable[[Sequence[Any]], dict[int, Any]]]:
        """The regularisation losses of all stages; a collective of the pipeline if there are any.

        Also returns a function that computes from their gradients those of this rank's variables,
        by id.
        """
        variables = [v for v in self._model.trainable_variables if v.regularizer is not None]
        own = {i: v for i, v in enumerate(variables) if self.parts.holds(v)}
        with backend.AutocastScope(None):
            losses, of_losses = self._tensors.recorded(
                lambda: {i: v.regularizer(v) for i, v in own.items()},
                [v._value for v in own.values()],
            )

        def gradients(given: Sequence[Any]) -> dict[int, Any]:
            found = of_losses(list(losses.values()), [given[i] for i in own]) if own else []
            return {id(v): g for v, g in zip(own.values(), found, strict=True)}

        if not variables:
            return [], gradients
        values = np.zeros(len(variables))
        for i, loss in losses.items():
            values[i] = ops.convert_to_numpy(loss)
        found = self._channel.gather_numbers(values)
        stages = self.parts.stages
        return [
            ops.convert_to_tensor(found[stage_of(v, stages), i], v._dtype)
            for i, v in enumerate(variables)
        ], gradients

    def _connected(
        self,
        done: StagePass,
        outputs: list[Any],
        penalties: list[Any],
        of_penalties: Callable[..., Any],
    ) -> list[Any]:
        """Outputs and penalties; a tape sees them as results of one operation on all weights."""
        variables, count = self._model.trainable_variables, len(outputs)

        def gradients(given: Sequence[Any]) -> list[Any]:
            return self._backward(done, variables, given[:count], of_penalties(given[count:]))

        return self._tensors.connected([*outputs, *penalties], variables, gradients)

    def _backward(
        self,
        done: StagePass,
        variables: Sequence[Any],
        of_outputs: Sequence[Any],
        of_penalties: dict[int, Any],
    ) -> list[Any]:
        """The gradients of all trainable variables; a collective of the pipeline.

        For a variable of another stage it returns the norm, as a vector of one element. It drops
        the tensors of the forward pass. ``of_penalties`` has, by the id of a variable of this rank,
        what to add to its gradient.
        """
        done.order.require_first_backward()
        with self._channel.in_call(), self._channel.times.passing():
            done.sums = [of_penalties.get(id(v)) for v in done.trainable]
            columns = [_split(g, done.sizes) for g in of_outputs]
            done.order.backward(done, list(zip(*columns, strict=True)))
            return self._with_norms(done, variables)

    def _with_norms(self, done: StagePass, variables: Sequence[Any]) -> list[Any]:
        totals = self._tensors.add_gradients(done.trainable, done.sums, self.around_backward)
        own = dict(zip(map(id, done.trainable), totals, strict=True))
        norms = np.full(len(variables), _NO_GRADIENT)
        for i, v in enumerate(variables):
            if (gradient := own.get(id(v))) is not None:
                norms[i] = self._tensors.norm_of(gradient)
        on_ranks = self._channel.gather_numbers(norms)
        found: list[Any] = []
        for i, v in enumerate(variables):
            total, norm = own.get(id(v)), on_ranks[stage_of(v, self.parts.stages), i]
            if id(v) not in own and norm != _NO_GRADIENT:
                total = ops.convert_to_tensor([norm], v._dtype)
            found.append(self._tensors.remainder(v, total))
        return found


def _split(tensor: Any, sizes: Sequence[int]) -> list[Any]:
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
