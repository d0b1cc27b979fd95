"""A model of which each rank of a mesh holds a part, divided when its first batch comes.

Only a batch shows how a forward uses its weights. Until then every rank holds the whole model, or
what makes it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hvkit.communication.traffic import count, of_allreduce
from hvkit.errors import RanksDisagreeError, ranks_text
from hvkit.frameworks.pytorch.divided_state import process_group
from hvkit.frameworks.pytorch.model_parallel.deferred.recipe import Recipe
from hvkit.frameworks.pytorch.model_parallel.dry_run import dry_run, tensors_in
from hvkit.frameworks.pytorch.model_parallel.gradient_norm import (
    GradientsOfAllRanks,
    watch_overflows,
)
from hvkit.frameworks.pytorch.model_parallel.parts import (
    LoadedBefore,
    ModelParts,
    drop,
    gathered,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.gpipe import Pipeline
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import divided
from hvkit.frameworks.pytorch.model_parallel.pipeline.stage_messages import StageLinks
from hvkit.frameworks.pytorch.model_parallel.pipeline.staged_forward import StagedForward
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import (
    Stages,
    plan_stages,
    ranks_of_stages,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.torch_schedules import (
    GPIPE,
    STAGES_PER_RANK,
    V_SHAPED,
    ScheduledPipeline,
)
from hvkit.frameworks.pytorch.refusals import mark_in_mesh
from hvkit.log import logger
from hvkit.main_rank import warn_once
from hvkit.mesh import AXES, MeshOptions


class ParallelModel:
    """Replaces the ``forward`` of a model.

    Args:
        model: whole, the same on every rank.
        optimizers: of the model.
        options: about the mesh.
        device: for this rank's part.
        name: the same on every rank, and no other model's.
        train: called when the model is divided, with this rank's parameters by name, and the
            normalisation layers of its stages; returns what to call before each backward pass,
            which returns what to call after it.
        recipe: what makes the parameters; None if they are there.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: MeshOptions,
        device: torch.device,
        name: str,
        train: Callable[[dict[str, nn.Parameter], nn.ModuleList], Callable[[], Callable[[], None]]],
        recipe: Recipe | None = None,
    ) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._options, self._device, self._name = options, device, name
        self._train = train
        self._groups = process_group.device_mesh(
            device.type, tuple(getattr(options.mesh, axis) for axis in AXES), AXES
        )
        self._group = self._groups["pipeline"].get_group()
        links = StageLinks(self._group, dist.get_process_group_ranks(self._group), device, name)
        self._links = links
        self._pipeline: Pipeline | ScheduledPipeline | None = None
        self._parts: ModelParts | None = None
        # The parameters that several ranks of the pipeline hold, with these ranks.
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self._passes = 0
        self._recipe = recipe
        self._loaded = None if recipe is None else LoadedBefore(model, optimizers)
        self._own_forward = model.forward
        for p in model.parameters():
            mark_in_mesh(p)
        vars(model)["forward"] = self._forward
        vars(model)["__deepcopy__"] = self._refuse_copy

    def _refuse_copy(self, memo: Any) -> Any:
        raise ValueError(
            f"this {type(self._model).__name__} is in a mesh, where each rank has a part of it, "
            "and cannot be copied: copy it before hvkit.distribute, or save and load its "
            "state_dict() under `with hvkit.settled(model):`"
        )

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._passes += 1
        self._links.step = self._passes
        with self._links.in_call():
            self._require_same_batch(args, kwargs)
            if self._pipeline is None:
                self._pipeline = self._divide(args, kwargs)
            return self._pipeline(args, kwargs)

    def _require_same_batch(self, args: Any, kwargs: Any) -> None:
        """Raise on every rank unless all have the same batch; a collective of the pipeline.

        Raises:
            RanksDisagreeError: names the rank.
            ValueError: a gradient of an input would be needed.
        """
        tensors = tensors_in((args, kwargs))
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise ValueError(
                "an input of a model in a pipeline requires a gradient, which only the rank of the "
                "first stage could compute: pass one module that contains both models to "
                "hvkit.distribute, or detach the input"
            )
        mine = [
            self._passes,
            torch.is_grad_enabled(),
            self._model.training,
            *((tuple(t.shape), t.dtype) for t in tensors),
        ]
        # Numbers on a GPU are compared less often, because the host waits for them.
        often = self._passes & (self._passes - 1) == 0
        content = [checksum(t) for t in tensors if often or not t.is_cuda]
        found = self._links.gather_numbers([_hash_of(mine), _hash_of(content)], self._group)
        for rank, theirs in enumerate(found.tolist()):
            if theirs != found[0].tolist():
                what = "makes another call" if theirs[0] != found[0, 0] else "gets another batch"
                ranks = self._links.ranks
                raise RanksDisagreeError(
                    f"forward pass {self._passes} of the pipeline of {ranks_text(ranks)}: rank "
                    f"{ranks[rank]} {what} than rank {ranks[0]}. Ranks of one pipeline must "
                    "get the same batches in the same order: divide data with "
                    "hvkit.shard(loader, mesh=mesh), and seed random transformations equally"
                )

    def _divide(self, args: Any, kwargs: Any) -> Pipeline | ScheduledPipeline:
        """Keep this rank's part of the model, and give up the rest."""
        model, options = self._model, self._options
        first = divided(args, kwargs, options.microbatches)[0]
        vars(model).pop("forward")
        found = dry_run(model, first.args, first.kwargs, self._device)
        per_rank = STAGES_PER_RANK[options.schedule]
        if per_rank > 1 and not isinstance(options.stages, str):
            per_rank, rest = divmod(len(options.stages) + 1, options.mesh.pipeline)
            if rest or per_rank < 2:
                raise ValueError(
                    f"stages={list(options.stages)} makes {len(options.stages) + 1} stages, but "
                    f"schedule={options.schedule!r} needs the same number, at least two, for each "
                    f"of the {options.mesh.pipeline} ranks of a pipeline"
                )
        v_shaped = options.schedule in V_SHAPED
        rank_of = ranks_of_stages(options.mesh.pipeline, per_rank, v_shaped=v_shaped)
        choice = options.stages if isinstance(options.stages, str) else list(options.stages)
        stages = plan_stages(model, found, rank_of, choice)
        if options.position.rank == 0:
            logger.info(f"{stages.described()}")
        rank = options.position.along("pipeline")
        own = self._take_part(stages, rank)
        staged = StagedForward(model, model.forward, stages, found, self._device)
        vars(model)["forward"] = self._forward
        norms = self._norms_of(stages, rank)
        if options.microbatches > 1 and len(norms):
            warn_once(
                "batch norm in micro-batches",
                f"batch norm in a pipeline uses the statistics of each micro-batch, here of "
                f"{first.samples} samples, not of the whole batch: pass a smaller microbatches=, "
                "or use group norm, which does not depend on the batch",
            )
        around = self._train(own, norms)
        pipeline = Pipeline(
            model,
            staged,
            stages,
            rank,
            self._links,
            options.microbatches,
            functools.partial(self._before_backward, around),
        )
        if options.schedule == GPIPE:
            return pipeline
        return ScheduledPipeline(pipeline, options.schedule, own)

    def _take_part(self, stages: Stages, rank: int) -> dict[str, nn.Parameter]:
        """Give up what other stages hold, and return this rank's parameters by name."""
        named = dict(self._model.named_parameters())
        own = {name: p for name, p in named.items() if rank in stages.holders(name)}
        for name, p in named.items():
            holders = stages.holders(name)
            if len(holders) > 1 and rank in holders:
                ranks = [self._links.ranks[each] for each in holders]
                group = dist.new_group(ranks, use_local_synchronization=True)
                self._shared.append((p, group))
        drop([p for name, p in named.items() if name not in own])
        if self._recipe is not None:
            self._recipe.make([p for p in own.values() if p.is_meta], self._device)
        for p in own.values():
            p.data = p.data.to(self._device)
        for p in named.values():
            mark_in_mesh(p)
        holder = {name: stages.holders(name)[0] for name in named}
        counted = [p for name, p in own.items() if holder[name] == rank]
        group = self._groups["pipeline"].get_group()
        gradients = GradientsOfAllRanks(named.values(), counted, group, self._name)
        self._gradients = gradients
        holder |= {name: stages.buffer_holder(name) for name, _ in self._model.named_buffers()}
        position = self._options.position
        collects = position.along("data") == position.along("shard") == 0
        self._parts = ModelParts(self._model, holder, self._group, collects=collects)
        for optimizer in self._optimizers:
            self._parts.attach(optimizer)
            watch_overflows(gradients, optimizer)
        if self._loaded is not None:
            self._loaded.load()
        return own

    def _norms_of(self, stages: Stages, rank: int) -> nn.ModuleList:
        """The normalisation layers of this rank's stages."""
        return nn.ModuleList(
            module
            for name, module in self._model.named_modules()
            if isinstance(module, _NormBase)
            and stages.rank_of[stages.of_module.get(name, 0)] == rank
        )

    def _before_backward(self, around: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Prepare for the gradients of a backward pass; return what to call when they are there."""
        end = around()
        before = [(p, group, p.grad) for p, group in self._shared]
        for p, _, _ in before:
            p.grad = None

        def add_up() -> None:
            for p, group, earlier in before:
                # Each holder has what its stage has contributed in this pass.
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                count("gradients", of_allreduce(gradient.nbytes, group.size()))
                with self._links.waiting():
                    dist.all_reduce(gradient, group=group)
                p.grad = gradient if earlier is None else earlier.add_(gradient)
            end()

        return add_up

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which rank 0 has the whole state dict of the model; a collective."""
        return nullcontext() if self._parts is None else self._parts.gathered(self._model)

    def optimizer_gathered(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """A context in which rank 0 holds an optimizer's whole state; a collective."""
        return nullcontext() if self._parts is None else gathered(optimizer)


def checksum(t: torch.Tensor) -> int:
    """A number that depends on all values of a tensor, but not on their order."""
    data = t.detach().contiguous().flatten()
    if not data.numel():
        return 0
    size = data.numel() * data.element_size()
    words = data.view(torch.uint8).view(torch.int32 if size % 4 == 0 else torch.uint8)
    return int(words.sum(dtype=torch.int64))


def _hash_of(things: Sequence[Any]) -> int:
    """A number for some things, the same in every process."""
    return zlib.crc32(repr(things).encode())
