"""A model and its optimizers whose ranks hold parts: giving up the rest, gathering, and loading.

Files stay those of the plain model: rank 0 saves whole tensors, and loading takes this rank's part
of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.divided_state.fully_shard import part_like, rows_of
from hvkit.frameworks.pytorch.divided_state.sharded import PartOfState, partial_state
from hvkit.frameworks.pytorch.model_parallel.shares import (
    Block,
    SavedTensor,
    blocks_of,
    described,
    described_state,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.placements import (
    Placement,
    part_of,
    whole_of,
)
from hvkit.frameworks.pytorch.model_parallel.whole_parameters import division_of, show
from hvkit.transport.traffic import count, of_allgather
from hvkit.watch.calls import call, translated, waiting

_HELD = "_hvkit_parts"


class PartsOfParameters:
    """Which share of a parameter a rank has, and of what has its shape: all, for most.

    Args:
        placements: by parameter, how ranks of the tensor axis divide it.
        tensor: their mesh.
    """

    def __init__(self, placements: Mapping[str, Placement], tensor: DeviceMesh) -> None:
        self.placements, self._mesh = placements, tensor

    def whole(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """The whole of what this rank has of a parameter; a collective of those that have some."""
        if isinstance(own, DTensor):
            own = own.full_tensor()
        placement = self.placements.get(name)
        if placement is None:
            return own
        parts = [torch.empty_like(own) for _ in range(self._mesh.size())]
        dist.all_gather(parts, own.contiguous(), group=self._mesh.get_group())
        return whole_of(parts, placement)

    def of(self, name: str, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This rank's share of a whole tensor.

        Args:
            name: of the parameter.
            whole: it, or what has its shape.
            like: what this rank has of the parameter.
        """
        placement = self.placements.get(name)
        if placement is not None and whole.shape == self._whole_shape(placement, like):
            whole = self.cut(name, whole)
        return part_like(whole, like) if whole.shape == like.shape else whole

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's share of what has a parameter's shape, and perhaps more dimensions."""
        placement = self.placements.get(name)
        if placement is None:
            return whole
        return part_of(whole, placement, self.index, self._mesh.size())

    def whole_shape(self, name: str, like: torch.Tensor) -> torch.Size:
        """The shape of a whole parameter, from what this rank has of it."""
        placement = self.placements.get(name)
        return like.shape if placement is None else self._whole_shape(placement, like)

    @property
    def index(self) -> int:
        """This rank's number along the tensor axis."""
        return self._mesh.get_local_rank()

    def blocks(self, name: str, shape: Sequence[int], like: torch.Tensor) -> list[Block]:
        """Which blocks of a whole tensor this rank's share of it is made of.

        Args:
            name: of the parameter.
            shape: of the share, as ``like`` has it, and perhaps more dimensions.
            like: what this rank has of the parameter.
        """
        rows = rows_of(like) if isinstance(like, DTensor) else None
        placement = self.placements.get(name)
        return blocks_of(shape, rows, placement, self.index, self._mesh.size())

    def _whole_shape(self, placement: Placement, like: torch.Tensor) -> torch.Size:
        shape = list(like.shape)
        shape[placement.dim] *= self._mesh.size()
        return torch.Size(shape)


