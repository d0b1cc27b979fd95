"""The state of a model and its optimizers in a mesh: dropping, gathering and loading parts of it.

Files stay those of the plain model: rank 0 saves full tensors, and loading takes this rank's part
of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hvkit.frameworks.pytorch.divided_state.sharded import (
    PartOfState,
    part_of_state,
    partial_state,
)
from hvkit.frameworks.pytorch.model_parallel.sharded_tensors import (
    SavedState,
    SavedTensor,
    blocks_of,
    described,
    described_state,
    with_tensors_of,
)
from hvkit.frameworks.pytorch.model_parallel.side_outputs import HOOKS
from hvkit.frameworks.pytorch.model_parallel.slices import Slicing, local_part
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import bytes_of, tensors_in
from hvkit.frameworks.pytorch.model_parallel.whole_parameters import show, slicing_of
from hvkit.frameworks.pytorch.optimizers import parameters_of
from hvkit.frameworks.pytorch.torch_distributed import TorchChannel
from hvkit.mesh import MeshPosition
from hvkit.transport.traffic import count
from hvkit.watch.calls import call, translated, waiting


class ModelState:
    """Gathers parameters and buffers on rank 0, or on all ranks.

    ``holder`` has the rank along the pipeline that holds each; ``slicings`` are of this rank's
    parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        holder: Mapping[str, int],
        links: TorchChannel,
        slicings: Mapping[str, Slicing],
        position: MeshPosition,
    ) -> None:
        # Optimizers keep this object, too, and may outlive the model.
        self._model: Any = weakref.proxy(model)
        self._holder = holder
        self._links, self._rank = links, position.along("pipeline")
        self._slicings = slicings
        # Whether this rank is in rank 0's replica of the model.
        self._collects = position.along("data") == 0
        self._first_slice = position.along("tensor") == 0
        self._first_shard = position.along("shard") == 0
        # All slices of a tensor are gathered on each of their ranks: one of these sends it.
        self._sends = self._first_shard and self._first_slice
        # The full tensors by name, on rank 0 inside ``gathered``.
        self._full: dict[str, torch.Tensor] = {}
        self._parameters = dict(model.named_parameters())
        self._names: dict[torch.Tensor, str] = {p: name for name, p in self._parameters.items()}
        for path, module in model.named_modules():
            hooked: Any = module
            prefix = f"{path}." if path else ""
            hooked.register_state_dict_post_hook(functools.partial(self._put_full, prefix))
            hooked.register_load_state_dict_pre_hook(self._take_slices)

    @property
    def keeps_whole(self) -> bool:
        """Whether this rank is the one that holds the whole state in ``gathered``."""
        return self._collects and self._sends and self._rank == 0

    def shape_of(self, name: str) -> torch.Size:
        return self._parameters[name].shape

    def full_shape_of(self, name: str) -> torch.Size:
        return self.slicing(name).shape(self._parameters[name])

    def slicing(self, name: str) -> Slicing:
        return self._slicings.get(name, Slicing())

    def counts(self, name: str) -> bool:
        """Whether this rank is the first with its slice of a parameter, or with the full one."""
        slicing = self.slicing(name)
        first_slice = self._first_slice or slicing.placement is not None
        first_shard = self._first_shard or slicing.shards is not None
        return self._holder[name] == self._rank and first_slice and first_shard

    def full_gradient(self, parameter: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The full gradient of a parameter, from this rank's slice; a collective of its ranks."""
        with call("the model's forward or backward pass"), translated(), waiting():
            return self.slicing(self._names[parameter]).gather(own, "gradients")

    def gradient_slice(self, parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the full gradient of a parameter."""
        return self.slicing(self._names[parameter]).slice_like(full, parameter)

    @contextmanager
    def gathered(self, prefix: str = "") -> Iterator[None]:
        """Let ``state_dict`` return full tensors on rank 0, of all or a part; a collective."""
        names = [name for name in self._holder if name.startswith(prefix)]
        self._full |= self.collected(self._tensors(), names)
        try:
            yield
        finally:
            for name in names:
                self._full.pop(name, None)

    def _tensors(self) -> dict[str, torch.Tensor]:
        # The model itself may hold gathered weights, whose memory PyTorch is about to free.
        tensors = {**self._parameters, **dict(self._model.named_buffers())}
        return {name: t.detach() for name, t in tensors.items()}

    @torch.no_grad()
    def full_everywhere(self) -> dict[str, torch.Tensor]:
        """The full parameters and buffers on every rank, by name; a collective."""
        found, links, own = {}, self._links, self._tensors()
        with call("generate()"), links.waiting():
            for name, source in self._holder.items():
                if source == self._rank:
                    t = self.slicing(name).gather(own[name], "weights").clone()
                else:
                    t = torch.empty(own[name].shape, dtype=own[name].dtype, device=links.device)
                if len(links.ranks) > 1:
                    count("weights", t.nbytes if source == self._rank else 0)
                    dist.broadcast(t, links.ranks[source], group=links.group)
                trained = name in self._parameters and self._parameters[name].requires_grad
                found[name] = nn.Parameter(t, trained) if name in self._parameters else t
        return found

    def collected(self, values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Gather full values on rank 0, one at a time; empty on others.

        The values are this rank's tensors, or states of parameters; the names are those of all
        ranks, in the same order on every rank.
        """
        found: dict[str, Any] = {}
        with call("hvkit.settled"), translated(), waiting():
            for name in names if self._collects else ():
                source, value = self._holder[name], None
                if source == self._rank:
                    full = functools.partial(self._full_on_host, name)
                    value = tree_map_only(torch.Tensor, full, values.get(name))
                if not self._sends:
                    continue
                if source != self._rank == 0:
                    box: list[Any] = [None]
                    dist.recv_object_list(box, self._links.ranks[source], group=self._links.group)
                    value = box[0]
                elif source == self._rank != 0:
                    count("objects", bytes_of(tensors_in(value)))
                    dist.send_object_list([value], self._links.ranks[0], group=self._links.group)
                if self._rank == 0:
                    found[name] = value
        return found

    def _full_on_host(self, name: str, own: torch.Tensor) -> torch.Tensor | None:
        """A full tensor of a parameter, or of its state, in host memory; a collective."""
        own = own.detach()
        full = self.slicing(name).gather(own, "objects") if own.dim() else own
        return full.cpu() if self._sends else None

    def _put_full(
        self, path: str, module: nn.Module, state: dict[str, Any], prefix: str, _: Any
    ) -> None:
        """After ``state_dict`` of the module at this path: put full tensors into it."""
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        names = {name: self._names[p] for name, p in parameters}
        names |= {name: path + name for name, _ in module.named_buffers(recurse=False)}
        for name, full_name in names.items():
            if prefix + name not in state or full_name not in self._holder:
                continue  # a buffer that is not saved, or not of the first call
            if full_name in self._full:
                state[prefix + name] = self._full[full_name]
            elif self._holder[full_name] != self._rank or self.slicing(full_name):
                raise partial_state("state_dict()", module, "model")

    def _take_slices(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Before loading: take this rank's slices, and no parameters of other ranks."""
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor):
                continue
            if p.is_meta:
                state[prefix + name] = value.to("meta")
            else:
                own = self.slicing(self._names[p]).slice_like(value, p)
                slicing = slicing_of(p)
                # PyTorch compares shapes, and the parameter shows that of the full tensor.
                state[prefix + name] = own if slicing is None else show(own, slicing)

    def slices(self) -> dict[str, torch.Tensor]:
        """This rank's slices of parameters, and its buffers, by name."""
        parameters = {n: p.detach() for n, p in self._parameters.items() if not p.is_meta}
        return parameters | dict(self._model.named_buffers())

    def named_state(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The state dict without tensors, and by its keys the names of their tensors."""
        empty = {name: torch.empty(0, device="meta") for name in self._tensors()}
        before, self._full = self._full, empty
        try:
            state = self._model.state_dict()
        finally:
            self._full = before
        name_of = {id(t): name for name, t in empty.items()}
        return state, {k: name_of[id(t)] for k, t in state.items() if id(t) in name_of}

    def named(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        return {self._names[p]: p for p in parameters_of(optimizer)}

    def saved_slices(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a sharded checkpoint, from tensors, or states of parameters."""
        found = {
            name: described_state(values[name], functools.partial(self._saved_slice, name))
            for name, source in self._holder.items()
            if self._collects and source == self._rank and values.get(name) is not None
        }
        return {name: each for name, each in found.items() if each}

    def _saved_slice(self, name: str, own: torch.Tensor) -> dict[str, Any] | None:
        """A tensor of a parameter as this rank writes it; None if another rank does."""
        own = own.detach()
        local, p, sharded = local_part(own), self._parameters.get(name), isinstance(own, DTensor)
        if p is None or sharded != isinstance(p, DTensor) or own.shape[: p.dim()] != p.shape:
            return described(local, local.shape, blocks_of(local.shape)) if self._sends else None
        if not self.counts(name):
            return None
        full = (*self.full_shape_of(name), *own.shape[p.dim() :])
        return described(local, full, self.slicing(name).blocks(own.shape, p))

    def part_of_saved(self, name: str, saved: SavedState) -> Any:
        """This rank's part of a parameter, its state, or a buffer, in a sharded checkpoint."""
        return with_tensors_of(saved.values[name], functools.partial(self._part_of_tensor, name))

    def _part_of_tensor(self, name: str, saved: SavedTensor) -> torch.Tensor:
        p = self._parameters.get(name)
        if p is None or saved.shape[: p.dim()] != self.full_shape_of(name):
            return saved.full()
        more = saved.shape[p.dim() :]
        own = torch.empty((*local_part(p).shape, *more), dtype=saved.dtype, device=p.device)
        saved.fill(own, self.slicing(name).blocks((*p.shape, *more), p))
        if not isinstance(p, DTensor):
            return own
        return DTensor.from_local(
            own, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    def attach(self, optimizer: Optimizer) -> None:
        """Keep the part of an optimizer's state that belongs to this rank's parameters."""
        for p in list(optimizer.state):
            if p.is_meta:
                del optimizer.state[p]
            else:
                optimizer.state[p] = self.state_slices(p, optimizer.state[p])
        slices = _OptimizerSlices(optimizer, self)
        optimizer.register_load_state_dict_pre_hook(slices.take_slices)
        optimizer.register_load_state_dict_post_hook(_drop_state_of_others)

    def state_slices(self, p: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        return self.slicing(self._names[p]).state_slices(state, p)

    def state_of(self, optimizer: Optimizer) -> dict[torch.Tensor, Any] | None:
        """The state of all parameters on rank 0, None on others; a collective."""
        named = self.named(optimizer)
        own = {name: optimizer.state.get(p) for name, p in named.items()}
        found = self.collected(own, named)
        if not self.keeps_whole:
            return None
        return {named[name]: state for name, state in found.items() if state is not None}


class FullModel:
    """Makes ``generate`` of a model in a mesh work inside ``hvkit.settled``, on full weights.

    Hugging Face's ``generate`` calls an encoder alone, and keeps keys and values of all layers. The
    model must come before anything of it is replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._plain = [(m, type(m), vars(m).get("forward")) for m in model.modules()]
        self.settled = False
        self.state: ModelState | None = None
        if callable(getattr(type(model), "generate", None)) and "generate" not in vars(model):
            vars(model)["generate"] = self._generate

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        in_mesh = self.state if self.settled else None
        with self._plain_model(in_mesh.full_everywhere()) if in_mesh else nullcontext():
            return cast(Any, type(self._model)).generate(self._model, *args, **kwargs)

    @contextmanager
    def _plain_model(self, full: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Put back the model's classes, forwards and hooks, with full tensors, for a while."""
        before = [(m, type(m), dict(vars(m))) for m in self._model.modules()]
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        replaced = {id(t): full[name] for name, t in named if name in full}
        try:
            for module, plain_class, forward in self._plain:
                attributes = vars(module)
                module.__class__ = plain_class
                attributes.pop("forward", None)
                attributes.update({} if forward is None else {"forward": forward})
                for slots in ("_parameters", "_buffers"):
                    own = attributes[slots].items()
                    attributes[slots] = {key: replaced.get(id(t), t) for key, t in own}
                for name in HOOKS:
                    hooks = attributes[name]
                    attributes[name] = type(hooks)(
                        (key, hook) for key, hook in hooks.items() if not _is_of_mesh(hook)
                    )
                if isinstance(module, nn.RNNBase):
                    module._init_flat_weights()
            yield
        finally:
            for module, class_in_mesh, attributes in before:
                module.__class__ = class_in_mesh
                vars(module).clear()
                vars(module).update(attributes)


def _is_of_mesh(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", "")).startswith(("hvkit.", "torch.distributed."))


class _OptimizerSlices(PartOfState):
    def __init__(self, optimizer: Optimizer, model: ModelState) -> None:
        super().__init__(optimizer)
        self._model = model

    def take_slices(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        own = {i: p for i, p in enumerate(self._parameters()) if not p.is_meta}
        slices = {
            i: self._model.state_slices(own[i], values) if i in own else values
            for i, values in state["state"].items()
        }
        return {**state, "state": slices}

    def own(self) -> dict[str, Any]:
        """The state dict with this rank's slices only."""
        before, self._may_save = self._may_save, True
        try:
            return self._optimizer.state_dict()
        finally:
            self._may_save = before

    def _full_state(self) -> dict[torch.Tensor, Any] | None:
        return self._model.state_of(self._optimizer)


def rank_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict with this rank's slices only; empty before the model is divided."""
    part = part_of_state(optimizer)
    return part.own() if isinstance(part, _OptimizerSlices) else {}


def drop(parameters: Sequence[nn.Parameter]) -> None:
    """Free the memory of parameters that other ranks hold; the objects stay."""
    for p in parameters:
        if p.is_meta:
            continue
        try:
            _swap(p, nn.Parameter(p.detach().to("meta"), p.requires_grad))
        except RuntimeError as error:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} cannot be given to another rank of the "
                "pipeline, because the script still holds the result of a forward pass, or a weak "
                "reference to it: call hvkit.distribute before the first forward pass. PyTorch "
                f"says: {error}"
            ) from error


_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors


def _drop_state_of_others(optimizer: Optimizer) -> None:
    for p in [p for p in optimizer.state if isinstance(p, torch.Tensor) and p.is_meta]:
        del optimizer.state[p]
