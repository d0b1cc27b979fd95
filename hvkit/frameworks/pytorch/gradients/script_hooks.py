"""Hooks that the script has registered on parameters, run on the gradients of one process.

A hook of ``p.register_hook`` may clip, normalise, mask or change a gradient with noise. Autograd
calls it with this rank's gradient, and the mean of normalised gradients is not the normalised mean.
So such hooks, and hooks of ``register_post_accumulate_grad_hook``, wait until the gradient is
averaged: a ``_Waiting`` replaces each entry in PyTorch's dict of a parameter's hooks, which
``register_multi_grad_hook`` uses, too. A hook gets the gradient of one backward pass, so
``ScriptHooks`` takes those of earlier passes away from ``p.grad`` before a pass adds to it, and
puts them back afterwards. PyTorch's generators are seeded by the gradient, so that hooks draw the
same numbers on all ranks.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from hvkit.frameworks.pytorch.gradients.backward_passes import outermost_pass
from hvkit.frameworks.pytorch.gradients.gradient_lists import running_pass
from hvkit.main_rank import warn_once
from hvkit.watch.calls import call_within

_OF_GRADIENT, _OF_PARAMETER = "_backward_hooks", "_post_accumulate_grad_hooks"

Change = Callable[[torch.Tensor], torch.Tensor | None]
Part = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class ScriptHooks:
    """The script's hooks on some parameters.

    ``why_not`` says why the gradients of a pass are not averaged at its end; None if they are, and
    "" if a hook must see this rank's gradient.
    """

    def __init__(
        self, label: Callable[[torch.Tensor], str], why_not: Callable[[], str | None]
    ) -> None:
        self._label, self._why_not = label, why_not
        self._change = _Changes(label, None, None)
        self._parameters: set[torch.Tensor] = set()
        # Parameters with hooks, by ``id``.
        self._hooked: dict[int, torch.Tensor] = {}
        # In the running pass: the sums of earlier passes, of gradients that are still to come.
        self._before: dict[torch.Tensor, torch.Tensor | None] = {}
        self._pass: int | None = None
        # Between ``begin`` and ``run`` of passes that autograd divides into several.
        self._divided = False
        _all.add(self)
        _watch_registrations()

    def names(self) -> list[str]:
        """The names of all hooks, with the parameters that they are on."""
        waiting = {i: _waiting(p, _OF_GRADIENT, _OF_PARAMETER) for i, p in self._hooked.items()}
        self._hooked = {i: p for i, p in self._hooked.items() if waiting[i]}  # without removed ones
        return [
            f"{getattr(each.hook, '__qualname__', type(each.hook).__name__)} on {self._label(p)}"
            for i, p in self._hooked.items()
            for each in waiting[i]
        ]

    def divide(self, whole: Part, part: Part) -> None:
        """Call hooks with full gradients where this rank has a slice of a parameter.

        ``whole`` is a collective that gives the full gradient of a slice, ``part`` this rank's
        slice.
        """
        self._change.whole, self._change.part = whole, part

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        for p in parameters:
            self._parameters.add(p)
            self.take(p)

    def take(self, parameter: torch.Tensor) -> None:
        """Let further hooks wait if this is one of the parameters."""
        if parameter not in self._parameters:
            return
        for attribute in (_OF_GRADIENT, _OF_PARAMETER):
            hooks = getattr(parameter, attribute) or {}
            for number, hook in hooks.items():
                if not _is_own(hook):
                    hooks[number] = _Waiting(self, parameter, hook)
                    self._hooked[id(parameter)] = parameter
        if id(parameter) in self._hooked and not getattr(parameter, _OF_GRADIENT):
            parameter.register_hook(_Waiting(self, parameter, None))  # type: ignore[no-untyped-call]

    def waits(self, parameter: torch.Tensor) -> bool:
        """Whether hooks of a parameter that autograd calls now wait for the averaged gradient."""
        if self._divided:
            return True
        why_not = self._why_not()
        if not _accumulates(parameter):
            if why_not == "" or not _waiting(parameter, _OF_GRADIENT):
                return False
            why_not = "where torch.autograd.grad computes it"
        elif torch.is_grad_enabled() and why_not is None:
            why_not = "where backward(create_graph=True) gives it a graph"
        if why_not:
            self._warn(parameter, why_not)
        if why_not is not None:
            return False
        self._forget_failed_passes()
        if parameter not in self._before:
            self._before[parameter], parameter.grad = parameter.grad, None
        return True

    def _forget_failed_passes(self) -> None:
        now = running_pass()
        now = now if now == -1 else outermost_pass(now)
        if self._pass != now:
            self._before.clear()
            self._pass = now

    def _warn(self, parameter: torch.Tensor, where: str) -> None:
        warn_once(
            f"hooks see own gradients {where}",
            f"the hook that the script has registered on {self._label(parameter)} sees each rank's "
            f"own gradient, not their mean, {where}. A factor or a mask may be applied to either; "
            "for all else remove the hook, and change p.grad after the last backward() of the "
            "step, or after hvkit.reduce_gradients(model)",
        )

    def begin(self, *, divided: bool = False, missed: bool = False) -> None:
        """Before a pass, or at its beginning: take the gradients of earlier passes away.

        If autograd divides the pass into several, ``run`` is called at its end. ``missed``: other
        ranks may have run a pass that this one has not.
        """
        if not self._hooked:
            return
        self._forget_failed_passes()
        self._divided = divided
        makes_graph = self._pass != -1 and torch.is_grad_enabled()
        if not divided and (makes_graph or self._why_not() is not None):
            return
        for p in self._hooked.values():
            if p not in self._before and not (missed and p.grad is not None):
                self._before[p], p.grad = p.grad, None

    @torch.no_grad()
    def run(self) -> None:
        """Call the hooks of each parameter for which any rank has a gradient of this pass."""
        before, self._before = self._before, {}
        self._pass, self._divided = None, False
        for p, earlier in before.items():
            if (gradient := p.grad) is None:
                p.grad = earlier
                continue
            p.grad = earlier
            changed = gradient
            for each in _waiting(p, _OF_GRADIENT):
                changed = self._change(p, changed, each.hook)
            if earlier is not None:
                same_kind = earlier.is_sparse == changed.is_sparse
                p.grad = earlier.add_(changed) if same_kind else earlier + changed
            elif changed is gradient or changed.is_sparse or gradient.is_sparse:
                p.grad = changed
            else:
                p.grad = gradient.copy_(changed)
            for each in _waiting(p, _OF_PARAMETER):
                each.hook(p)


class HooksOnShards:
    """The script's hooks on parameters of which PyTorch's ``fully_shard`` gives each rank a part.

    Autograd does not reach these. ``fully_shard`` calls hooks of
    ``register_post_accumulate_grad_hook``, one of which calls the others, with full gradients, as
    with ``ScriptHooks.divide``. Hooks move over from the parameters that were replaced.
    """

    def __init__(
        self,
        parameters: Mapping[torch.Tensor, torch.Tensor],
        label: Callable[[torch.Tensor], str],
        whole: Part,
        part: Part,
    ) -> None:
        self._change = _Changes(label, whole, part)
        self._label = label
        self._parameters = set(parameters)
        self._hooked: set[torch.Tensor] = set()
        # The last gradient of each that hooks have seen.
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        _all.add(self)
        _watch_registrations()
        for p, replaced in parameters.items():
            for attribute in (_OF_GRADIENT, _OF_PARAMETER):
                if p is not replaced and getattr(replaced, attribute):
                    setattr(p, attribute, getattr(replaced, attribute))
            self.take(p)

    def take(self, parameter: torch.Tensor) -> None:
        """Call the hooks if this is one of the parameters, which autograd does not reach."""
        if parameter not in self._parameters or not (hooks := getattr(parameter, _OF_GRADIENT)):
            return
        names = (getattr(each, "__qualname__", "") for each in hooks.values())
        if any("register_multi_grad_hook" in name for name in names):
            raise ValueError(
                f"register_multi_grad_hook on {self._label(parameter)}, of which each rank has "
                "a part, would never be called: read p.grad after backward()"
            )
        if parameter in self._hooked:
            return
        self._hooked.add(parameter)
        of = weakref.ref(self)

        def call_hooks(p: torch.Tensor) -> None:
            if (hooks := of()) is not None:
                hooks._call(p)

        handle: Any = parameter.register_post_accumulate_grad_hook(call_hooks)  # type: ignore[no-untyped-call]
        handle.hooks_dict_ref().move_to_end(handle.id, last=False)

    @torch.no_grad()
    def _call(self, p: torch.Tensor) -> None:
        if not getattr(p, _OF_GRADIENT) or p.grad is None:
            return
        if (seen := self._seen.get(id(p))) is not None and seen() is p.grad:
            raise ValueError(
                f"the hook that the script has registered on {self._label(p)} needs the gradient "
                "of one backward pass, and PyTorch has added that of this pass to earlier ones, as "
                "it does with divided parameters: call zero_grad(set_to_none=True) before each "
                "backward(), or remove the hook, and change p.grad before step()"
            )
        for hook in list(getattr(p, _OF_GRADIENT).values()):
            p.grad = self._change(p, p.grad, hook)
        self._seen[id(p)] = weakref.ref(p.grad)


class _Changes:
    """Calls hooks with full gradients, as ``ScriptHooks.divide``."""

    def __init__(
        self, label: Callable[[torch.Tensor], str], whole: Part | None, part: Part | None
    ) -> None:
        self._label, self.whole, self.part = label, whole, part
        self._calls: Counter[torch.Tensor] = Counter()

    def __call__(self, parameter: torch.Tensor, local: torch.Tensor, hook: Change) -> torch.Tensor:
        """The gradient that a hook returns, or has changed."""
        gradient = local
        if self.whole is not None:  # a hook on one rank alone waits here for the others
            with call_within(f"the script's hook on {self._label(parameter)}"):
                gradient = self.whole(parameter, local)
        self._calls[parameter] += 1
        with _same_numbers(gradient, self._calls[parameter]):
            result = hook(gradient)
        if result is None:
            result = gradient
        if not isinstance(result, torch.Tensor) or result.shape != gradient.shape:
            found = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result)
            raise RuntimeError(
                f"the hook on {self._label(parameter)} must return None or a tensor of the "
                f"gradient's shape {tuple(gradient.shape)}, got {found}"
            )
        return result if self.part is None else self.part(parameter, result)


class _Waiting:
    """Lets a hook of the script wait in whose place it is; None only makes room for a gradient."""

    def __init__(self, of: ScriptHooks, parameter: torch.Tensor, hook: Any) -> None:
        self._of = weakref.ref(of)
        self._id = id(parameter)  # whose hooks must not keep it in memory
        self.hook = hook

    def __call__(self, argument: torch.Tensor) -> Any:
        """Autograd calls it with the gradient, or with the parameter that has a new one."""
        of = self._of()
        parameter = None if of is None else of._hooked.get(self._id)
        if of is None or parameter is None:
            return self.hook and self.hook(argument)
        if argument is parameter:
            return None if of._divided or parameter in of._before else self.hook(argument)
        if of.waits(parameter) or self.hook is None:
            return None
        return of._change(parameter, argument, self.hook)


def _waiting(parameter: torch.Tensor, *attributes: str) -> list[_Waiting]:
    """The objects that stand for the script's hooks in these attributes of PyTorch."""
    hooks = [each for name in attributes for each in (getattr(parameter, name) or {}).values()]
    return [each for each in hooks if isinstance(each, _Waiting) and each.hook is not None]


