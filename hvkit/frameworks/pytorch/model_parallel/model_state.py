"""A model and its optimizers whose ranks hold parts: giving up the rest, gathering, and loading.

Files stay those of the plain model: rank 0 saves whole tensors, and loading takes this rank's part
of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.divided_state.sharded import (
    PartOfState,
    part_of_state,
    partial_state,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.torch_channel import TorchChannel
from hvkit.frameworks.pytorch.model_parallel.sharded_tensors import (
    SavedTensor,
    blocks_of,
    described,
    described_state,
)
from hvkit.frameworks.pytorch.model_parallel.slices import Slicing
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import bytes_of, tensors_in
from hvkit.frameworks.pytorch.model_parallel.whole_parameters import show, slicing_of
from hvkit.transport.traffic import count
from hvkit.watch.calls import call, translated, waiting


class ModelState:
    """Who holds which parameter and buffer of a model, and all of it on rank 0 for a while.

    Args:
        model: on every rank.
        holder: by parameter and buffer, the rank along the pipeline that holds it.
        links: to the ranks of the pipeline.
        slicings: of this rank's parameters, by name.
        collects: whether this rank holds a part of the model that rank 0 collects.
        first_slice: whether it is the first of those with other slices along the tensor axis.
        first_shard: whether it is the first of those along the shard axis.
    """

    def __init__(
        self,
        model: nn.Module,
        holder: Mapping[str, int],
        links: TorchChannel,
        slicings: Mapping[str, Slicing],
        *,
        collects: bool,
        first_slice: bool,
        first_shard: bool,
    ) -> None:
        self._holder = holder
        self._links, self._rank = links, dist.get_rank(links.group)
        self._slicings, self._collects = slicings, collects
        self._first_slice, self._first_shard = first_slice, first_shard
        # Ranks with other slices of the same do not send what is put together from all.
        self._sends = first_shard and first_slice
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

    def shape_of(self, name: str) -> torch.Size:
        """The shape of what this rank has of a parameter."""
        return self._parameters[name].shape

    def full_shape_of(self, name: str) -> torch.Size:
        """The shape of the full parameter, of which this rank has some."""
        return self.slicing(name).shape(self._parameters[name])

    def slicing(self, name: str) -> Slicing:
        """How a parameter or buffer is divided, of which this rank has some."""
        return self._slicings.get(name, _WHOLE)

    def full_gradient(self, parameter: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The full gradient of a parameter, from this rank's; a collective of those with some."""
        with call("the model's forward or backward pass"), translated(), waiting():
            return self.slicing(self._names[parameter]).joined(own, "gradients")

    def own_gradient(self, parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the full gradient of a parameter."""
        return self.slicing(self._names[parameter]).own_like(full, parameter)

    @contextmanager
    def gathered(self, model: nn.Module, prefix: str = "") -> Iterator[None]:
        """Let ``state_dict`` return full tensors on rank 0 for a while; a collective.

        Args:
            model: all of it, or a part.
            prefix: of the names of this part.
        """
        own = self._tensors(model, prefix)
        names = [name for name in self._holder if name.startswith(prefix)]
        self._whole |= self.collected(own, names)
        try:
            yield
        finally:
            for name in names:
                self._whole.pop(name, None)

    def _tensors(self, model: nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
        """All parameters, and the buffers of a part of the model, as this rank has them."""
        # The model itself may hold gathered weights, whose memory PyTorch is about to free.
        tensors = {**self._parameters, **{prefix + n: b for n, b in model.named_buffers()}}
        return {name: t.detach() for name, t in tensors.items()}

    @torch.no_grad()
    def full_everywhere(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All parameters and buffers in full on every rank, by name; a collective."""
        found, links, own = {}, self._links, self._tensors(model)
        with call("generate()"), links.waiting():
            for name, source in self._holder.items():
                if source == self._rank:
                    t = self.slicing(name).joined(own[name], "weights").clone()
                else:
                    t = torch.empty(own[name].shape, dtype=own[name].dtype, device=links.device)
                if len(links.ranks) > 1:
                    count("weights", t.nbytes if source == self._rank else 0)
                    dist.broadcast(t, links.ranks[source], group=links.group)
                trained = name in self._parameters and self._parameters[name].requires_grad
                found[name] = nn.Parameter(t, trained) if name in self._parameters else t
        return found

    def collected(self, things: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Things of all ranks on rank 0, one at a time; empty on others.

        Args:
            things: tensors, or states of parameters, by name; those that other ranks hold count
                there.
            names: of all of them, in the same order on every rank.
        """
        found: dict[str, Any] = {}
        with call("hvkit.settled"), translated(), waiting():
            for name in names if self._collects else ():
                source, thing = self._holder[name], None
                if source == self._rank:
                    thing = self._whole_of(name, things.get(name))
                if not self._sends:
                    continue
                if source != self._rank == 0:
                    box: list[Any] = [None]
                    dist.recv_object_list(box, self._links.ranks[source], group=self._links.group)
                    thing = box[0]
                elif source == self._rank != 0:
                    count("objects", bytes_of(tensors_in(thing)))
                    dist.send_object_list([thing], self._links.ranks[0], group=self._links.group)
                if self._rank == 0:
                    found[name] = thing
        return found

    def _whole_of(self, name: str, thing: Any) -> Any:
        """A tensor of a parameter whole, or those in a parameter's state, in host memory."""
        if isinstance(thing, Mapping):
            return {key: self._whole_of(name, value) for key, value in thing.items()}
        if isinstance(thing, torch.Tensor):
            own = thing.detach()
            full = self.slicing(name).joined(own, "objects") if thing.dim() else own
            return full.cpu() if self._sends else None
        return thing

    def _give_whole(
        self, path: str, module: nn.Module, state: dict[str, Any], prefix: str, _: Any
    ) -> None:
        """After ``state_dict`` of the module at this path: its own tensors, whole."""
        own = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        names = {name: self._names[p] for name, p in own}
        buffers = {name: path + name for name, _ in module.named_buffers(recurse=False)}
        names |= {name: full for name, full in buffers.items() if full in self._holder}
        for name, whole in names.items():
            if prefix + name not in state:  # a buffer that is not saved
                continue
            if whole in self._whole:
                state[prefix + name] = self._whole[whole]
            elif self._holder[whole] != self._rank or self.slicing(whole):
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
                own = self.slicing(self._names[held]).own_like(value, held)
                slicing = slicing_of(held)
                # PyTorch compares shapes, of which the parameter shows that of the whole.
                state[prefix + name] = own if slicing is None else show(own, slicing)

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
            for name, source in self._holder.items()
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
        first_slice = self._first_slice or self.slicing(name).placement
        if not first_slice or not (self._first_shard or isinstance(own, DTensor)):
            return None
        full = (*self.full_shape_of(name), *own.shape[held.dim() :])
        return described(local, full, self.slicing(name).blocks(own.shape, held))

    def _is_like(self, own: torch.Tensor, held: torch.Tensor) -> bool:
        """Whether a tensor is divided as the parameter is that it belongs to."""
        return isinstance(own, DTensor) == isinstance(held, DTensor) and (
            own.shape[: held.dim()] == held.shape
        )

    def part_of_saved(self, name: str, saved: SavedTensor) -> torch.Tensor:
        """This rank's part of a tensor of a parameter, or a buffer, in a sharded checkpoint."""
        held = self._parameters.get(name)
        if held is None or saved.shape[: held.dim()] != self.full_shape_of(name):
            return saved.whole()
        more = saved.shape[held.dim() :]
        local = held.to_local() if isinstance(held, DTensor) else held
        own = torch.empty((*local.shape, *more), dtype=saved.dtype, device=held.device)
        saved.fill(own, self.slicing(name).blocks((*held.shape, *more), held))
        if not isinstance(held, DTensor):
            return own
        mesh, placements = held.device_mesh, held.placements
        shape, stride = held.shape, held.stride()
        return DTensor.from_local(
            own, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def attach(self, optimizer: Optimizer) -> None:
        """Keep the part of an optimizer's state that belongs to this rank's parameters."""
        for p in list(optimizer.state):
            if p.is_meta:
                del optimizer.state[p]
            else:
                optimizer.state[p] = self.share_of_state(p, optimizer.state[p])
        own = _OwnState(optimizer, self)
        optimizer.register_load_state_dict_pre_hook(own.take_own)
        optimizer.register_load_state_dict_post_hook(_drop_state_of_others)

    def share_of_state(self, p: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's share of a parameter's state."""
        return {
            key: self.slicing(self._names[p]).own_like(value, p)
            if isinstance(value, torch.Tensor) and value.dim()
            else value
            for key, value in state.items()
        }

    def state_of(self, optimizer: Optimizer) -> dict[torch.Tensor, Any] | None:
        """The state of all parameters on rank 0, None on others; a collective."""
        named = self.named(optimizer)
        own = {name: optimizer.state.get(p) for name, p in named.items()}
        found = self.collected(own, named)
        if not self.keeps_whole:
            return None
        return {named[name]: state for name, state in found.items() if state is not None}


_WHOLE = Slicing()


class _OwnState(PartOfState):
    """An optimizer that holds the state of this rank's parameters."""

    def __init__(self, optimizer: Optimizer, model: ModelState) -> None:
        super().__init__(optimizer)
        self._model = model

    def take_own(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Before loading: take this rank's slices."""
        parameters = self._parameters()
        own = {
            i: values
            if not isinstance(i, int) or i >= len(parameters) or parameters[i].is_meta
            else self._model.share_of_state(parameters[i], values)
            for i, values in state["state"].items()
        }
        return {**state, "state": own}

    def own(self) -> dict[str, Any]:
        """The state dict with the state of this rank's parameters only."""
        before, self._may_save = self._may_save, True
        try:
            return self._optimizer.state_dict()
        finally:
            self._may_save = before

    def _full_state(self) -> dict[torch.Tensor, Any] | None:
        return self._model.state_of(self._optimizer)


def rank_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict with the state of this rank's parameters only; empty before there are any."""
    part = part_of_state(optimizer)
    return part.own() if isinstance(part, _OwnState) else {}


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


_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors


def _drop_state_of_others(optimizer: Optimizer) -> None:
    """After loading: leave out the state of parameters that other ranks hold."""
    for p in [p for p in optimizer.state if isinstance(p, torch.Tensor) and p.is_meta]:
        del optimizer.state[p]
