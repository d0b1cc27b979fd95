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

from hvkit.communication.traffic import count
from hvkit.frameworks.pytorch.divided_state.fully_shard import part_like
from hvkit.frameworks.pytorch.divided_state.sharded import PartOfState, partial_state
from hvkit.frameworks.pytorch.model_parallel.tensor.placements import (
    Placement,
    part_of,
    whole_of,
)
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
        return part_of(whole, placement, self._mesh.get_local_rank(), self._mesh.size())

    def whole_shape(self, name: str, like: torch.Tensor) -> torch.Size:
        """The shape of a whole parameter, from what this rank has of it."""
        placement = self.placements.get(name)
        return like.shape if placement is None else self._whole_shape(placement, like)

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
        sends: whether it sends what it holds; ranks with other shares of the same do not.
    """

    def __init__(
        self,
        model: nn.Module,
        holder: Mapping[str, int],
        group: dist.ProcessGroup,
        shares: PartsOfParameters,
        *,
        collects: bool,
        sends: bool,
    ) -> None:
        self.holder = holder
        self._group = group
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank(group)
        self._shares, self._collects, self._sends = shares, collects, sends
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

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Let ``state_dict`` return whole tensors on rank 0 for a while; a collective."""
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
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
                state[prefix + name] = self._shares.of(self._names[held], value, held)

    def own_of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers by name, as they are."""
        parameters = {n: p.detach() for n, p in self._parameters.items() if not p.is_meta}
        return parameters | dict(model.named_buffers())

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
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        named = {self._names[p]: p for p in parameters}
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
