"""A model of which each rank of a mesh holds a part, divided when its first batch comes.

Only a batch shows how a forward uses its weights. Until then every rank holds the whole model, or
what makes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.divided_state import process_group
from hvkit.frameworks.pytorch.gradients.loss_counts import LossCounts
from hvkit.frameworks.pytorch.gradients.reducer import watch_passes
from hvkit.frameworks.pytorch.gradients.script_hooks import HooksOnShards
from hvkit.frameworks.pytorch.model_parallel.deferred.recipe import Recipe
from hvkit.frameworks.pytorch.model_parallel.division import (
    ModelDivision,
    decide,
    log_division,
    of_parameters,
)
from hvkit.frameworks.pytorch.model_parallel.gradient_norm import (
    GradientsOfAllRanks,
    watch_overflows,
)
from hvkit.frameworks.pytorch.model_parallel.kept_results import KeptResults, Path
from hvkit.frameworks.pytorch.model_parallel.part_of_whole import PartOfWhole
from hvkit.frameworks.pytorch.model_parallel.parts import (
    LoadedBefore,
    ModelParts,
    PartsOfParameters,
    drop,
    gathered,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import Divider
from hvkit.frameworks.pytorch.model_parallel.pipeline.pipelined_model import Pipeline
from hvkit.frameworks.pytorch.model_parallel.pipeline.result_comparison import plain_result
from hvkit.frameworks.pytorch.model_parallel.pipeline.stage_messages import StageLinks
from hvkit.frameworks.pytorch.model_parallel.pipeline.staged_forward import StagedForward
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import Stages
from hvkit.frameworks.pytorch.model_parallel.pipeline.torch_schedules import (
    GPIPE,
    ScheduledPipeline,
)
from hvkit.frameworks.pytorch.model_parallel.same_batches import (
    hash_of,
    require_same_batch,
    require_same_weights,
)
from hvkit.frameworks.pytorch.model_parallel.shard_axis import follow, shard
from hvkit.frameworks.pytorch.model_parallel.shared_gradients import SharedGradients
from hvkit.frameworks.pytorch.model_parallel.tensor.activations import (
    gathered as gathered_activations,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.layers import divide, placements_of
from hvkit.frameworks.pytorch.model_parallel.tensor.placements import Placement
from hvkit.frameworks.pytorch.model_parallel.tensor.random_numbers import SameRandomNumbers
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in
from hvkit.frameworks.pytorch.model_parallel.whole_model import WholeModel
from hvkit.frameworks.pytorch.model_parallel.whole_parameters import WholeParameters
from hvkit.frameworks.pytorch.refusals import is_divided, mark_in_mesh
from hvkit.log import logger
from hvkit.main_rank import warn_once
from hvkit.mesh import AXES, Axis, MeshOptions, rows

# The first pass also prepares the others.
_TIMED_FROM, _TIMED_TO = 2, 22


class ParallelModel:
    """Replaces the ``forward`` of a model.

    Args:
        model: whole, the same on every rank.
        optimizers: of the model.
        options: about the mesh.
        device: for this rank's part.
        name: the same on every rank, and no other model's.
        train: called when the model is divided, with this rank's parameters by name, and the
            normalisation layers of its stages. In a pipeline it returns what to call before each
            backward pass, which returns what to call after it.
        compared: called when the first batch has been compared with what the whole model gives,
            and before later ones. Ranks hold the same weights until then.
        recipe: what makes the parameters; None if they are there.
        rounded: what means along the data axis round in another way on each stage.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: MeshOptions,
        device: torch.device,
        name: str,
        train: Callable[[dict[str, nn.Parameter], nn.ModuleList], Callable[[], Callable[[], None]]],
        compared: Callable[[], None],
        recipe: Recipe | None = None,
        rounded: Literal["gradients", "weights", "nothing"] = "nothing",
    ) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._options, self._device, self._name = options, device, name
        self._train, self._compared, self._rounded = train, compared, rounded
        if options.mesh.shard > 1 or options.schedule != GPIPE:
            process_group.require_gpus_of_their_own()
        self._axes = process_group.device_mesh(
            device.type, tuple(getattr(options.mesh, axis) for axis in AXES), AXES
        )
        self._links = self._links_of("pipeline")
        # The ranks that compute on the same batch, and those that compute at the same time.
        self._together = self._links_of("pipeline", "tensor")
        shards = options.mesh.shard > 1
        self._at_once = self._links_of(*AXES) if shards else self._together
        # Of the pass before; along the data axis alone, whoever averages gradients compares losses.
        self._losses = LossCounts()
        if shards:
            watch_passes()
            self._losses.look(wanted=True)
        # The ranks that hold parts of the same weights, which are no copies.
        self._holders = self._links_of("shard", "pipeline", "tensor")
        self._copies = self._links_of("data", "shard")
        self._kept: list[nn.Parameter] = []
        # What the script may still hold, by the new parameter.
        self._replaced: dict[torch.Tensor, nn.Parameter] = {}
        self._run: Callable[[Any, Any], Any] | None = None
        self.parts: ModelParts | None = None
        # The same number on all ranks, and another if they hold other parts.
        self.layout = 0
        # What is loaded as soon as there is a part to load.
        self._waiting: list[Callable[[], None]] = []
        # The parameters that several ranks of the pipeline hold, with these ranks.
        self._shared: dict[nn.Parameter, dist.ProcessGroup] = {}
        self._pipeline: Pipeline | None = None
        # Of the current pass, the same on all ranks that compute on the same batch.
        self._seed = 0
        self._passes = 0
        self._divider = Divider()
        # Of the tensor axis, and what was loaded of it before the model is divided.
        self._random: SameRandomNumbers | None = None
        self._numbers: list[np.ndarray[Any, Any]] = []
        self.whole = WholeParameters()
        self._recipe = recipe
        self._loaded = None if recipe is None else LoadedBefore(model, optimizers)
        for p in model.parameters():
            mark_in_mesh(p, pipeline=self._options.mesh.pipeline > 1)
        self._whole = WholeModel(model)
        # A script may have replaced the forward of the instance itself.
        self._of_instance = vars(model).get("forward")
        vars(model)["forward"] = self._forward
        vars(model)["__deepcopy__"] = self._refuse_copy
        # PyTorch runs hooks that come during a call only if there was one when it began.
        model.register_forward_hook(_nothing)

    def _links_of(self, *axes: Axis) -> StageLinks:
        group = process_group.group_of(rows(self._options.mesh, *axes))
        ranks = self._options.position.members(*axes)
        through_host = process_group.ranks_share_gpus()
        return StageLinks(group, ranks, self._device, self._name, through_host=through_host)

    def _refuse_copy(self, memo: Any) -> Any:
        raise ValueError(
            f"this {type(self._model).__name__} is in a mesh, where each rank has a part of it, "
            "and cannot be copied: copy it before hvkit.distribute, or save and load its "
            "state_dict() under `with hvkit.settled(model):`"
        )

    # A script may compile what calls the model. Blocks that it has compiled stay so.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._passes += 1
        if self._passes & (self._passes - 1) == 0:
            self._refuse_replaced_parameters()
        self._links.step = self._at_once.step = self._passes
        self._losses.keep()
        with self._links.in_call(), self._links.times.passing():
            self._seed = require_same_batch(
                self._model,
                self._passes,
                args,
                kwargs,
                self._optimizers,
                self._losses,
                self._at_once,
                self._together,
            )
            self._losses.begin()
            if self._run is None:
                hooks = set(self._model._forward_pre_hooks)
                self._show_own_forward()
                try:
                    self._run = self._divide(args, kwargs)
                finally:  # also after an error: the plain forward would train without the others
                    vars(self._model)["forward"] = self._forward
                # This call has begun without those that came with the division.
                for number, hook in list(self._model._forward_pre_hooks.items()):
                    if number not in hooks:
                        args, kwargs = cast(Any, hook)(self._model, args, kwargs) or (args, kwargs)
            self._gradients.used()
            self._say_waits()
            if self._pipeline is not None:
                self._pipeline.seed = self._seed
            with self.whole.as_parts():
                return self._run(args, kwargs)

    def _refuse_replaced_parameters(self) -> None:
        """Raise in the forward of ``torch.func.functional_call``, whose parameters would be lost.

        Raises:
            ValueError: names a parameter.
        """
        for name, p in self._model.named_parameters():
            if not isinstance(p, nn.Parameter):
                raise ValueError(
                    "torch.func.functional_call gives the model in a mesh another "
                    f"{name}, of which each rank of {self._options.mesh} holds a part: train "
                    "without mesh=, or compute with the parameters of the model"
                )

    def _show_own_forward(self) -> None:
        """Take back what replaces the model's forward."""
        del vars(self._model)["forward"]
        if self._of_instance is not None:
            vars(self._model)["forward"] = self._of_instance

    def _divide(self, args: Any, kwargs: Any) -> Callable[[Any, Any], Any]:
        """Keep this rank's part of the model, give up the rest, and return what runs it."""
        model, options = self._model, self._options
        if self._recipe is None:
            require_same_weights(self._model, self._holders)
        count = options.microbatches if options.mesh.pipeline > 1 else 1
        batches = self._divider(args, kwargs, count)
        first = batches[0]
        division = self._same_on_all(
            decide(model, options, self._device, first, args, kwargs, self._on_all_ranks)
        )
        found, plan, stages = division.found, division.plan, division.stages
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            log_division(
                division,
                model,
                self._optimizers,
                options,
                self._device,
                self._together,
                len(batches),
            )
        if self._rounded == "weights":
            self._require_one_stage_for_each(stages)
        rank = options.position.along("pipeline")
        expected = None
        if self._recipe is None and rank == stages.rank_of[-1] and len(stages) > 1:
            expected = plain_result(model, args, kwargs, found.kept)
        holders = [stages.holders(name) for name, _ in model.named_parameters()]
        self.layout = hash_of([holders, placements_of(model, plan)])
        own = self._take_part(stages, rank)
        placements: Mapping[str, Placement] = {}
        if options.mesh.tensor > 1:
            tensor = self._axes["tensor"]
            self._random = SameRandomNumbers(tensor.get_group(), self._device)
            placements = divide(model, of_parameters(model, plan, own), tensor, self._random)
            self.numbers = self._numbers
        if options.mesh.shard > 1:
            own = self._shard(own, division)
        self._keep_state(stages, rank, own, placements)
        self._answer_for_whole(own, placements)
        norms = self._norms_of(stages, rank)
        if options.mesh.pipeline == 1:
            self._train(own, norms)
            self._compared()
            return functools.partial(_whole, model.forward, KeptResults(model, found.kept))
        if options.microbatches > 1 and len(norms):
            warn_once(
                "batch norm in micro-batches",
                f"batch norm in a pipeline uses the statistics of each micro-batch, here of "
                f"{first.samples} samples, not of the whole batch: pass a smaller microbatches=, "
                "or use group norm, which does not depend on the batch",
            )
        if found.floats:
            warn_once(
                "floats in a pipeline",
                f"the forward keeps a Python number in {found.floats[0]}, which each rank of the "
                "pipeline computes for its own stage, and in each micro-batch: other ranks hold "
                "another one. Keep a tensor, as in a buffer or an attribute, or compute it from "
                "what the model returns",
            )
        if count > 1 and _iterates(model):
            warn_once(
                "spectral norm in micro-batches",
                "spectral norm in a pipeline takes a step of its power iteration for each "
                f"micro-batch, here {count} a batch, so that weights differ slightly from those of "
                "one process: pass microbatches=1, or leave out the pipeline axis, if that matters",
            )
        staged = StagedForward(model, stages, found, self._device, self._begin_numbers)
        train = self._train(own, norms)
        shared = SharedGradients(
            self._shared,
            self._kept,
            self._links,
            self._copies,
            self._device,
            equalised=self._rounded == "gradients",
        )
        around = functools.partial(shared.before_backward, train)
        pipeline = self._pipeline = Pipeline(
            model,
            staged,
            stages,
            self._links,
            count,
            self._divider,
            around,
            expected,
            self._compared,
        )
        if options.schedule == GPIPE:
            return pipeline
        return ScheduledPipeline(pipeline, options.schedule, own)

    def _on_all_ranks(self, kept: Sequence[Path]) -> list[Path]:
        """Those places where the forward of every rank keeps something, not hooks of rank 0."""
        named = {repr(path): path for path in kept}
        names = self._together.object_from_rank(0, list(named))
        if not names:
            return []
        on_ranks = self._together.gather_numbers([name in named for name in names]).tolist()
        return [named[name] for name, *found in zip(names, *on_ranks, strict=True) if all(found)]

    def _same_on_all(self, division: ModelDivision) -> ModelDivision:
        """Keep the sequence whole if ranks see different operations, as those of rank 0's hooks."""
        plan = division.plan
        if plan.ways == 1:
            return division
        mine = hash_of([(each.begins, each.ends, each.others) for each in plan.streams])
        everyone = self._together.gather_numbers([mine]).flatten().tolist()
        if len(set(everyone)) == 1:
            return division
        why = "stay whole: a forward on one rank does more than on another, perhaps in a hook"
        plan = replace(plan, streams=(), whole_streams=(*plan.whole_streams, why))
        return replace(division, plan=plan)

    def _say_waits(self) -> None:
        """Log once how long the first rank of a pipeline has waited for others."""
        times, mesh = self._links.times, self._options.mesh
        if self._passes == _TIMED_FROM:
            times.begin()
        # With a GPU the host runs ahead, and waits elsewhere.
        counts = mesh.pipeline > 1 and self._device.type == "cpu"
        if self._passes == _TIMED_TO and counts and self._options.position.rank == 0:
            logger.info(
                f"rank 0 has waited for other stages {times.bubble:.0%} of the time in forward and "
                f"backward passes {_TIMED_FROM} to {_TIMED_TO - 1}"
            )

    def _take_part(self, stages: Stages, rank: int) -> dict[str, nn.Parameter]:
        """Give up what other stages hold, and return this rank's parameters by name."""
        named = dict(self._model.named_parameters())
        own = {name: p for name, p in named.items() if rank in stages.holders(name)}
        for name, p in named.items():
            holders = stages.holders(name)
            if len(holders) > 1:
                ranks = tuple(self._links.ranks[each] for each in holders)
                group = process_group.subgroup_of(self._links.ranks, ranks)
                if rank in holders:
                    self._shared[p] = group
        # Recurrent layers hold weak references, for which PyTorch exchanges no tensors.
        recurrent = [m for m in self._model.modules() if isinstance(m, nn.RNNBase)]
        for module in recurrent:
            module._flat_weight_refs = []
        drop([p for name, p in named.items() if name not in own])
        if self._recipe is not None:
            self._recipe.make([p for p in own.values() if p.is_meta], self._device)
        for p in own.values():
            p.data = p.data.to(self._device)
        for module in recurrent:
            cast(Any, module)._init_flat_weights()
        for p in named.values():
            mark_in_mesh(p, pipeline=self._options.mesh.pipeline > 1)
        return own

    def _shard(
        self, own: dict[str, nn.Parameter], division: ModelDivision
    ) -> dict[str, nn.Parameter]:
        """Divide this rank's parameters along the shard axis."""
        copies = self._options.mesh.data > 1
        mesh = self._axes["data", "shard"] if copies else self._axes["shard"]
        shared = list(self._shared)
        cuts = [cut.module for cut in division.stages.cuts]
        called = division.found.calls.keys()
        lookers = division.found.lookers
        after = shard(self._model, own, shared, cuts, called, lookers, mesh, self._name)
        follow(self._optimizers, own, after)
        self._replaced = {p: after[name] for name, p in own.items()}
        for p in after.values():
            mark_in_mesh(p, pipeline=self._options.mesh.pipeline > 1)
        names: dict[torch.Tensor, str] = {p: name for name, p in after.items()}
        self._script_hooks = HooksOnShards(
            {after[name]: p for name, p in own.items() if is_divided(after[name])},
            lambda p: f"parameter {names[p]}",
            lambda p, own: self._held.whole_gradient(p, own),
            lambda p, whole: self._held.own_gradient(p, whole),
        )
        self._kept = [p for p in after.values() if not is_divided(p)]
        return after

    def _keep_state(
        self,
        stages: Stages,
        rank: int,
        own: Mapping[str, nn.Parameter],
        placements: Mapping[str, Placement],
    ) -> None:
        """See to it that norms, scalers, saving and loading know of the parts of other ranks."""
        position, model = self._options.position, self._model
        holder = {name: stages.holders(name)[0] for name, _ in model.named_parameters()}
        buffers = {name: stages.buffer_holder(name) for name, _ in model.named_buffers()}
        shares = PartsOfParameters(placements, self._axes["tensor"])
        self._whole.divided(shares, holder | buffers, self._links)
        first = position.along("tensor") == 0
        first_shard = position.along("shard") == 0
        counted = [
            p
            for name, p in own.items()
            if holder[name] == rank
            and (first or name in placements)
            and (first_shard or is_divided(p))
        ]
        everyone = self._holders.group
        # The model keeps it: a norm is looked for by the parameters.
        self._gradients = GradientsOfAllRanks(
            model.parameters(), counted, everyone, self._name, self._device, self._replaced
        )
        self.parts = ModelParts(
            model,
            holder | buffers,
            self._links.group,
            shares,
            collects=position.along("data") == 0,
            first_shard=first_shard,
        )
        for optimizer in self._optimizers:
            self.parts.attach(optimizer)
            watch_overflows(self._gradients, optimizer)
        if self._loaded is not None:
            self._loaded.load()
        for load in self._waiting:
            load()
        self._waiting.clear()

    def _answer_for_whole(
        self, own: Mapping[str, nn.Parameter], placements: Mapping[str, Placement]
    ) -> None:
        """Let the script see whole parameters outside of forward and update."""
        tensor = self._axes["tensor"] if placements else None
        self.whole.add(
            self._model,
            {
                p: PartOfWhole.of(p, placements.get(name), tensor)
                for name, p in own.items()
                if name in placements or is_divided(p)
            },
        )

    def _require_one_stage_for_each(self, stages: Stages) -> None:
        """Raise if several stages would round the same weights differently.

        Raises:
            ValueError: names the parameter.
        """
        for name, _ in self._model.named_parameters():
            if len(stages.holders(name)) > 1:
                raise ValueError(
                    f"stages {' and '.join(map(str, stages.of_parameter[name]))} of the pipeline "
                    f"use {name}, and would round it differently when ranks of the data axis agree "
                    "on compressed weights: leave out compression=, or choose stages=[...] so that "
                    "one stage uses it"
                )

    def _norms_of(self, stages: Stages, rank: int) -> nn.ModuleList:
        """The normalisation layers of this rank's stages."""
        return nn.ModuleList(
            module
            for name, module in self._model.named_modules()
            if isinstance(module, _NormBase)
            and stages.rank_of[stages.of_module.get(name, 0)] == rank
        )

    def _begin_numbers(self) -> None:
        """Let ranks of the tensor axis go on from the numbers that all stages share."""
        if self._random is not None:
            self._random.begin()

    @property
    def numbers(self) -> list[np.ndarray[Any, Any]]:
        """Where the random numbers go on that ranks of the tensor axis draw together."""
        return [state.numpy() for state in self._random.state] if self._random else []

    @numbers.setter
    def numbers(self, states: list[np.ndarray[Any, Any]]) -> None:
        self._numbers = states
        if self._random and len(states) == len(self._random.state):
            self._random.state = [torch.from_numpy(state.copy()) for state in states]

    def require_division(self, optimizer: Optimizer, _: Any) -> None:
        """Before an update: raise if it would train the whole model, without the other ranks.

        Raises:
            ValueError: there are gradients, but no call of the model has divided it.
        """
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if self._run is None and any(p.grad is not None for p in parameters):
            kind = type(self._model).__name__
            raise ValueError(
                f"{type(optimizer).__name__}.step() without a call of {kind} itself: the first "
                f"model(...) divides a model in {self._options.mesh}, and a loop that calls other "
                "methods, or layers, trains the whole one on each rank alone. Move what they do "
                "into forward(), which may choose by an argument"
            )

    @property
    def _held(self) -> ModelParts:
        assert self.parts is not None
        return self.parts

    @property
    def is_deferred(self) -> bool:
        """Whether no rank has weights before the model is divided."""
        return self._recipe is not None

    def when_divided(self, load: Callable[[], None]) -> None:
        """Load something as soon as there is a part of the model to load."""
        if self.parts is None:
            self._waiting.append(load)
        else:
            load()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which rank 0 has the whole state dict of the model; a collective."""
        with ExitStack() as stack:
            stack.enter_context(self._whole.settled())
            if self.parts is not None:
                stack.enter_context(self.parts.gathered(self._model))
            yield

    def optimizer_gathered(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """A context in which rank 0 holds an optimizer's whole state; a collective."""
        return nullcontext() if self.parts is None else gathered(optimizer)


def _whole(forward: Callable[..., Any], kept: KeptResults, args: Any, kwargs: Any) -> Any:
    """The result of a model without stages; what it keeps beside that is whole as well."""
    if not kept.paths:
        return forward(*args, **kwargs)
    kept.begin()
    output = forward(*args, **kwargs)
    tree = kept.tree()
    if any(map(is_divided, tensors_in(tree))):
        kept.put_tree(gathered_activations(tree))
    return output


def _nothing(*_: Any) -> None:
    """A hook that is there."""


def _iterates(model: nn.Module) -> bool:
    """Whether a layer has spectral norm, of PyTorch's new or old kind, which counts its calls."""
    modules = [each for each in model.modules() if each.training]
    hooks = [hook for each in modules for hook in each._forward_pre_hooks.values()]
    return any(isinstance(each, _SpectralNorm | SpectralNorm) for each in [*modules, *hooks])
