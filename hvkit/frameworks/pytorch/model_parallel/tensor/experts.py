"""Plans how ranks divide each expert of a mixture, where a parameter holds all experts' weights.

An expert multiplies by two weights or more. Each rank computes some of the features between them,
and the experts' outputs are summed over the ranks. A weight of all experts has the shape (experts,
outputs, inputs), or transposed, and a bias (experts, outputs).

Modules multiply in a loop, or by grouped or batched products. So hvkit does not follow operations,
but tries the module with random weights and a few rows: the outputs with each rank's parts must add
up to the output with whole weights, and so must the gradients of the inputs.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hvkit.frameworks.pytorch.model_parallel.meta_device import holders_in, uncompiled
from hvkit.frameworks.pytorch.model_parallel.side_outputs import undoing_side_effects
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import (
    LayerDivision,
    Placement,
    part_of,
)
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in

# Rows of the trial, unless a module needs as many as it has experts.
_ROWS = 4
# The largest error of a sum, relative to its largest element. Wrong parts are far beyond it.
_ROUNDING = 1e-4
# How many random numbers a weight repeats: a prime, so that rows differ.
_NUMBERS = 65537
# Scales of the inputs. The large one shows whether a module clamps activations.
_SCALES = (1.0, 1e4)


@dataclass
class Experts:
    """A module with experts; ``calls`` has the arguments of the first call of each structure."""

    parameters: Sequence[nn.Parameter]
    calls: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)
    unusable: str = ""


def experts_in(model: nn.Module, meta: Mapping[str, nn.Parameter]) -> dict[str, Experts]:
    """The modules with two or more weights of several experts, by name."""
    holders = holders_in(model)
    found = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        counts = [len(p) for p in own.values() if p.dim() == 3]
        if len(counts) < 2 or len({*counts}) > 1 or counts[0] < 2:
            continue
        prefix = f"{name}." if name else ""
        found[name] = seen = Experts([meta[f"{prefix}{each}"] for each in own])
        others = (
            n
            for n, p in module.named_parameters()
            if n not in own or p.dim() not in (2, 3) or len(p) != counts[0]
        )
        shared = {each for p in own.values() for each in holders[p]} - {name}
        if other := next(others, None):
            seen.unusable = f"it computes with its experts and with {other}"
        elif shared:
            seen.unusable = f"it shares a parameter with {', '.join(sorted(shared))}"
        elif next(module.buffers(), None) is not None:
            seen.unusable = "it has buffers beside its experts"
    return found


def divisions_of_experts(
    model: nn.Module, found: Mapping[str, Experts], ways: int, device: torch.device
) -> dict[str, LayerDivision | str]:
    """The division of each module's experts among ``ways`` ranks, or why they stay whole."""
    divisions: dict[str, LayerDivision | str] = {}
    tried: dict[Any, LayerDivision | str] = {}
    for name, seen in found.items():
        module = model.get_submodule(name)
        if seen.unusable or not seen.calls:
            divisions[name] = seen.unusable or "the forward does not call it"
            continue
        # Equal blocks are tried once.
        attributes = [
            (k, v if _is_plain(v) else id(v))
            for each in module.modules()
            for k, v in vars(each).items()
            if k not in _OF_MODULES or k == "training"
        ]
        shapes = [(n, tuple(p.shape)) for n, p in module.named_parameters()]
        inputs = [tuple(t.shape) for call in seen.calls.values() for t in tensors_in(call)]
        key: Any = (type(module), repr(module), *attributes, *shapes, *inputs, *seen.calls)
        if key not in tried:
            tried[key] = _try(module, seen, ways, device)
        divisions[name] = tried[key]
    return divisions


_PLAIN = (bool, int, float, str, type(None))
_OF_MODULES = vars(nn.Module()).keys()
_CPU = torch.device("cpu")


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _try(module: nn.Module, seen: Experts, ways: int, device: torch.device) -> LayerDivision | str:
    """The division of a module's experts, found by trials, or why they stay whole."""
    shapes = {name: p.shape for name, p in module.named_parameters(recurse=False)}
    guesses = list(_guesses(shapes, ways))
    if not guesses:
        return f"its weights have no length in common that {ways} ranks can divide"
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        uncompiled(),
        torch.autocast("cpu", enabled=False),
        torch.autocast(device.type, enabled=False),
    ):
        # On the CPU an index out of range is an error, and does not end the process.
        for used in dict.fromkeys((_CPU, device)):
            numbered = enumerate(shapes.items())
            weights = {name: _random(shape, used, i) for i, (name, shape) in numbered}
            for call, scale in itertools.product(seen.calls.values(), _SCALES):
                try:
                    adds_up = _trial(module, call, weights, used, scale)
                except Exception as error:  # of any type: the module's
                    why = f"({type(error).__name__}: {error})"
                    return f"a trial of it with random numbers fails {why}"
                guesses = [guess for guess in guesses if adds_up(guess, ways)]
            guesses = guesses[:1]
    if not guesses:
        return f"no parts of its experts for {ways} ranks add up to what it computes"
    return LayerDivision("experts", by_itself=True, experts=guesses[0], calls=frozenset(seen.calls))


