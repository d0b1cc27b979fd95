"""Numbers of all gradients of a model whose ranks have some each: their norm, and any overflow.

``torch.nn.utils.clip_grad_norm_`` computes the norm of the gradients that it gets, and a
``GradScaler`` skips a step if one of them is not finite. Both must see those of all ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.model_parallel.part_of_whole import parts_alone
from hvkit.frameworks.pytorch.model_parallel.whole_parameters import (
    division_of,
    note_change,
    undivided,
)
from hvkit.frameworks.pytorch.optimizers import share_overflows
from hvkit.transport.traffic import count, of_allreduce
from hvkit.watch.calls import call, translated, waiting

# In the order in which they were made, which is the same on every rank.
_living: WeakValueDictionary[int, GradientsOfAllRanks] = WeakValueDictionary()
_made = itertools.count()
# The one whose model has computed last.
_latest: weakref.ref[GradientsOfAllRanks] | None = None


class ClippingObserver(Protocol):
    """Sees gradients before clipping changes them."""

    def before_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        """Look at the gradients of these."""


clipping_observers: WeakSet[ClippingObserver] = WeakSet()
"""Of all models in meshes."""


class GradientsOfAllRanks:
    """The gradients of a model that several ranks hold together.

    Args:
        parameters: all of the model's, in its order.
        counted: this rank's, without those that another rank counts.
        group: the ranks that hold the model together.
        name: of the model, for waits.
        device: of the model.
        replaced: by a parameter that a script may still hold, the one in its place.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        counted: Iterable[torch.Tensor],
        group: dist.ProcessGroup,
        name: str,
        device: torch.device,
        replaced: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        self._device, self._replaced = device, dict(replaced)
        self._all = set(parameters) | self._replaced.keys()
        self._counted = set(counted)
        self._group = group
        self._name = name
        _living[next(_made)] = self
        see_all_ranks()

    def used(self) -> None:
        """Note that the model computes: the next norm is probably of its gradients."""
        global _latest
        _latest = weakref.ref(self)

    def holds(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether one of these is a parameter of the model."""
        return any(p in self._all for p in parameters)

    def of_gradients(self, gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that have these gradients."""
        wanted = set(map(id, gradients))
        return [p for p in self._all if p.grad is not None and id(p.grad) in wanted]

    def current(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters with new ones in place of those that a script has kept."""
        return [self._replaced.get(p, p) for p in parameters]

    @torch.no_grad()
    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The norm of the gradients of parameters on all ranks, in float64; a collective."""
        mine = self.own_norm(parameters, norm_type)
        return _norm_of_ranks(mine, norm_type, self._group, self._name)

    @torch.no_grad()
    def own_norm(self, parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
        """The norm of this rank's part of these gradients, in float64.

        What several ranks hold counts on one of them, so that the norms of all ranks make up the
        norm of all gradients.
        """
        held = [p for p in dict.fromkeys(parameters) if p in self._counted]
        return _own_norm([p.grad for p in held if p.grad is not None], norm_type, self._device)

    def any_overflow(self, optimizer: int, scaler: Any) -> None:
        """Let a ``GradScaler`` know of overflows on all ranks; a collective.

        Args:
            optimizer: its id.
            scaler: has unscaled this rank's gradients.
        """
        state = scaler._per_optimizer_states[optimizer]
        found = list(state["found_inf_per_device"].values())
        device = scaler._scale.device
        mine = torch.zeros((), dtype=torch.float32, device=device)
        for each in found:
            mine = torch.maximum(mine, each.to(device))
        anywhere = _reduce(mine, dist.ReduceOp.MAX, self._group, self._name)
        state["found_inf_per_device"] = {device: anywhere}


def _own_norm(
    gradients: Iterable[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    parts = filter(torch.Tensor.numel, map(local_part, gradients))
    norms = [part.double().norm(norm_type) for part in parts]
    if not norms:
        nothing = math.inf if norm_type == -math.inf else 0.0
        return torch.full((), nothing, dtype=torch.float64, device=device)
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return whole.to(device)


def _norm_of_ranks(
    mine: torch.Tensor, norm_type: float, group: dist.ProcessGroup, name: str
) -> torch.Tensor:
    if math.isinf(norm_type):
        return _reduce(mine, dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN, group, name)
    return _reduce(mine**norm_type, dist.ReduceOp.SUM, group, name) ** (1 / norm_type)


def _reduce(value: torch.Tensor, op: Any, group: dist.ProcessGroup, name: str) -> torch.Tensor:
    ranks = tuple(dist.get_process_group_ranks(group))
    count("gradients", of_allreduce(value.nbytes, len(ranks)))
    with call("the norm of all gradients", key=name), translated(), waiting(ranks):
        dist.all_reduce(value, op, group=group)
    return value


def local_part(t: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that ``fully_shard`` divides."""
    return t.to_local() if hasattr(t, "to_local") else t


def of(parameters: Sequence[torch.Tensor]) -> GradientsOfAllRanks | None:
    """Those of the model that has one of these parameters; None if there is none."""
    return next((each for each in _models() if each.holds(parameters)), None)


def _models() -> list[GradientsOfAllRanks]:
    return [each for _, each in sorted(_living.items())]


@torch.no_grad()
def _of_all(
    norms: Sequence[torch.Tensor], others: Sequence[torch.Tensor], norm_type: float
) -> torch.Tensor:
    """The norm of the gradients of some models in meshes together, and of others.

    The others are shards of ``FullyShard``, copies that answer for a whole, or those that each rank
    holds.
    """
    found = [*norms]
    shards = [each for each in others if isinstance(each, DTensor) and _is_only_sharded(each)]
    known = set(map(id, shards))
    rest = [each for each in others if id(each) not in known]
    for mesh in dict.fromkeys(each.device_mesh for each in shards):
        of_mesh = [each for each in shards if each.device_mesh == mesh]
        mine = _own_norm(of_mesh, norm_type, of_mesh[0].device)
        found.append(_norm_of_ranks(mine, norm_type, mesh.get_group(), "shards"))
    if rest:
        found.append(get_total_norm(undivided(rest), norm_type))
    if len(found) == 1:
        return found[0]
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([each.to(found[0]) for each in found]), norm_type
    )
    return total


def _is_only_sharded(t: DTensor) -> bool:
    """Whether the shards of a mesh make up a tensor, and no other axis divides it."""
    division = division_of(t)
    alone = division is None or division.placement is None
    return alone and all(each.is_shard() for each in t.placements)


@functools.cache
def see_all_ranks() -> None:
    """Make ``clip_grad_norm_`` see all ranks, also where a script has imported the name before.

    So the function itself stays, and calls another one inside.
    """
    for name, of_all_ranks in (
        ("clip_grad_norm_", _clip_of_all_ranks),
        ("_get_total_norm", _total_of_all_ranks),
    ):
        wrapper = getattr(clip_grad, name)
        cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
        cell.cell_contents = of_all_ranks(cell.cell_contents)


def _total_of_all_ranks(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(plain)
    def total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        held = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        norms, known = [], set()
        for model in _models():
            parameters = model.of_gradients(held)
            # A stage whose parameters are all frozen has no gradients to recognise.
            if parameters or (not held and _latest is not None and _latest() is model):
                norms.append(model.norm(parameters, float(norm_type)))
                known |= {id(p.grad) for p in parameters}
        if not norms and all(division_of(each) is None for each in held):
            return plain(held, norm_type, error_if_nonfinite, foreach)
        others = [each for each in held if id(each) not in known]
        return _checked(_of_all(norms, others, float(norm_type)), held, error_if_nonfinite)

    return total_norm


def _checked(
    total: torch.Tensor, gradients: Sequence[torch.Tensor], error_if_nonfinite: bool
) -> torch.Tensor:
    """A norm of all gradients, in their dtype.

    Raises:
        RuntimeError: it is not finite, and that is to be an error.
    """
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            "The total norm of the gradients of all ranks is non-finite, so it cannot be clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    return total.to(gradients[0].dtype) if gradients else total


def _clip_of_all_ranks(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(plain)
    def clip_grad_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with parts_alone():
            own = _clipped(held, max_norm, float(norm_type), error_if_nonfinite, foreach)
        return plain(held, max_norm, norm_type, error_if_nonfinite, foreach) if own is None else own

    return clip_grad_norm_


def _clipped(
    held: list[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor | None:
    """The norm, after clipping the gradients of these parameters; None if none is divided."""
    models = [each for each in _models() if each.holds(held)]
    for model in models:
        held = model.current(held)
    gradients = [gradient for p in held if (gradient := p.grad) is not None]
    divided = any(isinstance(each, DTensor) for each in gradients)
    if not models and not divided:
        return None
    for each in clipping_observers:
        each.before_clipping(held)
    norms = [model.norm(held, norm_type) for model in models]
    rest = [p for p in held if not any(model.holds([p]) for model in models)]
    others = [gradient for p in rest if (gradient := p.grad) is not None]
    total = _of_all(norms, others, norm_type)
    result = _checked(total, gradients, error_if_nonfinite)
    if divided:
        _scale(held, max_norm, total)
    else:
        clip_grads_with_norm_(held, max_norm, total, foreach)
    return result


@torch.no_grad()
def _scale(parameters: Sequence[torch.Tensor], max_norm: float, total: torch.Tensor) -> None:
    """As ``clip_grads_with_norm_``, where some gradients are divided and others are not."""
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for p in dict.fromkeys(parameters):
        if (gradient := p.grad) is not None:
            own = local_part(gradient)
            own.mul_(factor.to(own.device, own.dtype))
    note_change()


def watch_overflows(gradients: GradientsOfAllRanks, optimizer: Optimizer) -> None:
    """Let scalers of an optimizer know of overflows on all ranks."""
    share_overflows(optimizer, functools.partial(gradients.any_overflow, id(optimizer)))
