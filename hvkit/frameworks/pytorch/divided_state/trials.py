"""Whether ranks can divide the work of an optimizer: tried on a few small parameters.

An optimizer that looks at all parameters together, or changes weights outside of its steps, would
train other weights than one process does, and other ones on each rank. So a copy of the optimizer
updates all of some small parameters, and further copies update a part each, as on several ranks.
The results must be the same.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.optimizers import parameters_of

# Some warm up for several steps before they do what they are made for.
_STEPS = 10
_RANKS = 2
# Elements along each dimension of a small parameter; even, so that two ranks have as many.
_LENGTH = 4

# Optimizers of PyTorch that compute each element from its gradient and state.
_BY_ELEMENT: set[Any] = {
    *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD),
}
# Optimizers that PyTorch cannot compute with parts of parameters.
_WHOLE = (optim.Rprop, optim.SparseAdam)
# Optimizers of PyTorch that compute each parameter from its gradient and state; Muon is in 2.9.
_BY_PARAMETER = {*_BY_ELEMENT, *_WHOLE, optim.Adafactor, getattr(optim, "Muon", None)}

# Texts of the errors if step() needs a closure.
_NO_CLOSURE = ("'closure'", "'NoneType' object is not callable")

# Methods with which schedule-free optimizers change weights outside of a step.
_MODES = ("eval", "train")


def why_not_by_parameter(optimizer: Optimizer) -> str:
    """Why ranks cannot update some whole parameters each; empty if they can."""
    return "" if type(optimizer) in _BY_PARAMETER else _why_not(optimizer, halved=False)


def why_not_by_element(optimizer: Optimizer) -> str:
    """Why ranks cannot update a part of each parameter; empty if they can."""
    if type(optimizer) in _BY_ELEMENT:
        return ""
    if isinstance(optimizer, _WHOLE):
        return "PyTorch computes it with whole tensors only"
    return _why_not(optimizer, halved=True)


def _why_not(optimizer: Optimizer, *, halved: bool) -> str:
    devices = {p.device for p in parameters_of(optimizer) if p.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
        try:
            return _Trial(optimizer, halved=halved).run()
        except Exception as error:
            # Of any type: other libraries' optimizers may raise anything.
            if isinstance(error, TypeError) and any(text in str(error) for text in _NO_CLOSURE):
                return "its step() needs a closure, from which it computes all of them together"
            return f"a trial on small parameters failed with {type(error).__name__}: {error}"


class _Trial:
    """Copies of an optimizer: one for all, two for halves or for every second parameter."""

    def __init__(self, optimizer: Optimizer, *, halved: bool) -> None:
        self._halved = halved
        self._random = torch.Generator().manual_seed(0)
        models = []
        for group in optimizer.param_groups:
            examples = {(p.dtype, p.dim(), p.device): p for p in group["params"]}
            models.append([p for p in examples.values() for _ in range(_RANKS)])
        values = [[self._like(p) for p in group] for group in models]
        self._whole = copied(optimizer, models, values)
        self._ranks = [
            copied(optimizer, models, [[self._part(v, rank) for v in group] for group in values])
            for rank in range(_RANKS)
        ]

    def run(self) -> str:
        """Why the ranks' copies do not do together what the whole one does; empty if they do."""
        copies = [self._whole, *self._ranks]
        for each in copies:
            if callable(train := getattr(each, "train", None)):
                train()
        # Of one direction: optimizers that estimate a step's length wait for that.
        slopes = [self._like(p) for p in parameters_of(self._whole)]
        for _ in range(_STEPS):
            gradients = [slope + 0.1 * self._like(slope) for slope in slopes]
            _step(self._whole, gradients)
            for rank, each in enumerate(self._ranks):
                _step(each, self._of_rank(gradients, rank))
            self._send()
            if not self._same():
                unit = "part of a parameter" if self._halved else "parameter"
                return f"its update of one {unit} depends on others, or is random"
            if (key := self._other_number()) is not None:
                return f"it computes {key!r} from all parameters together"
        for name in _MODES:
            if callable(getattr(self._whole, name, None)):
                for each in copies:
                    getattr(each, name)()
                if not self._same():
                    return f"{name}() changes only weights whose state a rank holds"
        return ""

    def _like(self, p: torch.Tensor) -> torch.Tensor:
        """A small random tensor of the same dtype and number of dimensions."""
        shape = [_LENGTH if self._halved else min(length, _LENGTH) for length in p.shape]
        # Vectors of half the length are rounded differently: by little in 64 bits.
        wide = self._halved and not p.is_complex()
        dtype = torch.float64 if wide else p.dtype
        plain = torch.complex64 if p.is_complex() else torch.float32
        value = torch.randn(shape, generator=self._random, dtype=plain, device="cpu")
        return value.to(p.device, dtype)

    def _part(self, value: torch.Tensor, rank: int) -> torch.Tensor:
        return value.chunk(_RANKS)[rank] if self._halved else value

    def _of_rank(self, gradients: list[torch.Tensor], rank: int) -> list[torch.Tensor | None]:
        if self._halved:
            return [self._part(g, rank) for g in gradients]
        return [g if i % _RANKS == rank else None for i, g in enumerate(gradients)]

    @torch.no_grad()
    def _send(self) -> None:
        """Give each rank the parameters that the other has updated."""
        if self._halved:
            return
        for i, copies in enumerate(zip(*map(parameters_of, self._ranks), strict=True)):
            for p in copies:
                p.copy_(copies[i % _RANKS])

    @torch.no_grad()
    def _same(self) -> bool:
        return all(
            torch.allclose(q, self._part(p, rank), rtol=1e-12, atol=1e-12, equal_nan=True)
            if self._halved
            else torch.equal(q.nan_to_num(), p.nan_to_num())
            for rank, each in enumerate(self._ranks)
            for q, p in zip(parameters_of(each), parameters_of(self._whole), strict=True)
        )

    def _other_number(self) -> str | None:
        """The name of a number in the groups that is another one on some rank; None if none is."""
        for each in self._ranks:
            for group, whole in zip(each.param_groups, self._whole.param_groups, strict=True):
                for key, value in whole.items():
                    of_numbers = isinstance(value, int | float | torch.Tensor)
                    if of_numbers and not _equal(value, group.get(key)):
                        return key
        return None