def _guesses(shapes: Mapping[str, torch.Size], ways: int) -> Iterator[dict[str, Placement | None]]:
    """Each choice of one dimension of every weight that could be the features between products.

    It may be twice as long, if gates and activations are concatenated or interleaved. A bias may
    belong to the features, or to the output.
    """
    lengths = {n for shape in shapes.values() if len(shape) == 3 for n in shape[1:]}
    for features in sorted(each for each in lengths if each % ways == 0):
        choices = []
        for shape in shapes.values():
            some: list[Placement | None] = [None] if len(shape) == 2 else []
            for dim, length in list(enumerate(shape))[1:]:
                some += [Placement(dim)] if length in (features, 2 * features) else []
                some += [Placement(dim, 2)] if length == 2 * features else []
            choices.append(some)
        for chosen in itertools.product(*choices):
            yield dict(zip(shapes, chosen, strict=True))


def _trial(
    module: nn.Module,
    call: tuple[Any, Any],
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    scale: float,
) -> Callable[[Mapping[str, Placement | None], int], bool]:
    """Compute with whole weights; return whether results with the parts of a guess add up to that.

    Raises the module's error, or ``ValueError`` if the result is zero or not finite.
    """
    run = functools.partial(_run, module, call, device, scale)
    rows = _ROWS
    try:
        expected, drawn = run(rows, weights)
    except Exception:  # of any type: it may need rows for each expert
        rows = len(next(iter(weights.values())))
        expected, drawn = run(rows, weights)
    if not expected[0].isfinite().all() or not expected[0].any():
        raise ValueError("what it returns is zero or not finite")

    def adds_up(guess: Mapping[str, Placement | None], ways: int) -> bool:
        total: list[torch.Tensor] = []
        for index in range(ways):
            parts = {
                name: part_of(w, how, index, ways) if (how := guess[name]) else w / ways
                for name, w in weights.items()
            }
            try:
                of_parts, drawn_here = run(rows, parts)
            except Exception:  # of any type: these parts do not fit
                return False
            # With parts, dropout of features would draw fewer numbers.
            same = torch.equal(drawn_here, drawn)
            if not same or [t.shape for t in of_parts] != [t.shape for t in expected]:
                return False
            total = [a + b for a, b in zip(total, of_parts, strict=True)] if total else of_parts
        return all(
            bool((found - t).abs().max() <= _ROUNDING * t.abs().max())
            for found, t in zip(total, expected, strict=True)
        )

    return adds_up


def _run(
    module: nn.Module,
    call: tuple[Any, Any],
    device: torch.device,
    scale: float,
    few_rows: int,
    weights: Mapping[str, torch.Tensor],
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The result with random inputs of a few rows, their gradients, and the generator's state.

    Integers in the call become indices of experts. The module is unchanged afterwards.
    """
    count = len(next(iter(weights.values())))
    generator = torch.Generator().manual_seed(0)
    many = next(t for t in tensors_in(call) if t.is_floating_point() and t.dim() > 1).shape[:-1]
    few = [n if n == count else min(n, few_rows) for n in many]
    lengths = {math.prod(many): math.prod(few), **dict(zip(many, few, strict=True))}

    def random_input(t: torch.Tensor) -> torch.Tensor:
        kept = 1 if t.dim() > 1 else 0
        rows = [lengths.get(n, n) for n in t.shape[: t.dim() - kept]]
        shape = (*rows, *t.shape[t.dim() - kept :])
        if t.is_floating_point():
            x = torch.randn(shape, generator=generator, dtype=_dtype(), device="cpu")
            return (x * scale).to(device).requires_grad_()
        x = torch.randint(count, shape, generator=generator, device="cpu")
        return x.to(device, t.dtype)

    args, kwargs = tree_map_only(torch.Tensor, random_input, call)
    inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
    twin = copy.copy(module)
    # The script's hooks are not called.
    vars(twin)["_parameters"] = {**module._parameters, **weights}
    torch.manual_seed(0)
    with undoing_side_effects(twin) as kept_values:
        y = twin.forward(*args, **kwargs)
        if kept_values.changes():
            raise ValueError("it keeps results apart from what it returns")
    if not isinstance(y, torch.Tensor) or not y.is_floating_point():
        raise TypeError(f"it returns a {type(y).__name__}, not one tensor of activations")
    along = torch.randn(y.shape, generator=generator, dtype=_dtype(), device="cpu").to(y)
    gradients = torch.autograd.grad(y, inputs, along, materialize_grads=True)
    on_gpu = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if on_gpu else torch.get_rng_state()
    return [y.detach(), *gradients], state


def _dtype() -> torch.dtype:
    """Float64 if it is the default, else float32, which grouped products support everywhere."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def _random(shape: torch.Size, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    length = math.prod(shape)
    few = torch.randn(min(length, _NUMBERS), generator=generator, dtype=_dtype(), device="cpu")
    few = few.to(device) / max(shape[1:]) ** 0.5
    weight: torch.Tensor = few.repeat(-(-length // len(few)))[:length].view(shape)
    return weight
