"""Follows the outputs of linear layers through one forward on the meta device.

The output of a product with a weight could be divided by its last dimension. A
``TorchFunctionMode`` follows it through every operation of the user's own forward, without graph
capture or export. It finds the product that takes the activation, so that the two layers could be
divided as a pair; or the operation that prevents this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hvkit.frameworks.pytorch.model_parallel.meta_device import calls_watched
from hvkit.frameworks.pytorch.model_parallel.tensor import propagation_rules as rules
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import LayerDivision, Style
from hvkit.frameworks.pytorch.model_parallel.tensor.experts import Experts, experts_in
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import call_structure, tensors_in

_MARK = "_hvkit_divided"
_LAYOUTS = {*rules.SIZES, "view", "reshape", "contiguous", "flatten", "to", "type_as"}
# How deep tensors are looked for in objects that a model returns.
_DEEPEST = 8
_MULTI_HEAD = "multi_head_attention_forward"


@dataclass(frozen=True)
class Mark:
    """Marks an activation that could be divided by ``dim``.

    It is computed from the outputs of ``columns``, which are divided together or not at all. The
    number of ``parts`` in their product is None until an operation needs it.
    """

    columns: frozenset[str]
    dim: int
    parts: int | None = None


@dataclass
class LinearUse:
    """How a forward uses a layer that multiplies by a weight, or looks up its rows."""

    transposed: bool = False  # its weight has the shape (in, out)
    # The numbers of parts that operations on its output need; several contradict each other.
    parts: set[int] = field(default_factory=set)
    # For each call, the columns from which its input is computed; empty for a whole input.
    taken_from: list[frozenset[str]] = field(default_factory=list)
    # Columns whose outputs are combined with its own before the number of parts is known.
    combined: set[str] = field(default_factory=set)
    ends: bool = False  # an operation, such as a loss, makes a whole result of its output
    problem: str = ""  # why its output cannot be divided
    returned: str = ""  # why its output must become whole: the model returns it
    unusable: str = ""  # why its weight cannot be divided at all

    def problem_as(self, style: Style, *, gathered: bool = False) -> str:
        """Why it cannot be divided like that; ``gathered``: hvkit makes what is returned whole."""
        if style == "row" or self.unusable:
            return self.unusable or ("" if all(self.taken_from) else "it takes whole activations")
        if self.problem:
            return self.problem
        if len(self.parts) > 1:
            return f"its output is used in {' and in '.join(map(str, sorted(self.parts)))} shares"
        return self.returned if not gathered or self.parts - {1} else ""

    def division(self, style: Style) -> LayerDivision:
        parts = min(self.parts or {1}) if style == "column" else 1
        return LayerDivision(style, parts, self.transposed)


class LinearTrace(rules.EachOperation):
    """Follows the output of each linear layer of an undivided model.

    ``heads`` has, by attention layer, why it cannot be divided, or an empty text.
    """

    def __init__(self, model: nn.Module, meta: Mapping[str, nn.Parameter], ways: int) -> None:
        super().__init__()
        self.ways = ways
        self.linears: defaultdict[str, LinearUse] = defaultdict(LinearUse)
        self.heads: dict[str, str] = {}
        self.experts = experts_in(model, meta)
        self._expert_of = {id(p): n for n, each in self.experts.items() for p in each.parameters}
        self._modules = modules = dict(model.named_modules())
        twins = {p: meta[name] for name, p in model.named_parameters()}
        # Modules that may be linear layers or embeddings, with their weight and bias.
        self._layers = {
            n: [twins[p] for p in m.parameters(recurse=False)]
            for n, m in modules.items()
            if _may_be_linear(m)
        }
        self._heads = {n: m for n, m in modules.items() if type(m) is nn.MultiheadAttention}
        # No subclasses: these may pass other options.
        self._embeddings = {n for n, module in modules.items() if type(module) is nn.Embedding}
        self._owners: dict[int, list[str]] = {}
        for name, parameters in self._layers.items():
            for p in parameters:
                self._owners.setdefault(id(p), []).append(name)
        # The running calls of these layers; the model's own name, if it is none of them.
        self._inside = [""]

    def operation(self, call: rules.Operation) -> Any:
        marks = [_mark_of(t) for t in call.inputs]
        output = call.run()
        if call.name in rules.HARMLESS:
            return output
        layer = self._product(call)
        for t in call.inputs:
            owners = self._owners.get(id(t), ())
            for owner in owners if layer not in owners else ():
                use = f"its weight or bias is also used in {call.name}()"
                self._refuse(self.linears[owner], use)
            experts = self._expert_of.get(id(t))
            if experts is not None and experts not in self._inside:
                use = f"its parameters are also used in {call.name}()"
                self._refuse(self.experts[experts], use)
        inside = self._inside[-1]
        if call.name == _MULTI_HEAD and inside in self._heads:
            self._attend(inside, marks)
            return output
        if layer is not None:
            self._multiply(layer, call, output)
        elif inside in self._layers and call.name not in _LAYOUTS:
            self.linears[inside].unusable = f"its forward calls {call.name}() besides the product"
        if layer is None and any(marks) and call.name not in rules.SIZES:
            self._follow(call, marks, output)
        return output

    @contextmanager
    def entered(self) -> Iterator[None]:
        layers = {name: self._modules[name] for name in (*self._layers, *self._heads)}
        experts = {name: self._modules[name] for name in self.experts}
        # After the script's hooks, which may change the experts' inputs.
        inside = {"before_hooks": False, "after_hooks": False}
        with (
            calls_watched(layers, self._enter, self._leave),
            calls_watched(experts, self._enter, self._leave, **inside),
        ):
            yield

    def _enter(self, name: str, args: Any, kwargs: Any) -> None:
        self._inside.append(name)
        if name in self.experts:
            self.experts[name].calls.setdefault(call_structure(args, kwargs), (args, kwargs))
            for mark in filter(None, map(_mark_of, tensors_in((args, kwargs)))):
                self._spoil(mark.columns, f"{name} takes it, which divides its own experts")

    def _leave(self, name: str, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        """Check that a layer of another class returns the unchanged product of its one input."""
        self._inside.pop()
        seen, kind = self.linears[name], type(self._modules[name])
        if not seen.taken_from or kind in (nn.Linear, nn.Embedding):
            return
        tensors = (*args, output)
        if len(args) != 1 or not all(isinstance(t, torch.Tensor) for t in tensors):
            seen.unusable = "its forward takes or returns more than one tensor"
        elif args[0].shape[:-1] != output.shape[:-1]:
            seen.unusable = "its forward returns the product in another shape"

    def returned(self, output: Any) -> None:
        """Note what the model returns, which must be whole, but for caches of keys and values."""
        for path, tensor in _tensors_in(output, ()):
            mark = _mark_of(tensor)
            if mark and not any(map(is_cache, path)):
                where = f" in {path[0]!r}" if path else ""
                for column in mark.columns:
                    why = f"the model returns what it computes from it{where}"
                    self.linears[column].returned = why

    def _product(self, call: rules.Operation) -> str | None:
        """The layer that computes this product of its own weight and bias."""
        if call.name == "addmm" and len(call.args) == 3 and not call.kwargs:
            used = [call.args[2], call.args[0]]
        elif call.name == "linear":
            used = [call.argument(1, "weight"), call.argument(2, "bias")]
        elif call.name == "embedding":
            used = [call.argument(1, "weight")]
        else:
            return None
        layer = self._inside[-1]
        if (call.name == "embedding") != (layer in self._embeddings):
            return None
        used_here = [id(p) for p in used if p is not None]
        return layer if [id(p) for p in self._layers.get(layer, ())] == used_here else None

    def _multiply(self, layer: str, call: rules.Operation, output: torch.Tensor) -> None:
        seen, factor = self.linears[layer], call.args[1 if call.name == "addmm" else 0]
        seen.transposed = call.name != "linear"
        mark = _mark_of(factor)
        seen.taken_from.append(frozenset())
        if call.name == "embedding":
            self._spoil(mark.columns if mark else frozenset(), f"{layer} looks up rows by it")
            return
        if mark and mark.dim != factor.dim() - 1:
            self._spoil(mark.columns, f"{layer} takes it with another dimension last")
        elif mark:
            self._decide(mark, 1)
            seen.taken_from[-1] = mark.columns
            if factor.shape[-1] % self.ways:
                self._spoil(mark.columns, f"{layer} takes {factor.shape[-1]} features")
        if output.shape[-1] % self.ways:
            seen.problem = (
                f"its {output.shape[-1]} outputs are no multiple of the {self.ways} ranks"
            )
        else:
            setattr(output, _MARK, Mark(frozenset([layer]), output.dim() - 1))

    def _follow(self, call: rules.Operation, marks: Sequence[Mark | None], output: Any) -> None:
        columns = frozenset().union(*(mark.columns for mark in marks if mark))
        outputs, name = tensors_in(output), call.name
        dims = [mark.dim if mark else None for mark in marks]
        if not outputs:
            self._spoil(columns, rules.WRITES if name == "__setitem__" else f"{name}() takes it")
            return
        step = rules.follow(replace(call, dims=dims, outputs=outputs, ways=self.ways))
        if isinstance(step, str):
            self._spoil(columns, step)
            return
        if step is None:
            for ended in filter(None, marks):
                self._decide(ended, 1)
            for column in columns:
                self.linears[column].ends = True
            return
        known = {mark.parts for mark in marks if mark}
        parts: int | None = 1
        if known == {None}:
            parts = step.parts
            for column in columns:
                self.linears[column].combined |= columns
        elif known == {1} and step.parts not in (None, 1):
            self._spoil(columns, f"{name}() divides a share of a product in shares")
            return
        if parts is not None:
            for mark in filter(None, marks):
                self._decide(mark, parts)
        for each in outputs:
            setattr(each, _MARK, Mark(columns, step.dim, None if parts is None else 1))

    def _decide(self, mark: Mark, parts: int) -> None:
        for column in mark.columns if mark.parts is None else ():
            self.linears[column].parts.add(parts)

    def _spoil(self, columns: frozenset[str], problem: str) -> None:
        for column in columns:
            seen = self.linears[column]
            seen.problem = seen.problem or problem

    def _refuse(self, seen: LinearUse | Experts, use: str) -> None:
        where = f" of {self._inside[-1]}" if self._inside[-1] else ""
        seen.unusable = seen.unusable or use + where

    def _attend(self, layer: str, marks: Sequence[Mark | None]) -> None:
        module = self._heads[layer]
        problem = self.heads.get(layer, "")
        if module.num_heads % self.ways:
            problem = f"its {module.num_heads} heads are no multiple of the {self.ways} ranks"
        elif module.bias_k is not None or module.add_zero_attn:
            problem = "add_bias_kv and add_zero_attn add a key that belongs to no rank"
        for mark in filter(None, marks):
            self._spoil(mark.columns, f"{layer} takes it, which divides its own heads")
        self.heads[layer] = problem


def _may_be_linear(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return [*own] in (["weight"], ["weight", "bias"]) and own["weight"].dim() == 2


def _mark_of(tensor: torch.Tensor) -> Mark | None:
    return getattr(tensor, _MARK, None)


def is_cache(name: str) -> bool:
    """Whether this names a cache of keys and values, as Hugging Face's ``past_key_values``."""
    return "cache" in name.lower() or name.startswith("past_key")


def _tensors_in(
    value: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif len(path) > _DEEPEST or isinstance(value, nn.Module | str | type):
        return
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors_in(each, (*path, str(key)))
    elif isinstance(value, list | tuple | set):
        for i, each in enumerate(value):
            yield from _tensors_in(each, (*path, str(i)))
    elif hasattr(value, "__dict__"):
        for each in vars(value).values():
            yield from _tensors_in(each, (*path, type(value).__name__))