def _is_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("hvkit.")


def _accumulates(parameter: torch.Tensor) -> bool:
    """Whether the pass that runs now adds to ``p.grad``, as ``torch.autograd.grad`` does not."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # autograd.grad, of this parameter
        return False


@contextmanager
def _same_numbers(gradient: torch.Tensor, call: int) -> Iterator[None]:
    """Let ranks with the same gradient draw the same random numbers for a while.

    It costs some 20 microseconds on a CPU; on a GPU the host waits for a few hundred numbers.
    """
    values = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
    some = values.flatten()[:: values.numel() // 256 + 1].resolve_conj().cpu().contiguous()
    seed = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), call)
    devices = [gradient.device] if gradient.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield


_all: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def _watch_registrations() -> None:
    """Let hooks wait that the script registers from now on."""

    def followed(register: Callable[[torch.Tensor, Any], Any]) -> Callable[..., Any]:
        @functools.wraps(register)
        def registered(self: torch.Tensor, hook: Any) -> Any:
            handle = register(self, hook)
            if self.is_leaf:
                for each in list(_all):
                    each.take(self)
            return handle

        return registered

    tensor: Any = torch.Tensor
    tensor.register_hook = followed(tensor.register_hook)
    tensor.register_post_accumulate_grad_hook = followed(tensor.register_post_accumulate_grad_hook)
