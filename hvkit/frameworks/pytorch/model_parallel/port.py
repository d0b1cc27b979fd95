"""The port of PyTorch's models in a mesh: the steps of ``distribute``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from hvkit.communication import collectives
from hvkit.frameworks.pytorch.divided_state.trials import why_not_by_element, why_not_by_parameter
from hvkit.frameworks.pytorch.gradients.script_hooks import ScriptHooks
from hvkit.frameworks.pytorch.initial_state import broadcast_optimizer, broadcast_tensors
from hvkit.frameworks.pytorch.model_parallel.init_recording import (
    IN_BLOCK,
    InitRecording,
    recording_of,
)
from hvkit.frameworks.pytorch.model_parallel.mesh_checkpoints import (
    MeshModelState,
    MeshOptimizerState,
    MeshSync,
)
from hvkit.frameworks.pytorch.model_parallel.mesh_gradients import NonFiniteInMesh
from hvkit.frameworks.pytorch.model_parallel.parallel_model import ParallelModel
from hvkit.frameworks.pytorch.optimizers import parameters_of
from hvkit.frameworks.pytorch.port import PyTorchPort
from hvkit.frameworks.pytorch.refusals import is_divided, refuse_sparse
from hvkit.frameworks.pytorch.step_hooks import Feature, Order, UpdateHooks
from hvkit.runtime import all_ranks
from hvkit.strategies.strategy import Averaging
from hvkit.sync.port import Options, Record, Sync


class MeshPort(PyTorchPort):
    """A module in a mesh, and the optimizers that update it.

    The ranks of ``options.group`` hold the same part of the model. The strategy keeps them in step
    as without a mesh.
    """

    _recording: InitRecording | None = None
    _sync: MeshSync | None = None

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Any], options: Options
    ) -> None:
        assert options.mesh is not None
        self.mesh = options.mesh
        if any(hasattr(model, "_orig_mod") for model in models):
            raise ValueError(
                f"torch.compile(model) compiles the whole model, of which each rank of "
                f"{self.mesh.mesh} runs a part: compile its blocks instead, "
                "`for block in model.blocks: block.compile()`"
            )
        super().__init__(models, optimizers, options)
        if len(models) > 1:
            raise ValueError(
                f"mesh={self.mesh.mesh} takes one model, got {len(models)}: pass one module "
                "that contains them"
            )
        if self.mesh.mesh.shard > 1:
            refuse_sparse(self.mesh.mesh, self.model)
        for name, module in self.model.named_modules():
            hooks = module._forward_pre_hooks.values()
            if self.mesh.mesh.pipeline > 1 and any(isinstance(each, WeightNorm) for each in hooks):
                raise ValueError(
                    f"torch.nn.utils.weight_norm keeps the result of a forward pass in {name!r}, "
                    "which no other rank of a pipeline can take over: use "
                    "torch.nn.utils.parametrizations.weight_norm"
                )
        parameters = set(self.model.parameters())
        why_not = why_not_by_parameter if self.mesh.mesh.tensor == 1 else why_not_by_element
        for each in self.optimizers:
            for p in parameters_of(each):
                if p not in parameters:
                    raise ValueError(
                        f"{type(each).__name__} updates a parameter of shape {tuple(p.shape)} that "
                        f"is not in the model, and ranks of {self.mesh.mesh} keep in step what is: "
                        "make it a parameter of the model, and compute with it in forward()"
                    )
            if why := why_not(each):
                raise ValueError(
                    f"optimizer {type(each).__name__} cannot update a model whose parameters are "
                    f"on several ranks: {why}"
                )

    def _make_deferred(self, models: Sequence[nn.Module]) -> None:
        # Each rank makes its part when the model is divided.
        self._recording = recording_of(models[0])

    def _is_deferred(self, tensor: torch.Tensor) -> bool:
        return self._recording is not None and tensor.is_meta

    def facts(self) -> list[str]:
        if self._recording is None:
            return super().facts()
        return [*super().facts(), f"{len(self._recording.random_state)} random draws {IN_BLOCK}"]

    def synchronise(self) -> None:
        group = all_ranks()
        if (recording := self._recording) is not None:
            states = recording.random_state
            of_rank_0 = collectives.broadcast_bytes(states.numpy().reshape(-1))
            recording.start_from(torch.from_numpy(of_rank_0.copy()).view(-1, states.shape[1]))
            recording.make([t for t in recording.tensors() if not isinstance(t, nn.Parameter)])
            return
        broadcast_tensors([*self.parameters.values(), *self.model.buffers()], group)
        for optimizer in self.optimizers:
            broadcast_optimizer(optimizer, group)

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Sync | None]:
        self._synchronise_batch_norm()
        name = self.options.group.numbered("hvkit")
        hooks = {each: UpdateHooks() for each in self.optimizers}
        if self.options.on_nonfinite != "ignore":
            gradients = NonFiniteInMesh(self.options.on_nonfinite, self.model)
            for optimizer, around in hooks.items():
                gradients.attach(optimizer, around)
        self._sync = self._new_sync()
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        parallel = ParallelModel(
            self.model,
            self.optimizers,
            self.mesh,
            torch.device("cpu" if gpu is None else f"cuda:{gpu}"),
            name,
            functools.partial(self._train_part, hooks, name),
            (lambda: None) if self._sync is None else self._sync.load_pending,
            self._recording,
            self._rounded(),
        )
        # The model keeps it; a record must hold no reference to the model.
        proxy: Any = weakref.proxy(parallel)
        divided = functools.partial(ParallelModel.require_division, proxy)
        whole = parallel.whole
        feature = Feature(
            Order.DIVISION,
            before=divided,
            update_begins=whole.begin_update,
            update_ends=whole.end_update,
        )
        for each in hooks.values():
            each.add(feature)
        self._parallel: ParallelModel = proxy
        of_model = Record(
            gathered=functools.partial(ParallelModel.gathered, proxy),
            numbers=proxy,
            sharded=MeshModelState(proxy, self._sync),
            sharded_sync=self._sync,
        )
        of_optimizers: list[tuple[Any, Record]] = []
        for optimizer, found in self._attach(hooks, divided=True):
            its: Any = weakref.proxy(optimizer)
            sharded = MeshOptimizerState(proxy, self._sync, its)
            of_optimizers.append((optimizer, replace(found, sharded=sharded)))
        return [(self.model, of_model), *of_optimizers], self._sync

    def _rounded(self) -> Literal["gradients", "weights", "nothing"]:
        """The means over ranks with the same part that two stages would round differently.

        A ring adds each element in an order that depends on its place in the message. The sum of
        two numbers does not depend on the order.
        """
        ranks, compressed = self.options.group.size, self.options.compression is not None
        if ranks == 1:
            return "nothing"
        if isinstance(self.options.strategy, Averaging):
            return "gradients" if compressed or ranks > 2 else "nothing"
        return "weights" if compressed else "nothing"

    def _new_sync(self) -> MeshSync | None:
        strategy, compression = self.options.strategy, self.options.compression
        if self.options.group.size == 1 or self.mesh.mesh.shard > 1:
            return None
        if isinstance(strategy, Averaging):
            sent = strategy.gradient_compression(compression)
            if sent is None or not sent.keeps_state:
                return None
        names = [name for name, _ in self.model.named_parameters()]
        return MeshSync(strategy, compression, self.mesh, names)

    def _train_part(
        self,
        hooks: dict[Optimizer, UpdateHooks],
        name: str,
        own: dict[str, nn.Parameter],
        norms: nn.ModuleList,
    ) -> Callable[[], Callable[[], None]]:
        """Keep this rank's part in step; return what to call before each backward pass."""
        if self.mesh.mesh.shard > 1:  # PyTorch averages the gradients
            if len(norms) and self.options.batch_norm == "average":
                raise ValueError(
                    "batch norm keeps statistics of each rank's own batches, which "
                    f"{self.mesh.mesh} does not average along its shard axis: use group norm, or "
                    'batch_norm="local", and evaluate on all ranks'
                )
        elif self.options.group.size > 1:
            self.parameters = own
            sync = self._keep_weights_in_step(
                hooks,
                name,
                self._averaged_statistics(norms),
                follows_passes=self.mesh.mesh.pipeline == 1,
            )
            if self._sync is not None:
                parallel = self._parallel
                assert sync is not None
                assert parallel.state is not None
                self._sync.divided(sync, parallel.state, list(own), parallel.layout)
        self._let_hooks_wait(own)
        return self._begin_pass

    def _let_hooks_wait(self, own: dict[str, nn.Parameter]) -> None:
        """Call the script's hooks on parameters with full gradients of the whole batch."""
        state = self._parallel.state
        assert state is not None
        if self.reducer is not None:
            hooks = self._script_hooks = self.reducer.script_hooks
        else:
            names: dict[torch.Tensor, str] = {
                p: f"parameter {name}" for name, p in own.items() if not is_divided(p)
            }
            # Autograd's gradients are those of the batch, unless a pipeline divides it.
            hooks = self._script_hooks = ScriptHooks(names.__getitem__, lambda: "")
            hooks.add(names)
        if self.mesh.mesh.tensor > 1:
            hooks.divide(state.full_gradient, state.gradient_slice)

    def _begin_pass(self) -> Callable[[], None]:
        if self.reducer is None:
            self._script_hooks.begin(divided=True)
            return self._script_hooks.run
        self.reducer.begin_pass()
        return self.reducer.end_pass