def copied(
    optimizer: Optimizer, models: list[list[torch.Tensor]], values: list[list[torch.Tensor]]
) -> Optimizer:
    """A copy of an optimizer without hooks that updates new parameters in place of the models'."""
    # Not parameters: if an optimizer that was not passed updates parameters, rank 0 warns.
    groups = [[value.clone().requires_grad_() for value in group] for group in values]
    # Other references of the optimizer to its parameters become references to the first new one.
    memo: dict[int, Any] = {
        id(p): new[0]
        for group, new in zip(optimizer.param_groups, groups, strict=True)
        for p in group["params"]
    }
    twin: Any = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            vars(twin)[name] = OrderedDict()
        elif name not in ("step", "state", "param_groups"):  # a scheduler has patched step
            vars(twin)[name] = copy.deepcopy(value, memo)
    twin.state = defaultdict(dict)
    for olds, news in zip(models, groups, strict=True):
        for old, new in zip(olds, news, strict=True):
            if old in optimizer.state:
                # Two new ones may be like the same old one: each gets a separate state.
                twin.state[new] = _state_like(optimizer.state[old], old, new, dict(memo))
    twin.param_groups = [
        copy.deepcopy({k: v for k, v in group.items() if k != "params"}, memo) | {"params": new}
        for group, new in zip(optimizer.param_groups, groups, strict=True)
    ]
    return twin  # type: ignore[no-any-return]


def _state_like(
    state: Any, old: torch.Tensor, new: torch.Tensor, memo: dict[int, Any]
) -> dict[str, Any]:
    return {
        key: value.reshape(-1)[:1].to(new.dtype).expand(new.shape).clone()
        if isinstance(value, torch.Tensor) and value.shape == old.shape and value.dim()
        else copy.deepcopy(value, memo)
        for key, value in state.items()
    }


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(value, other)
    return bool(value == other)


def _step(optimizer: Optimizer, gradients: Sequence[torch.Tensor | None]) -> None:
    for p, gradient in zip(parameters_of(optimizer), gradients, strict=True):
        p.grad = None if gradient is None else gradient.clone()
    optimizer.step()
