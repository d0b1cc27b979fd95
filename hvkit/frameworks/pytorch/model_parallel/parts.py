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
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from hvkit.communication.traffic import count
from hvkit.frameworks.pytorch.divided_state.sharded import PartOfState, partial_state
from hvkit.watch.calls import call, translated, waiting

_HELD = "_hvkit_parts"


class ModelParts:
    """Who holds which parameter and buffer of a model, and the whole of it for a while.

    Args:
        model: on every rank.
        holder: by parameter and buffer, the rank along the pipeline that holds it.
        group: the ranks of the pipeline.
        collects: whether this pipeline is the one with rank 0.
    """

    def __init__(
        self,
        model: nn.Module,
        holder: Mapping[str, int],
        group: dist.ProcessGroup,
        *,
        collects: bool,
    ) -> None:
        self.holder = holder
        self._group = group
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank(group)
        self._collects = collects
        # The whole state by name, on rank 0 inside ``gathered``.
        self._whole: dict[str, torch.Tensor] = {}
        self._names = {p: name for name, p in model.named_parameters()}
        for path, module in model.named_modules():
            hooked: Any = module
            prefix = f"{path}." if path else ""
            hooked.register_state_dict_post_hook(functools.partial(self._give_whole, prefix))
            hooked.register_load_state_dict_pre_hook(_take_own)

    @property
    def _is_first(self) -> bool:
        return self._collects and self._rank == 0

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Let ``state_dict`` return whole tensors on rank 0 for a while; a collective."""
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        whole = self._collected({name: t.detach() for name, t in tensors.items()}, self.holder)
        if self._is_first:
            self._whole = whole
        try:
            yield
        finally:
            self._whole = {}

    def _collected(self, things: Mapping[str, Any], holder: Mapping[str, int]) -> dict[str, Any]:
        """Things of all ranks of the pipeline on rank 0, one at a time; empty on others.

        Args:
            things: by name; those that other ranks hold count there.
            holder: by name, in the same order on every rank.
        """
        if not self._collects:
            return {}
        found = {}
        with call("hvkit.settled"), translated(), waiting(self._ranks):
            for name, source in holder.items():
                if source == self._rank == 0:
                    found[name] = things[name]
                elif source == self._rank:
                    thing = _in_host_memory(things.get(name))
                    count("objects", _bytes_of(thing))
                    dist.send_object_list([thing], self._ranks[0], group=self._group)
                elif self._rank == 0:
                    box: list[Any] = [None]
                    dist.recv_object_list(box, self._ranks[source], group=self._group)
                    found[name] = box[0]
        return found

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
            elif self.holder[whole] != self._rank:
                raise partial_state("state_dict()", module, "model")

    def attach(self, optimizer: Optimizer) -> None:
        """Keep the part of an optimizer's state that belongs to this rank's parameters."""
        held = _HeldState(optimizer, self)
        vars(optimizer)[_HELD] = held
        for p in [p for p in optimizer.state if p.is_meta]:
            del optimizer.state[p]
        optimizer.register_state_dict_pre_hook(held.refuse_partial_state)
        optimizer.register_load_state_dict_post_hook(_drop_state_of_others)
        vars(optimizer)["__getstate__"] = held.refuse_copy

    def state_of(self, optimizer: Optimizer) -> dict[torch.Tensor, Any]:
        """The state of all parameters on rank 0, empty on others; a collective."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbered = {str(i): p for i, p in enumerate(parameters)}
        holder = {i: self.holder[self._names[p]] for i, p in numbered.items()}
        mine = {i: optimizer.state[p] for i, p in numbered.items() if p in optimizer.state}
        found = self._collected({i: mine.get(i) for i in numbered}, holder)
        return {numbered[i]: state for i, state in found.items() if state is not None}

    @property
    def keeps_whole(self) -> bool:
        """Whether this rank holds the whole state in ``gathered``."""
        return self._is_first


class _HeldState(PartOfState):
    """An optimizer that holds the state of this rank's parameters."""

    def __init__(self, optimizer: Optimizer, parts: ModelParts) -> None:
        super().__init__(optimizer)
        self._parts = parts

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

    def _keep_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._states[optimizer] = {**state, "state": dict(state["state"])}

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


def _take_own(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading: leave out what other ranks hold."""
    for name, held in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state.get(prefix + name)
        if held.is_meta and isinstance(value, torch.Tensor):
            state[prefix + name] = value.to("meta")


def _drop_state_of_others(optimizer: Optimizer) -> None:
    """After loading: leave out the state of parameters that other ranks hold."""
    for p in [p for p in optimizer.state if isinstance(p, torch.Tensor) and p.is_meta]:
        del optimizer.state[p]


def _in_host_memory(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return thing.detach().cpu()
    if isinstance(thing, Mapping):
        return {key: _in_host_memory(value) for key, value in thing.items()}
    return thing


def _bytes_of(thing: Any) -> int:
    if isinstance(thing, torch.Tensor):
        return thing.numel() * thing.element_size()
    if isinstance(thing, Mapping):
        return sum(map(_bytes_of, thing.values()))
    return 0
