"""Gradients of all ranks of a mesh: their norms, overflows and NaNs, and sums of shared ones.

``torch.nn.utils.clip_grad_norm_`` computes a norm of gradients. A ``GradScaler`` skips a step if a
gradient is not finite, and so does ``on_nonfinite``. All of them must consider the gradients of all
ranks.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from hvkit import runtime
from hvkit.communication import collectives
from hvkit.frameworks.pytorch.buffers import LastStatistics
from hvkit.frameworks.pytorch.gradients.nonfinite import skip_steps
from hvkit.frameworks.pytorch.model_parallel.slices import as_plain, local_part
from hvkit.frameworks.pytorch.model_parallel.whole_parameters import (
    note_change,
    slicing_of,
    undivided,
)
from hvkit.frameworks.pytorch.optimizers import parameters_of, stepping_in
from hvkit.frameworks.pytorch.step_hooks import UpdateHooks
from hvkit.frameworks.pytorch.torch_distributed import TorchChannel
from hvkit.log import logger
from hvkit.sync.port import describe_nonfinite, skipped_steps
from hvkit.transport.traffic import count, of_allreduce
from hvkit.watch.calls import call, of_run, translated, waiting
from hvkit.watch.rank_errors import mark_as_shown_by

# In the order of creation, which is the same on every rank.
_living: WeakKeyDictionary[GradientsOfAllRanks, None] = WeakKeyDictionary()
# That of the model whose forward ran last.
_latest: weakref.ref[GradientsOfAllRanks] | None = None

# These inspect gradients before clipping changes them.
_before_clipping: WeakSet[NonFiniteInMesh] = WeakSet()


class GradientsOfAllRanks:
    """The gradients of a model that the ranks of ``links`` together hold once.

    ``counted`` are this rank's parameters, without those that another rank counts. ``replaced`` has
    the replacements of parameters that a script may still hold.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        counted: Iterable[torch.Tensor],
        links: TorchChannel,
        replaced: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        self._links, self._replaced = links, replaced
        self._all = {*parameters, *replaced}
        self._counted = set(counted)
        _living[self] = None
        see_all_ranks()

    def used(self) -> None:
        """Note that the model's forward runs: the next norm is probably of its gradients."""
        global _latest
        _latest = weakref.ref(self)

    def holds(self, parameters: Sequence[torch.Tensor]) -> bool:
        return any(p in self._all for p in parameters)

    def of_gradients(self, gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that have these gradients."""
        wanted = set(map(id, gradients))
        return [p for p in self._all if p.grad is not None and id(p.grad) in wanted]

    def current(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters, with their replacements if the script has kept replaced ones."""
        return [self._replaced.get(p, p) for p in parameters]

    @torch.no_grad()
    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The norm of the gradients of parameters on all ranks, in float64; a collective."""
        own = self.own_norm(parameters, norm_type)
        return _norm_of_ranks(own, norm_type, self._links.group, self._links.name)

    @torch.no_grad()
    def own_norm(self, parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
        """The norm of this rank's part of these gradients, in float64.

        A gradient that several ranks hold counts on one of them, so that the ranks' norms make up
        the norm of all gradients.
        """
        counted = [p for p in dict.fromkeys(parameters) if p in self._counted]
        return _own_norm(_gradients_of(counted), norm_type, self._links.device)

    def any_overflow(self, optimizer: int, scaler: Any) -> None:
        """Tell a ``GradScaler`` after ``unscale_`` of overflows on all ranks; a collective."""
        state = scaler._per_optimizer_states[optimizer]
        device = scaler._scale.device
        found = [torch.zeros((), dtype=torch.float32, device=device)]
        found += [each.to(device) for each in state["found_inf_per_device"].values()]
        own, links = torch.stack(found).max(), self._links
        anywhere = _reduce(own, dist.ReduceOp.MAX, links.group, links.name)
        state["found_inf_per_device"] = {device: anywhere}


def _own_norm(
    gradients: Iterable[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    parts = filter(torch.Tensor.numel, map(local_part, gradients))
    norms = [part.double().norm(norm_type) for part in parts]
    if not norms:
        nothing = math.inf if norm_type == -math.inf else 0.0
        return torch.full((), nothing, dtype=torch.float64, device=device)
    return cast(torch.Tensor, torch.linalg.vector_norm(torch.stack(norms), norm_type)).to(device)


def _norm_of_ranks(
    own: torch.Tensor, norm_type: float, group: dist.ProcessGroup, name: str
) -> torch.Tensor:
    if math.isinf(norm_type):
        return _reduce(own, dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN, group, name)
    return _reduce(own**norm_type, dist.ReduceOp.SUM, group, name) ** (1 / norm_type)


def _reduce(value: torch.Tensor, op: Any, group: dist.ProcessGroup, name: str) -> torch.Tensor:
    ranks = tuple(dist.get_process_group_ranks(group))
    count("gradients", of_allreduce(value.nbytes, len(ranks)))
    with call("the norm of all gradients", key=name), translated(), waiting(ranks):
        dist.all_reduce(value, op, group=group)
    return value


def _gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [gradient for p in parameters if (gradient := p.grad) is not None]


def of(parameters: Sequence[torch.Tensor]) -> GradientsOfAllRanks | None:
    """The gradients of the model that has one of these parameters; None if there is none."""
    return next((each for each in list(_living) if each.holds(parameters)), None)


@torch.no_grad()
def _of_all(
    of_models: Mapping[GradientsOfAllRanks, Sequence[torch.Tensor]],
    gradients: Sequence[torch.Tensor],
    norm_type: float,
) -> torch.Tensor:
    """The norm of gradients, of these parameters of models in meshes and of others; a collective.

    The others are shards of ``FullyShard``, slices that show the full tensor, or gradients that
    each rank holds in full.
    """
    found = [model.norm(parameters, norm_type) for model, parameters in of_models.items()]
    known = {id(p.grad) for parameters in of_models.values() for p in parameters}
    shards, rest = dict[DeviceMesh, list[DTensor]](), list[torch.Tensor]()
    for each in gradients:
        if isinstance(each, DTensor) and id(each) not in known and _is_only_sharded(each):
            shards.setdefault(each.device_mesh, []).append(each)
        elif id(each) not in known:
            rest.append(each)
    for mesh, of_mesh in shards.items():
        own = _own_norm(of_mesh, norm_type, of_mesh[0].device)
        found.append(_norm_of_ranks(own, norm_type, mesh.get_group(), "shards"))
    if rest:
        found.append(get_total_norm(undivided(rest), norm_type))
    if len(found) == 1:
        return found[0]
    norms = torch.stack([each.to(found[0]) for each in found])
    return cast(torch.Tensor, torch.linalg.vector_norm(norms, norm_type))


def _is_only_sharded(t: DTensor) -> bool:
    """Whether the shards of a mesh make up a tensor, and no other axis divides it."""
    slicing = slicing_of(t)
    whole = slicing is None or slicing.placement is None
    return whole and all(each.is_shard() for each in t.placements)


@functools.cache
def see_all_ranks() -> None:
    """Make ``clip_grad_norm_`` see all ranks, also where a script has imported the name before.

    The function that the script has stays, and calls another one inside.
    """
    changed = {"clip_grad_norm_": _clip_of_all_ranks, "_get_total_norm": _total_of_all_ranks}
    for name, of_all_ranks in changed.items():
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
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        of_models = {model: model.of_gradients(gradients) for model in list(_living)}
        # A stage whose parameters are all frozen has no gradients to recognise.
        latest = None if gradients or _latest is None else _latest()
        of_models = {m: found for m, found in of_models.items() if found or m is latest}
        if not of_models and all(slicing_of(each) is None for each in gradients):
            return plain(gradients, norm_type, error_if_nonfinite, foreach)
        total = _of_all(of_models, gradients, float(norm_type))
        return _checked(total, gradients, error_if_nonfinite)

    return total_norm


def _checked(
    total: torch.Tensor, gradients: Sequence[torch.Tensor], error_if_nonfinite: bool
) -> torch.Tensor:
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
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with as_plain():
            models = [each for each in list(_living) if each.holds(given)]
            listed = given
            for model in models:
                listed = model.current(listed)
            gradients = _gradients_of(listed)
            divided = any(isinstance(each, DTensor) for each in gradients)
            if models or divided:
                for each in _before_clipping:
                    each.before_clipping(listed)
                of_models = {model: [p for p in listed if model.holds([p])] for model in models}
                total = _of_all(of_models, gradients, float(norm_type))
                result = _checked(total, gradients, error_if_nonfinite)
                if divided:
                    _scale(listed, max_norm, total)
                else:
                    clip_grads_with_norm_(listed, max_norm, total, foreach)
                return result
        return plain(given, max_norm, norm_type, error_if_nonfinite, foreach)

    return clip_grad_norm_


@torch.no_grad()
def _scale(parameters: Sequence[torch.Tensor], max_norm: float, total: torch.Tensor) -> None:
    """As ``clip_grads_with_norm_``, where some gradients are divided and others are not."""
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in _gradients_of(dict.fromkeys(parameters)):
        own = local_part(gradient)
        own.mul_(factor.to(own.device, own.dtype))
    note_change()


class NonFiniteInMesh:
    """Skips steps, or stops training, if gradients are NaN or infinite.

    No rank has all gradients of a model, so the ranks agree when an optimizer's step begins.
    Clipping spreads a NaN to all gradients before that. So the ranks look for NaNs before clipping,
    too, to name the right parameters.
    """

    def __init__(self, action: str, model: nn.Module) -> None:
        self._action, self._model = action, model
        self._statistics = LastStatistics(model) if action == "skip" else None
        # The names of this rank's parameters that clipping has found.
        self._clipped: list[str] = []
        self._steps = 0
        _before_clipping.add(self)

    def attach(self, optimizer: Optimizer, hooks: UpdateHooks) -> None:
        """Look at the gradients before each step of an optimizer; a collective of all ranks."""
        skip_steps(self._action, stepping_in(optimizer), hooks, self._skips_step)

    def before_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        """Look for NaNs in the gradients of these parameters, before clipping changes them."""
        self._clipped = self._found(parameters)

    def _found(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        wanted = set(parameters)
        return [
            name
            for name, p in self._model.named_parameters()
            if p in wanted and p.grad is not None and not _is_finite(local_part(p.grad))
        ]

    def _skips_step(self, optimizer: Optimizer) -> bool:
        """Whether to skip the step that begins now; raises on every rank to stop."""
        self._steps += 1
        own = self._found(parameters_of(optimizer)), self._clipped
        self._clipped = []
        now, clipped = zip(*collectives.gather("optimizer.step()", own), strict=True)
        if not any(now):
            if self._statistics is not None:
                self._statistics.keep()
            return False
        found = describe_nonfinite(clipped if any(clipped) else now)
        text = f"step {of_run(self._steps)}: {found}"
        if self._statistics is None:
            raise mark_as_shown_by(FloatingPointError(f"in {text}"), 0)
        self._statistics.put_back()
        skipped_steps.number += 1
        if not runtime.rank():
            logger.warning("skipped %s", text)
        return True


def _is_finite(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())


class SharedGradients:
    """Sums the gradients of parameters that several ranks hold in full.

    These are the parameters that several stages use, with the group of ranks that use each, and
    this rank's parameters that the shard axis does not divide: those are averaged over the ranks
    of ``data_parallel``. With ``equalised`` the first stage's gradient replaces those of the
    others, whose sums were rounded in another order.
    """

    def __init__(
        self,
        of_stages: Mapping[nn.Parameter, dist.ProcessGroup],
        unsharded: Iterable[nn.Parameter],
        links: TorchChannel,
        data_parallel: TorchChannel,
        *,
        equalised: bool,
    ) -> None:
        self._links, self._unsharded = links, dict.fromkeys(unsharded)
        self._batches = len(data_parallel.ranks)
        self._equalised = of_stages if equalised else {}
        self._groups_of = {p: [group] for p, group in of_stages.items()}
        for p in self._unsharded:
            self._groups_of.setdefault(p, []).append(data_parallel.group)

    def before_backward(self, around: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Prepare for the gradients of a backward pass; return what to call when they are there."""
        end = around()
        # Only the gradients of this pass are summed; those of earlier passes are added to the sum.
        before = {p: p.grad for p in self._groups_of if p.requires_grad}
        for p in before:
            p.grad = None

        def add_up() -> None:
            for p, earlier in before.items():
                p.grad = self._sum(p, earlier)
            end()
            self._equalise()

        return add_up

    def _sum(self, p: nn.Parameter, earlier: torch.Tensor | None) -> torch.Tensor | None:
        """The sum of all ranks' gradients and that of earlier passes; a collective."""
        groups = self._groups_of[p]
        found = torch.tensor([float(p.grad is not None)], device=self._links.device)
        for group in groups:
            self._reduce(found, dist.ReduceOp.MAX, group)
        if not found:
            return earlier
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        for group in groups:
            count("gradients", of_allreduce(gradient.nbytes, group.size()))
            self._reduce(gradient, dist.ReduceOp.SUM, group)
        if p in self._unsharded:
            gradient /= self._batches
        return gradient if earlier is None else earlier.add_(gradient)

    def _reduce(self, t: torch.Tensor, operation: Any, group: dist.ProcessGroup) -> None:
        with self._links.waiting():
            dist.all_reduce(t, operation, group=group)

    def _equalise(self) -> None:
        for p, group in self._equalised.items():
            if p.grad is not None:
                source = dist.get_process_group_ranks(group)[0]
                if source == dist.get_rank():
                    count("gradients", p.grad.nbytes)
                with self._links.waiting():
                    dist.broadcast(p.grad, source, group=group)
