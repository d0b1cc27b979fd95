"""A model in a mesh, divided among the ranks when its first batch comes.

Only a batch shows how a forward uses its weights. Until then every rank holds the whole model, or a
recording that makes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hvkit.frameworks.pytorch import torch_distributed
from hvkit.frameworks.pytorch.divided_state.fully_shard import follow, shard_stage
from hvkit.frameworks.pytorch.gradients.loss_counts import LossCounts
from hvkit.frameworks.pytorch.gradients.reducer import watch_passes
from hvkit.frameworks.pytorch.gradients.script_hooks import HooksOnShards
from hvkit.frameworks.pytorch.model_parallel.deferred_init import keep_loads
from hvkit.frameworks.pytorch.model_parallel.division import (
    decide,
    require_one_stage_for_each,
    warn_of_microbatches,
)
from hvkit.frameworks.pytorch.model_parallel.init_recording import InitRecording
from hvkit.frameworks.pytorch.model_parallel.memory_forecast import log_division
from hvkit.frameworks.pytorch.model_parallel.mesh_gradients import (
    GradientsOfAllRanks,
    SharedGradients,
)
from hvkit.frameworks.pytorch.model_parallel.model_state import FullModel, ModelState, drop
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import Divider, plain_result
from hvkit.frameworks.pytorch.model_parallel.pipeline.pipelined_model import Pipeline
from hvkit.frameworks.pytorch.model_parallel.pipeline.staged_forward import StagedForward
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import DryRun, ModuleStages
from hvkit.frameworks.pytorch.model_parallel.pipeline.torch_schedules import (
    GPIPE,
    ScheduledPipeline,
)
from hvkit.frameworks.pytorch.model_parallel.rank_groups import (
    RankGroups,
    SameRandomNumbers,
    hash_of,
    require_same_batch,
    require_same_weights,
)
from hvkit.frameworks.pytorch.model_parallel.side_outputs import SideOutputs
from hvkit.frameworks.pytorch.model_parallel.slices import Slicing
from hvkit.frameworks.pytorch.model_parallel.tensor.activations import (
    gathered as gathered_activations,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_layers import divide
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import Placement
from hvkit.frameworks.pytorch.model_parallel.tensor.plan import placements_of
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in
from hvkit.frameworks.pytorch.model_parallel.whole_parameters import WholeParameters
from hvkit.frameworks.pytorch.optimizers import parameters_of, scaler_hooks
from hvkit.frameworks.pytorch.refusals import is_divided, mark_in_mesh
from hvkit.log import logger
from hvkit.mesh import MeshOptions

# The first pass also prepares later ones.
_TIMED_FROM, _TIMED_TO = 2, 22


class ParallelModel:
    """Replaces the ``forward`` of a model, which is the same on every rank, with this name.

    ``train`` is called when the model is divided, with this rank's parameters by name, and the
    normalisation layers of its stages. In a pipeline it returns a function to call before each
    backward pass, which returns one to call after it. ``compared`` is called when the pipeline's
    first result has been compared with that of the whole model, and before later ones. Ranks hold
    the same weights until then. ``rounded`` are the means along the data axis that stages would
    round differently.
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
        recording: InitRecording | None = None,
        rounded: Literal["gradients", "weights", "nothing"] = "nothing",
    ) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._options, self._device, self._name = options, device, name
        self._train, self._compared, self._rounded = train, compared, rounded
        self._recording = recording
        self._groups = RankGroups(options, device, name)
        self._rank = options.position.along("pipeline")
        # Of the last pass. Along the data axis alone, the reducer of gradients compares losses.
        self._losses = LossCounts()
        if options.mesh.shard > 1:
            watch_passes()
            self._losses.look(wanted=True)
        self._passes = 0
        self._divider = Divider()
        self._run: Callable[[Any, Any], Any] | None = None
        self._pipeline: Pipeline | None = None
        self._random: SameRandomNumbers | None = None
        self.state: ModelState | None = None
        # The same number on all ranks; another one for another division.
        self.layout = 0
        self.whole = WholeParameters()
        # Loads that wait until the model is divided.
        self._pending: list[Callable[[], None]] = []
        if recording is not None:
            self._pending.append(keep_loads(model, optimizers))
        self._mark_in_mesh(model.parameters())
        self._full = FullModel(model)
        # A script may have replaced the forward of the instance itself.
        self._of_instance = {name: each for name, each in vars(model).items() if name == "forward"}
        vars(model)["forward"] = self._forward
        vars(model)["__deepcopy__"] = self._refuse_copy
        # PyTorch calls hooks registered during a call only if there was one when it began.
        model.register_forward_hook(_nothing)

    def _mark_in_mesh(self, parameters: Iterable[torch.Tensor]) -> None:
        for p in parameters:
            mark_in_mesh(p, pipeline=self._options.mesh.pipeline > 1)

    def _refuse_copy(self, memo: Any) -> Any:
        raise ValueError(
            f"this {type(self._model).__name__} is in a mesh, where each rank has a part of it, "
            "and cannot be copied: copy it before hvkit.distribute, or save and load its "
            "state_dict() under `with hvkit.settled(model):`"
        )

    # A script may compile the function that calls the model. Blocks that it compiles stay so.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._passes += 1
        if self._passes.bit_count() == 1:
            self._refuse_replaced_parameters()
        links = self._groups.pipeline
        links.step = self._groups.lockstep.step = self._passes
        self._losses.keep()
        with links.in_call(), links.times.passing():
            request = self._model, self._passes, args, kwargs
            seed = require_same_batch(*request, self._optimizers, self._losses, self._groups)
            self._losses.begin()
            if self._run is None:
                hooks = set(self._model._forward_pre_hooks)
                del vars(self._model)["forward"]
                vars(self._model).update(self._of_instance)
                try:
                    self._run = self._divide(args, kwargs)
                finally:  # also after an error: the plain forward would train on this rank alone
                    vars(self._model)["forward"] = self._forward
                # PyTorch does not call pre-hooks that the division added during this call.
                for number, hook in list(self._model._forward_pre_hooks.items()):
                    if number not in hooks:
                        args, kwargs = cast(Any, hook)(self._model, args, kwargs) or (args, kwargs)
            self._gradients.used()
            self._log_waits()
            if self._pipeline is not None:
                self._pipeline.seed = seed
            with self.whole.as_slices():
                return self._run(args, kwargs)

    def _refuse_replaced_parameters(self) -> None:
        """Raise in a forward of ``torch.func.functional_call``, whose parameters would be lost."""
        for name, p in self._model.named_parameters():
            if not isinstance(p, nn.Parameter):
                raise ValueError(
                    "torch.func.functional_call gives the model in a mesh another "
                    f"{name}, of which each rank of {self._options.mesh} holds a part: train "
                    "without mesh=, or compute with the parameters of the model"
                )

    def _divide(self, args: Any, kwargs: Any) -> Callable[[Any, Any], Any]:
        """Keep this rank's part of the model, free the rest, and return its forward."""
        model, options, groups, rank = self._model, self._options, self._groups, self._rank
        if self._recording is None:
            require_same_weights(model, groups.replica)
        count = options.microbatches if options.mesh.pipeline > 1 else 1
        batches = self._divider(args, kwargs, count)
        first = batches[0]
        found, plan, stages = decide(
            model, options, self._device, first, args, kwargs, groups.same_batch
        )
        machine = self._device, groups.same_batch
        log_division(stages, plan, model, self._optimizers, options, *machine, len(batches))
        if self._rounded == "weights":
            require_one_stage_for_each(model, stages)
        expected = None
        if self._recording is None and rank == stages.rank_of[-1] and len(stages) > 1:
            expected = plain_result(model, args, kwargs, found.side_outputs)
        holders = [stages.holders(name) for name, _ in model.named_parameters()]
        self.layout = hash_of([holders, placements_of(model, plan.divisions)])
        own, of_stages = self._take_part(stages)
        placements: Mapping[str, Placement] = {}
        tensor = groups.axes["tensor"]
        if options.mesh.tensor > 1:
            self._random = SameRandomNumbers(tensor.get_group(), self._device)
            placements = divide(model, plan, tensor, self._random)
        before = own
        if options.mesh.shard > 1:
            own = self._shard(own, of_stages, found, stages)
        slicings = {n: Slicing.of(p, placements.get(n), tensor) for n, p in own.items()}
        self._keep_state(stages, before, own, slicings)
        norms = nn.ModuleList(
            module
            for name, module in model.named_modules()
            if isinstance(module, _NormBase)
            and stages.rank_of[stages.of_module.get(name, 0)] == rank
        )
        if options.mesh.pipeline == 1:
            self._train(own, norms)
            self._compared()
            return functools.partial(_whole, model.forward, SideOutputs(model, found.side_outputs))
        warn_of_microbatches(model, found, norms, count, first)
        begin = self._random.begin if self._random else _nothing
        staged = StagedForward(model, stages, found, self._device, begin)
        train = self._train(own, norms)
        shared = SharedGradients(
            of_stages,
            [p for p in own.values() if options.mesh.shard > 1 and not is_divided(p)],
            groups.pipeline,
            groups.data_parallel,
            equalised=self._rounded == "gradients",
        )
        pipeline = self._pipeline = Pipeline(
            model,
            staged,
            stages,
            groups.pipeline,
            count,
            self._divider,
            functools.partial(shared.before_backward, train),
            expected,
            self._compared,
        )
        if options.schedule == GPIPE:
            return pipeline
        return ScheduledPipeline(pipeline, options.schedule, own)

    def _log_waits(self) -> None:
        times = self._groups.pipeline.times
        if self._passes == _TIMED_FROM:
            times.begin()
        # With a GPU the host does not wait for messages.
        counts = self._options.mesh.pipeline > 1 and self._device.type == "cpu"
        if self._passes == _TIMED_TO and counts and self._options.position.rank == 0:
            logger.info(
                f"rank 0 has waited for other stages {times.bubble:.0%} of the time in forward and "
                f"backward passes {_TIMED_FROM} to {_TIMED_TO - 1}"
            )

    def _take_part(
        self, stages: ModuleStages
    ) -> tuple[dict[str, nn.Parameter], dict[nn.Parameter, dist.ProcessGroup]]:
        """Free other stages' parameters; return this rank's, and groups of those of two stages."""
        named, links = dict(self._model.named_parameters()), self._groups.pipeline
        holders = {name: stages.holders(name) for name in named}
        own = {name: p for name, p in named.items() if self._rank in holders[name]}
        groups = {  # a collective for those of several stages
            name: torch_distributed.subgroup_of(links.ranks, tuple(links.ranks[i] for i in ranks))
            for name, ranks in holders.items()
            if len(ranks) > 1
        }
        of_stages = {own[name]: group for name, group in groups.items() if name in own}
        # PyTorch swaps no tensors with weak references, which recurrent layers hold.
        recurrent = [m for m in self._model.modules() if isinstance(m, nn.RNNBase)]
        for module in recurrent:
            module._flat_weight_refs = []
        drop([p for name, p in named.items() if name not in own])
        if self._recording is not None:
            self._recording.make([p for p in own.values() if p.is_meta], self._device)
        for p in own.values():
            p.data = p.data.to(self._device)
        for module in recurrent:
            cast(Any, module)._init_flat_weights()
        self._mark_in_mesh(named.values())
        return own, of_stages

    def _shard(
        self,
        own: Mapping[str, nn.Parameter],
        of_stages: Collection[nn.Parameter],
        found: DryRun,
        stages: ModuleStages,
    ) -> dict[str, nn.Parameter]:
        axes = self._groups.axes
        mesh = axes["data", "shard"] if self._options.mesh.data > 1 else axes["shard"]
        cuts = [cut.name for cut in stages.cuts]
        called, readers = found.calls.keys(), found.value_readers
        after = shard_stage(self._model, own, of_stages, cuts, called, readers, mesh, self._name)
        for optimizer in self._optimizers:
            follow(optimizer, own, after)
        self._mark_in_mesh(after.values())
        return after

    def _keep_state(
        self,
        stages: ModuleStages,
        before: Mapping[str, nn.Parameter],
        own: Mapping[str, nn.Parameter],
        slicings: Mapping[str, Slicing],
    ) -> None:
        """Prepare norms, scalers, scripts, saving and loading for divided parameters."""
        position, model = self._options.position, self._model
        holder = {name: stages.holders(name)[0] for name, _ in model.named_parameters()}
        holder |= {name: stages.buffer_holder(name) for name, _ in model.named_buffers()}
        state = ModelState(model, holder, self._groups.pipeline, slicings, position)
        self.state = state
        if self._options.mesh.shard > 1:
            names: dict[torch.Tensor, str] = {p: name for name, p in own.items()}
            self._script_hooks = HooksOnShards(
                {own[name]: p for name, p in before.items() if is_divided(own[name])},
                lambda p: f"parameter {names[p]}",
                state.full_gradient,
                state.gradient_slice,
            )
        # Only the model holds a strong reference: clipping finds it by the parameters.
        self._gradients = GradientsOfAllRanks(
            model.parameters(),
            [p for name, p in own.items() if state.counts(name)],
            self._groups.replica,
            # The script may still hold replaced parameters.
            {p: own[name] for name, p in before.items() if own[name] is not p},
        )
        self._full.state = state
        for optimizer in self._optimizers:
            state.attach(optimizer)
            overflows = functools.partial(self._gradients.any_overflow, id(optimizer))
            scaler_hooks(optimizer).overflows = overflows
        for load in self._pending:
            load()
        self._pending.clear()
        self.whole.add(model, {own[n]: each for n, each in slicings.items() if each})

    @property
    def numbers(self) -> list[np.ndarray[Any, Any]]:
        """The generators' states of the random numbers that the tensor group shares."""
        return [state.numpy() for state in self._random.states] if self._random else []

    @numbers.setter
    def numbers(self, states: list[np.ndarray[Any, Any]]) -> None:
        def load() -> None:
            if self._random and len(states) == len(self._random.states):
                self._random.states = [torch.from_numpy(state.copy()) for state in states]

        self.when_divided(load)

    def require_division(self, optimizer: Optimizer, _: Any) -> None:
        """Before an update: raise if it would train the whole model, without the other ranks."""
        if self._run is None and any(p.grad is not None for p in parameters_of(optimizer)):
            name = type(self._model).__name__
            raise ValueError(
                f"{type(optimizer).__name__}.step() without a call of {name} itself: the first "
                f"model(...) divides a model in {self._options.mesh}, and a loop that calls other "
                "methods, or layers, trains the whole one on each rank alone. Move what they do "
                "into forward(), which may choose by an argument"
            )

    @property
    def is_deferred(self) -> bool:
        return self._recording is not None

    def when_divided(self, load: Callable[[], None]) -> None:
        if self.state is None:
            self._pending.append(load)
        else:
            load()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which rank 0 has the full state dict of the model; a collective."""
        # Weights that an evaluation has left gathered: state_dict() frees them, on rank 0 alone.
        for each in self._model.modules():
            if isinstance(each, FSDPModule):
                each.reshard()
        self._full.settled = True
        try:
            with nullcontext() if self.state is None else self.state.gathered():
                yield
        finally:
            self._full.settled = False


def _whole(forward: Callable[..., Any], kept: SideOutputs, args: Any, kwargs: Any) -> Any:
    """The result of a model without stages; its side outputs become whole as well."""
    if not kept.paths:
        return forward(*args, **kwargs)
    kept.begin()
    output = forward(*args, **kwargs)
    tree = kept.tree()
    if any(map(is_divided, tensors_in(tree))):
        kept.put_tree(gathered_activations(tree))
    return output


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""
