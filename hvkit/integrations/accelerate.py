"""Accelerate on hvkit's ranks: ``accelerator = hvkit.distribute(Accelerator())``.

Accelerate finds the ranks in variables of torchrun. Once it is imported beside hvkit, its first
state gets those of hvkit, and hvkit's own ``torch.distributed``, through which Accelerate gathers,
waits and divides data as ever. ``distribute`` then takes the place of DistributedDataParallel.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch

import hvkit
from hvkit.frameworks.pytorch import torch_distributed
from hvkit.frameworks.pytorch.gradients.backward_passes import last_batch
from hvkit.host.rank_variables import launched
from hvkit.integrations.ranks import (
    BatchRanks,
    Mixin,
    accumulating,
    check_use,
    copied,
    divides_weights,
    part_of,
    same_weights,
    sized_length,
)
from hvkit.strategies.strategy import Rounds

# Accelerate reads these, and sets some of them. A number of threads is not to be chosen.
_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "OMP_NUM_THREADS",
)


def answer_states(state: Any) -> None:
    """Let states of ``accelerate.state`` be those of hvkit's ranks, if a launcher started some."""
    first = state.PartialState.__init__

    @functools.wraps(first)
    def answered(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        started = launched(os.environ)
        known = self._shared_state or "MASTER_ADDR" in os.environ
        if known or started is None or started.size == 1:
            first(self, cpu, **kwargs)
            return
        hvkit.init("torch")
        torch_distributed.start()
        with _variables_of_torchrun():
            first(self, cpu or not torch.cuda.is_available(), **kwargs)

    state.PartialState.__init__ = answered


@contextmanager
def _variables_of_torchrun() -> Iterator[None]:
    kept = {name: os.environ.get(name) for name in _VARIABLES}
    numbers = hvkit.rank(), hvkit.size(), hvkit.local_rank(), hvkit.local_size()
    os.environ.update(zip(_VARIABLES, map(str, numbers), strict=False))
    # Neither is used: torch.distributed has started.
    os.environ.update(MASTER_ADDR="localhost", OMP_NUM_THREADS=kept["OMP_NUM_THREADS"] or "1")
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def distribute(accelerator: Any, options: Mapping[str, Any], *, waits: bool = False) -> Any:
    """Let what an accelerator prepares train on all ranks; with ``waits``, only its caller does."""
    check_use("accelerate", options)
    if not waits and (mesh := options.get("mesh")) and BatchRanks(mesh).batches < hvkit.size():
        raise ValueError(
            f"Accelerate gathers from every process as one with a batch of its own, but ranks of "
            f"{mesh} share batches: use Transformers' Trainer, Lightning or a plain loop there"
        )
    if isinstance(accelerator, AcceleratorOnRanks):
        raise ValueError("this Accelerator was passed to hvkit.distribute before: pass it once")
    if accelerator.num_processes != hvkit.size():
        raise ValueError(
            f"Accelerate sees {accelerator.num_processes} processes, but there are {hvkit.size()} "
            "ranks: import hvkit before the first Accelerator, PartialState or TrainingArguments "
            "is made, and leave MASTER_ADDR unset"
        )
    if accelerator._models or accelerator._optimizers:
        raise ValueError(
            "this Accelerator has prepared models already: pass it to hvkit.distribute before "
            "accelerator.prepare"
        )
    accelerator.__class__ = _class_on_ranks(accelerator.__class__)
    accelerator._hvkit = OfAccelerator(options, waits)
    return accelerator


class OfAccelerator:
    """What hvkit keeps with an accelerator."""

    def __init__(self, options: Mapping[str, Any], waits: bool) -> None:
        self.options, self.waits = dict(options), waits
        self.ranks = BatchRanks(options.get("mesh"))
        self._settled = False
        self.trained: tuple[Any, ...] = ()  # the models and optimizers that hvkit has got
        self.trains = False  # whether the next loader to prepare is for training
        self.data_ranks: tuple[int, int] | None = None  # between how many a loader is divided now

    @contextmanager
    def among(self, batches: int, batch: int) -> Iterator[None]:
        """Let Accelerate divide a loader among so many ranks."""
        self.data_ranks = batches, batch
        try:
            yield
        finally:
            self.data_ranks = None

    def distribute(self, models: list[Any], optimizers: list[Any], accumulate: int) -> None:
        trained = {id(p) for each in optimizers for g in each.param_groups for p in g["params"]}
        found = [m for m in models if any(id(p) in trained for p in m.parameters())]
        if not found:
            raise ValueError(
                "none of the prepared models has parameters of this optimizer: prepare the model "
                "with it, accelerator.prepare(model, optimizer)"
            )
        hvkit.distribute(found, optimizers, **accumulating(self.options, accumulate))
        self.trained += (*found, *optimizers)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """``hvkit.settled`` of all that trains; nothing inside another such block."""
        if self._settled:
            yield
            return
        self._settled = True
        try:
            with hvkit.settled(*self.trained):
                yield
        finally:
            self._settled = False


class AcceleratorOnRanks(Mixin):  # type: ignore[misc]
    """A mixin before the class of an accelerator, whose models hvkit keeps in step."""

    _hvkit: OfAccelerator

    @property
    def num_processes(self) -> int:
        ranks = self._hvkit.data_ranks
        return ranks[0] if ranks else super().num_processes

    @property
    def process_index(self) -> int:
        ranks = self._hvkit.data_ranks
        return ranks[1] if ranks else super().process_index

    @property
    def dispatch_batches(self) -> Any:
        """Whether Accelerate lets rank 0 read a stream; a trainer's is divided already."""
        return False if self._hvkit.waits else super().dispatch_batches

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare(*args, **kwargs)
        found = prepared if isinstance(prepared, tuple) else (prepared,)
        optimizers = [each.optimizer for each in found if hasattr(each, "accelerator_state")]
        if optimizers and not self._hvkit.waits:
            models = [m for m in self._models if m not in self._hvkit.trained]
            self._hvkit.distribute(models, optimizers, self.gradient_accumulation_steps)
        elif not self._hvkit.waits:  # perhaps they are only evaluated
            for each in found:
                if isinstance(each, torch.nn.Module) and each not in self._hvkit.trained:
                    same_weights(each)
        return prepared

    def prepare_model(
        self, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        """Place and cast it, but without DistributedDataParallel, as for evaluation."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        trains = any(p.requires_grad for p in model.parameters())
        if model not in self._hvkit.trained and (evaluation_mode or not trains):
            same_weights(model)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Divide it as Accelerate does, which makes up the last step with up to a batch a rank.

        In a trainer, whose loaders' purpose is known, as ``hvkit.shard`` does.
        """
        ours = self._hvkit
        with ours.among(1, 0) if ours.waits else nullcontext():
            prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if ours.waits and not hasattr(prepared, "is_whole"):
            whole = prepared.base_dataloader
            exact = not ours.trains
            prepared.base_dataloader = part_of(whole, ours.options, exact=exact, equal=True)
            prepared.is_whole = prepared.base_dataloader is whole
            prepared.samples, size = sized_length(whole.dataset), data_loader.batch_size
            step = (size or 1) * (1 if prepared.is_whole else ours.ranks.batches)
            samples = prepared.samples
            prepared.last_rows = (samples - 1) % step + 1 if samples and size else None
        return prepared

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if not self._hvkit.waits:
            return super().gather_for_metrics(input_data, use_gather_object)
        loader = self.gradient_state.active_dataloader
        # A trainer repeats a loss as for a whole batch.
        at_end = loader is not None and loader.end_of_dataloader
        last = getattr(loader, "last_rows", None) if at_end else None
        whole = getattr(loader, "is_whole", False)  # each rank has all rows
        gathered: Any = torch.atleast_1d if whole else self._hvkit.ranks.rows
        apply = import_module("accelerate.utils").recursively_apply
        rows: Any = lambda tensor: gathered(tensor)[:last]  # noqa: E731
        try:
            return apply(rows, input_data, error_on_other_type=True)
        except TypeError:  # not only tensors
            objects = super().gather_for_metrics
            return input_data if whole else objects(input_data, use_gather_object=True)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        if not self._hvkit.trained:
            raise ValueError(
                "no model is kept in step over ranks: accelerator.prepare(model, optimizer) does "
                "that, prepare_model and prepare_optimizer do not"
            )
        with last_batch() if self.sync_gradients else nullcontext():
            super().backward(loss, **kwargs)

    def get_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Between rounds, and then a collective, of the weights that the ranks would agree on."""
        strategy = self._hvkit.options.get("strategy")
        if not isinstance(strategy, Rounds | hvkit.ParameterServer):
            return super().get_state_dict(*args, **kwargs)
        with self._hvkit.settled():
            return copied(super().get_state_dict(*args, **kwargs))

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        options = self._hvkit.options
        if divides_weights(options) or isinstance(options.get("strategy"), hvkit.ShardedOptimizer):
            raise ValueError(
                "accelerator.save_state writes on every rank what each has, which is a part here: "
                "save with hvkit.Checkpoint(folder, model=model, optimizer=optimizer)"
            )
        with self._hvkit.settled():
            return super().save_state(*args, **kwargs)


@functools.cache
def _class_on_ranks(base: Any) -> type:
    return type(base.__name__, (AcceleratorOnRanks, base), {"__module__": base.__module__})