class ModelParts:
    """Who holds which parameter and buffer of a model, and the whole of it for a while.

    Args:
        model: on every rank.
        holder: by parameter and buffer, the rank along the pipeline that holds it.
        group: the ranks of the pipeline.
        shares: of what this rank holds.
        collects: whether this rank holds a part of the model that rank 0 collects.
        first_shard: whether it is the first of those with other shares along the shard axis.
    """

    def __init__(
        self,
        model: nn.Module,
        holder: Mapping[str, int],
        group: dist.ProcessGroup,
        shares: PartsOfParameters,
        *,
        collects: bool,
        first_shard: bool,
    ) -> None:
        self.holder = holder
        self._group = group
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank(group)
        self._shares, self._collects, self._first_shard = shares, collects, first_shard
        # Ranks with other shares of the same do not send what is put together from all.
        self._sends = first_shard and shares.index == 0
        # The whole state by name, on rank 0 inside ``gathered``.
        self._whole: dict[str, torch.Tensor] = {}
        self._parameters = dict(model.named_parameters())
        self._names: dict[torch.Tensor, str] = {p: name for name, p in self._parameters.items()}
        for path, module in model.named_modules():
            hooked: Any = module
            prefix = f"{path}." if path else ""
            hooked.register_state_dict_post_hook(functools.partial(self._give_whole, prefix))
            hooked.register_load_state_dict_pre_hook(self._take_own)

    @property
    def keeps_whole(self) -> bool:
        """Whether this rank is the one that holds the whole state in ``gathered``."""
        return self._collects and self._sends and self._rank == 0

    @property
    def of_parameters(self) -> dict[str, int]:
        """``holder`` without buffers."""
        return {name: self.holder[name] for name in self._parameters}

    def shape_of(self, name: str) -> torch.Size:
        """The shape of what this rank has of a parameter."""
        return self._parameters[name].shape

    def whole_shape_of(self, name: str) -> torch.Size:
        """The shape of the whole parameter, of which this rank has some."""
        return self._shares.whole_shape(name, self._parameters[name])

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's share of what has a parameter's shape, and perhaps more dimensions."""
        return self._shares.cut(name, whole)

    def whole_gradient(self, parameter: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The whole gradient of a parameter, from this rank's; a collective of those with some."""
        count("gradients", of_allgather(own.nbytes, len(self._ranks)))
        with call("the model's forward or backward pass"), translated(), waiting():
            return self._shares.whole(self._names[parameter], own)

    def own_gradient(self, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """This rank's share of the whole gradient of a parameter."""
        return self._shares.of(self._names[parameter], whole, parameter)

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Let ``state_dict`` return whole tensors on rank 0 for a while; a collective."""
        # The model itself may hold gathered weights, whose memory PyTorch is about to free.
        tensors: dict[str, torch.Tensor] = dict(self._parameters) | dict(model.named_buffers())
        self._whole = self.collected({n: t.detach() for n, t in tensors.items()}, self.holder)
        try:
            yield
        finally:
            self._whole = {}

    def collected(self, things: Mapping[str, Any], holder: Mapping[str, int]) -> dict[str, Any]:
        """Things of all ranks on rank 0, one at a time; empty on others.

        Args:
            things: tensors, or states of parameters, by name; those that other ranks hold count
                there.
            holder: by name, in the same order on every rank.
        """
        found: dict[str, Any] = {}
        with call("hvkit.settled"), translated(), waiting():
            for name, source in holder.items() if self._collects else ():
                thing = None
                if source == self._rank:
                    thing = self._whole_of(name, things.get(name))
                if not self._sends:
                    continue
                if source != self._rank == 0:
                    box: list[Any] = [None]
                    dist.recv_object_list(box, self._ranks[source], group=self._group)
                    thing = box[0]
                elif source == self._rank != 0:
                    count("objects", _bytes_of(thing))
                    dist.send_object_list([thing], self._ranks[0], group=self._group)
                if self._rank == 0:
                    found[name] = thing
        return found

    def _whole_of(self, name: str, thing: Any) -> Any:
        """A tensor of a parameter whole, or those in a parameter's state, in host memory."""
        if isinstance(thing, Mapping):
            return {key: self._whole_of(name, value) for key, value in thing.items()}
        if isinstance(thing, torch.Tensor):
            whole = self._shares.whole(name, thing.detach()) if thing.dim() else thing.detach()
            return whole.cpu()
        return thing

    def _give_whole(
        self, path: str, module: nn.Module, state: dict[str, Any], prefix: str, _: Any
    ) -> None:
        """After ``state_dict`` of the module at this path: its own tensors, whole."""
        own = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        names = {name: self._names[p] for name, p in own}
        names |= {name: path + name for name, _ in module.named_buffers(recurse=False)}
        for name, whole in names.items():
            if prefix + name not in state:  # a buffer that is not saved
                continue
            if whole in self._whole:
                state[prefix + name] = self._whole[whole]
            elif (
                self.holder[whole] != self._rank
                or whole in self._shares.placements
                or isinstance(state[prefix + name], DTensor)
            ):
                raise partial_state("state_dict()", module, "model")

    def _take_own(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Before loading: take this rank's share, and leave out what other ranks hold."""
        for name, held in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor):
                continue
            if held.is_meta:
                state[prefix + name] = value.to("meta")
            else:
                own = self._shares.of(self._names[held], value, held)
                division = division_of(held)
                # PyTorch compares shapes, of which the parameter shows that of the whole.
                state[prefix + name] = own if division is None else show(own, division)

    def own_of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers by name, as they are."""
        parameters = {n: p.detach() for n, p in self._parameters.items() if not p.is_meta}
        return parameters | dict(model.named_buffers())

    def named_state(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
        """The state dict without tensors, and by its keys the names of what it holds whole."""
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        whole: dict[str, torch.Tensor] = {name: torch.empty(0, device="meta") for name in named}
        before, self._whole = self._whole, whole
        try:
            state = model.state_dict()
        finally:
            self._whole = before
        of_whole = {id(t): name for name, t in whole.items()}
        return state, {k: of_whole[id(t)] for k, t in state.items() if id(t) in of_whole}

    def named(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """The parameters of an optimizer by name, in its order."""
        return {self._names[p]: p for group in optimizer.param_groups for p in group["params"]}

    def shares_of(self, things: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank writes into a sharded checkpoint.

        Args:
            things: tensors, or states of parameters, by name; those that other ranks hold do not
                count.
        """
        found = {
            name: described_state(things[name], functools.partial(self._share, name))
            for name, source in self.holder.items()
            if self._collects and source == self._rank and things.get(name) is not None
        }
        return {name: each for name, each in found.items() if each}

    def _share(self, name: str, own: torch.Tensor) -> dict[str, Any] | None:
        """A tensor of a parameter as this rank writes it; None if another rank does."""
        own = own.detach()
        local = own.to_local() if isinstance(own, DTensor) else own
        held = self._parameters.get(name)
        if held is None or not self._is_like(own, held):
            return described(local, local.shape, blocks_of(local.shape)) if self._sends else None
        first = self._first_shard or isinstance(own, DTensor)
        if not first or not (self._shares.index == 0 or name in self._shares.placements):
            return None
        more = own.shape[held.dim() :]
        whole = (*self._shares.whole_shape(name, held), *more)
        return described(local, whole, self._shares.blocks(name, own.shape, held))

    def _is_like(self, own: torch.Tensor, held: torch.Tensor) -> bool:
        """Whether a tensor is divided as the parameter is that it belongs to."""
        return isinstance(own, DTensor) == isinstance(held, DTensor) and (
            own.shape[: held.dim()] == held.shape
        )

    def part_of_saved(self, name: str, saved: SavedTensor) -> torch.Tensor:
        """This rank's part of a tensor of a parameter, or a buffer, in a sharded checkpoint."""
        held = self._parameters.get(name)
        if held is None or saved.shape[: held.dim()] != self._shares.whole_shape(name, held):
            return saved.whole()
        more = saved.shape[held.dim() :]
        local = held.to_local() if isinstance(held, DTensor) else held
        own = torch.empty((*local.shape, *more), dtype=saved.dtype, device=held.device)
        saved.fill(own, self._shares.blocks(name, (*held.shape, *more), held))
        if not isinstance(held, DTensor):
            return own
        mesh, placements = held.device_mesh, held.placements
        shape, stride = held.shape, held.stride()
        return DTensor.from_local(
            own, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def attach(self, optimizer: Optimizer) -> None:
        """Keep the part of an optimizer's state that belongs to this rank's parameters."""
        held = _HeldState(optimizer, self)
        vars(optimizer)[_HELD] = held
        for p in list(optimizer.state):
            if p.is_meta:
                del optimizer.state[p]
            else:
                optimizer.state[p] = self.share_of_state(p, optimizer.state[p])
        optimizer.register_state_dict_pre_hook(held.refuse_partial_state)
        optimizer.register_load_state_dict_pre_hook(held.take_own)
        optimizer.register_load_state_dict_post_hook(_drop_state_of_others)
        vars(optimizer)["__getstate__"] = held.refuse_copy

    def share_of_state(self, p: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's share of a parameter's state."""
        return {
            key: self._shares.of(self._names[p], value, p)
            if isinstance(value, torch.Tensor) and value.dim()
            else value
            for key, value in state.items()
        }

    def state_of(self, optimizer: Optimizer) -> dict[torch.Tensor, Any]:
        """The state of all parameters on rank 0, empty on others; a collective."""
        named = self.named(optimizer)
        mine = {name: optimizer.state.get(p) for name, p in named.items()}
        found = self.collected(mine, {name: self.holder[name] for name in named})
        return {named[name]: state for name, state in found.items() if state is not None}


class _HeldState(PartOfState):
    """An optimizer that holds the state of this rank's parameters."""

    def __init__(self, optimizer: Optimizer, parts: ModelParts) -> None:
        super().__init__(optimizer)
        self._parts = parts

    def take_own(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Before loading: take this rank's shares."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = {
            i: values
            if not isinstance(i, int) or parameters[i].is_meta
            else self._parts.share_of_state(parameters[i], values)
            for i, values in state["state"].items()
        }
        return {**state, "state": own}

    def own(self) -> dict[str, Any]:
        """The state dict with the state of this rank's parameters only."""
        before, self._whole = self._whole, True
        try:
            return self._optimizer.state_dict()
        finally:
            self._whole = before

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the whole state on rank 0 for a while; a collective."""
        state = self._optimizer.state
        before = dict(state)
        whole = self._parts.state_of(self._optimizer)
        if self._parts.keeps_whole:
            state.update(whole)
            self._whole = True
        try:
            yield
        finally:
            self._whole = False
            state.clear()
            state.update(before)


def gathered(optimizer: Optimizer) -> Any:
    """A context in which rank 0 holds the optimizer's whole state; a collective."""
    return vars(optimizer)[_HELD].gathered()


def own_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict with the state of this rank's parameters only; empty before there are any."""
    held: _HeldState | None = vars(optimizer).get(_HELD)
    return {} if held is None else held.own()


def drop(parameters: Sequence[nn.Parameter]) -> None:
    """Free the memory of parameters that other ranks hold; the objects stay.

    Raises:
        ValueError: something still holds what PyTorch knows of one of them.
    """
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


class LoadedBefore:
    """What a script loads into a model without weights: kept until this rank has its part.

    Args:
        model: built under ``hvkit.deferred_init``.
        optimizers: of it.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._state: dict[str, Any] = {}
        self._strict = True
        self._states: dict[Optimizer, dict[str, Any]] = {}
        self._model = model
        vars(model)["load_state_dict"] = self._keep
        self._hooks = [
            each.register_load_state_dict_pre_hook(self._keep_state) for each in optimizers
        ]

    def _keep(self, state_dict: Mapping[str, Any], strict: bool = True, **_: Any) -> Any:
        """In place of ``load_state_dict``, which would copy values into tensors without memory."""
        self._state, self._strict = dict(state_dict), strict
        own = self._model.state_dict().keys()
        missing, unexpected = own - state_dict.keys(), state_dict.keys() - own
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self._model).__name__}: missing keys "
                f"{sorted(missing)}, unexpected keys {sorted(unexpected)}"
            )
        return _IncompatibleKeys(sorted(missing), sorted(unexpected))

    def _keep_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        self._states[optimizer] = {**state, "state": dict(state["state"])}
        return {**state, "state": {}}

    def load(self) -> None:
        """Load it now."""
        for hook in self._hooks:
            hook.remove()
        del vars(self._model)["load_state_dict"]
        if self._state:
            self._model.load_state_dict(self._state, self._strict)
        for optimizer, state in self._states.items():
            optimizer.load_state_dict(state)
        self._state, self._states = {}, {}


_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors


def _drop_state_of_others(optimizer: Optimizer) -> None:
    """After loading: leave out the state of parameters that other ranks hold."""
    for p in [p for p in optimizer.state if isinstance(p, torch.Tensor) and p.is_meta]:
        del optimizer.state[p]


def _bytes_of(thing: Any) -> int:
    if isinstance(thing, torch.Tensor):
        return thing.numel() * thing.element_size()
    if isinstance(thing, Mapping):
        return sum(map(_bytes_of, thing.values()))
    return 0
