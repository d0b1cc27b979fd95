"""Rules for how an operation propagates the divided dimension of an activation.

Tensor parallelism (Megatron-LM, https://arxiv.org/abs/1909.08053) divides the output of one linear
layer by its last dimension. Each rank computes with its part until another linear layer sums over
that dimension. The operations between them must treat the parts independently of each other. A rule
says whether an operation does, and which dimension of its output is the divided one. An operation
without a rule is not divided.

A fused product concatenates several tensors, as queries, keys and values. Each rank has its part of
each of them: the layer is divided in ``parts``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in


class Followed(NamedTuple):
    """An output is divided by ``dim``; the operation needs a product of so many ``parts``, or of
    any.
    """

    dim: int
    parts: int | None = None


@dataclass(frozen=True)
class Operation:
    """One operation; for each tensor among its arguments, ``dims`` has the divided dimension or
    None.
    """

    function: Callable[..., Any]
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    inputs: Sequence[torch.Tensor]
    dims: Sequence[int | None] = ()
    outputs: Sequence[torch.Tensor] = ()
    ways: int = 1

    def run(self, change: Callable[[torch.Tensor], Any] | None = None) -> Any:
        """Call the function, with changed tensors if ``change`` is given."""
        args, kwargs = tuple(self.args), self.kwargs
        if change is not None:
            args, kwargs = tree_map_only(torch.Tensor, change, (args, kwargs))
        return self.function(*args, **kwargs)

    @property
    def pairs(self) -> list[tuple[torch.Tensor, int | None]]:
        """Each input, and by which dimension it is divided."""
        return list(zip(self.inputs, self.dims, strict=True))

    @property
    def first(self) -> tuple[torch.Tensor, int]:
        """The first divided input, and its dimension."""
        return next((t, d) for t, d in self.pairs if d is not None)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument that may have been passed by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def all_divided_alike(self) -> bool:
        """Whether every input is divided, by the same dimension, in equal parts."""
        even = (t.shape[d] % self.ways == 0 for t, d in self.pairs if d is not None)
        return len({*self.dims}) == 1 and all(even)


class EachOperation(TorchFunctionMode):
    """A mode that sees every operation inside of it, also reads of tensors' attributes."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name: str = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(cast(Any, func).__self__, "__name__", name)
        kwargs = dict(kwargs or {})
        return self.operation(Operation(func, name, args, kwargs, tensors_in((args, kwargs))))

    def operation(self, call: Operation) -> Any:
        """Return what the operation would."""
        raise NotImplementedError


# A stride that marks the divided dimension in a view: a prime, no product of lengths.
_STRIDE = 2**31 - 1

Rule = Callable[[Operation], "Followed | str | None"]


def follow(call: Operation) -> Followed | str | None:
    """How an operation's output is divided, or why it cannot be; None if it is whole everywhere."""
    if call.name not in RULES:
        return f"{call.name}() has no rule by which it could be divided"
    return RULES[call.name](call)


def writes(call: Operation) -> bool:
    """Whether an operation changes its first argument, as ``add_``, ``x[0] = 1``, ``relu_``."""
    if call.name in _IN_PLACE_OPTION:
        return bool(call.argument(_IN_PLACE_OPTION[call.name], "inplace"))
    return is_in_place(call.function)


def is_in_place(function: Any) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def viewed(before: Sequence[int], dim: int, after: Sequence[int], ways: int) -> Followed | None:
    """The division of a view of a tensor that is divided by ``dim``; None if there is none.

    >>> viewed((2, 7, 96), 2, (2, 7, 4, 24), ways=2)
    Followed(dim=2, parts=1)
    >>> viewed((2, 7, 96), 2, (2, 7, 3, 4, 8), ways=2)
    Followed(dim=3, parts=3)
    """
    if before[dim] % ways:
        return None
    outer, inner = math.prod(before[:dim]), math.prod(before[dim:])
    for new, length in enumerate(after):
        if math.prod(after[:new]) != outer or math.prod(after[new:]) != inner or length == 1:
            continue
        if length % ways == 0:
            same = length == before[dim]
            return Followed(new, None if same else 1)
        if new + 1 < len(after) and after[new + 1] % ways == 0:
            inside = math.prod(after[new:]) == before[dim]  # the parts make up this dimension alone
            return Followed(new + 1, length) if inside else None
        return None
    return None


def _elementwise(call: Operation) -> Followed | str:
    if call.name == "where" and len(call.args) == 1:
        return "where() of one argument gives the places of elements"
    if call.name in ("dropout", "alpha_dropout") and writes(call):
        return f"{call.name}() in place changes an activation that others may read"
    out = call.outputs[0].dim()
    # Counted from the right, as PyTorch broadcasts tensors of fewer dimensions.
    from_right = {t.dim() - d for t, d in call.pairs if d is not None}
    if len(from_right) > 1:
        return f"{call.name}() combines activations divided by different dimensions"
    (right,) = from_right
    meets_whole = any(
        d is None and t.dim() >= right and t.shape[t.dim() - right] != 1 for t, d in call.pairs
    )
    if meets_whole and writes(call) and call.dims[0] is None:
        return f"{call.name}() writes a divided activation into one that is whole"
    # The elements of a whole tensor of that length are not in the order of fused parts.
    return Followed(out - right, 1 if meets_whole else None)


def _view(call: Operation) -> Followed | str:
    tensor, dim = call.first
    found = viewed(tensor.shape, dim, call.outputs[0].shape, call.ways)
    if found is None:
        return (
            f"{call.name}() from {tuple(tensor.shape)} to {tuple(call.outputs[0].shape)} leaves "
            f"no dimension that {call.ways} ranks could divide"
        )
    return found


def _split(call: Operation) -> Followed | str:
    tensor, dim = call.first
    along = call.argument(2, "dim", 0) % tensor.dim()
    if along != dim:
        return Followed(dim)
    lengths = [each.shape[dim] for each in call.outputs]
    if len({*lengths}) > 1 or lengths[0] % call.ways:
        return (
            f"{call.name}() cuts the product into {lengths}: hvkit divides equal shares that are "
            f"multiples of the number of ranks ({call.ways})"
        )
    return Followed(dim, len(call.outputs))


def _rearrange(call: Operation) -> Followed | str:
    """A view of some elements, in another order of dimensions; found by its strides."""
    tensor, dim = call.first
    strides = [1] * tensor.dim()
    strides[dim] = _STRIDE
    example = torch.empty_strided(tensor.shape, strides, device="meta")
    found = call.run(lambda t: example if t is tensor else t)
    view = found[0] if isinstance(found, tuple) else found
    for new, length in enumerate(view.shape):
        if view.stride(new) == _STRIDE and length == tensor.shape[dim]:
            return Followed(new)
    return _takes_apart(call)


def _takes_apart(call: Operation) -> str:
    return f"{call.name}() takes the divided dimension apart"


def _attention(call: Operation) -> Followed | str:
    query, dim = call.first
    mask = call.argument(3, "attn_mask")
    three = replace(call, inputs=call.inputs[:3], dims=call.dims[:3])
    if mask is not None and call.dims[3] is not None:
        return f"{call.name}() has a mask that depends on a divided activation"
    if not three.all_divided_alike() or dim >= query.dim() - 2:
        return f"{call.name}() has heads that {call.ways} ranks cannot divide"
    return Followed(dim, 1)


def _matmul(call: Operation) -> Followed | str:
    tensor, dim = call.first
    if len({t.dim() for t in call.inputs}) == 1 and call.all_divided_alike():
        if dim < tensor.dim() - 2:
            return Followed(dim, 1)
    elif call.dims[1:] == [None] and call.inputs[1].dim() == 2 and dim < tensor.dim() - 1:
        return Followed(dim, 1)
    return f"{call.name}() sums over the divided dimension, and its other factor is no layer's"


def _along_another(call: Operation) -> Followed | str:
    """An operation along one dimension or several, which must not be the divided one."""
    tensor, dim = call.first
    along = call.argument(1, "dim")
    if along is None or isinstance(along, bool):
        return f"{call.name}() combines all elements"
    dims = [each % tensor.dim() for each in (along if isinstance(along, Sequence) else [along])]
    if dim in dims:
        return f"{call.name}() combines elements along the divided dimension"
    if call.outputs[0].dim() == tensor.dim():
        return Followed(dim)
    return Followed(dim - sum(each < dim for each in dims))


def _normalize(call: Operation) -> Followed | str:
    tensor, dim = call.first
    shape = call.argument(1, "normalized_shape")
    if dim >= tensor.dim() - len(shape) or any(d is not None for d in call.dims[1:]):
        return f"{call.name}() combines elements along the divided dimension"
    return Followed(dim, 1)


def _cross_entropy(call: Operation) -> str | None:
    """Of logits divided by classes, with the number of a class for each sample."""
    logits, target = call.argument(0, "input"), call.argument(1, "target")
    options = (2, "weight"), (3, "size_average"), (5, "reduce")
    chosen = any(call.argument(*each) is not None for each in options)
    if call.dims[0] != min(1, logits.dim() - 1) or any(d is not None for d in call.dims[1:]):
        return f"{call.name}() of samples is not divided"
    if target.is_floating_point() or chosen or call.argument(7, "label_smoothing", 0.0):
        return f"{call.name}() is divided for classes without weights and smoothing only"
    return None


def _concatenate(call: Operation) -> Followed | str:
    _, dim = call.first
    kept = [(t, d) for t, d in call.pairs if t.shape != (0,)]
    if {d for _, d in kept} != {dim}:
        return f"{call.name}() combines a divided activation with one that is whole"
    along = call.argument(1, "dim", 0) % kept[0][0].dim()
    return _takes_apart(call) if along == dim else Followed(dim, 1)


def _keeps_shape(call: Operation) -> Followed | str:
    """``pad``, ``repeat_interleave`` and others that change other dimensions only."""
    (tensor, dim), out = call.first, call.outputs[0]
    if out.dim() == tensor.dim() and out.shape[dim] == tensor.shape[dim]:
        return Followed(dim, 1)
    return _takes_apart(call)


# Attributes of a weight or of a divided activation that do not depend on its size.
HARMLESS = {
    *("dtype", "device", "layout", "is_meta", "requires_grad", "is_sparse", "is_cuda", "is_cpu"),
    *("is_nested", "is_quantized", "is_floating_point", "is_complex", "is_leaf", "is_contiguous"),
    *("grad_fn", "is_mkldnn", "element_size", "is_inference", "__hash__", "__repr__"),
}
SIZES = {
    *("shape", "size", "dim", "ndim", "numel", "nelement", "stride", "storage_offset", "__len__"),
}
# Views that are attributes.
VIEW_ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag"}
LENGTHS = {"size", "numel", "nelement", "stride", "__len__"}
# Operations on a slice of a parameter that need no full tensor.
OF_SLICES = {
    *HARMLESS,
    *("dim", "ndimension", "get_device", "data_ptr", "untyped_storage", "storage"),
    *("requires_grad_", "retain_grad", "backward"),
    # ``ScalerHooks.overflows`` makes a scaler see overflows on all ranks.
    "_amp_foreach_non_finite_check_and_unscale_",
    *("detach_", "is_shared", "share_memory_", "is_pinned", "_is_view", "is_set_to"),
} - {"__repr__"}
WRITES = (
    "x[...] = value writes into it: write x = torch.where(mask, value, x), or "
    "x = x.masked_fill(mask, number), which make a new tensor"
)
VIEWS = {"view", "reshape", "unflatten", "flatten", "view_as", "reshape_as"}
SPLITS = {"split", "chunk", "tensor_split", "split_with_sizes"}
_NAMES = """
    abs add addcmul celu clamp clip cos div dropout elu erf exp float full_like gelu
    hardsigmoid hardswish hardtanh leaky_relu lerp log1p logsigmoid masked_fill maximum
    minimum mish mul multiply nan_to_num neg ones_like pow reciprocal relu relu6 rsqrt rsub
    selu sigmoid silu sin softplus softsign sqrt square sub subtract tanh tanhshrink
    true_divide where zeros_like
"""
_OPERATORS = ("add", "sub", "mul", "truediv", "pow")
# Where functions have the option to change their first argument.
_IN_PLACE_OPTION = {
    **dict.fromkeys(("relu", "relu6", "selu", "silu", "mish", "hardswish", "hardsigmoid"), 1),
    **dict.fromkeys(("celu", "elu", "leaky_relu"), 2),
    **dict.fromkeys(("dropout", "alpha_dropout", "hardtanh"), 3),
}
_MORE_OPERATORS = ("floordiv", "mod", "and", "or", "xor", "div")
_IN_PLACE = {
    *(f"__i{name}__" for name in (*_OPERATORS, *_MORE_OPERATORS, "lshift", "rshift", "matmul")),
    "__setitem__",
}
ELEMENTWISE = [
    *(each for name in _NAMES.split() for each in (name, f"{name}_")),
    *(f"__{kind}{name}__" for kind in ("", "r", "i") for name in _OPERATORS),
    *("__neg__", "contiguous", "clone", "to", "type", "type_as", "half", "bfloat16", "double"),
    *("alpha_dropout", "cuda", "cpu", "detach", "eq", "ne", "lt", "le", "gt", "ge"),
    *("__lt__", "__gt__", "__le__", "__ge__"),
]
_MORE = """
    absolute acos acosh addcdiv arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh
    atan atan2 atanh bfloat16 bitwise_and bitwise_not bitwise_or bitwise_xor bool ceil clamp_max
    clamp_min conj conj_physical copy copysign cosh deg2rad digamma divide empty_like erfc erfinv
    exp2 expm1 fill fix float_power floor floor_divide fmax fmin fmod frac frexp heaviside
    hypot int isfinite isinf isnan isneginf isposinf isreal ldexp lgamma log log10 log2
    logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit long negative
    nextafter positive rad2deg remainder resolve_conj resolve_neg round sgn short sign signbit
    sinh special_expit tan threshold trunc xlogy zero
"""
EACH_ELEMENT = {
    *ELEMENTWISE,
    *(each for name in _MORE.split() for each in (name, f"{name}_")),
    *(f"__{kind}{name}__" for kind in ("", "r", "i") for name in _MORE_OPERATORS),
    *("__pos__", "__abs__", "__invert__", "__eq__", "__ne__"),
} - {"dropout", "dropout_", "alpha_dropout", "alpha_dropout_"}
"""Operations that compute each element by itself, also those without a rule here."""
RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(SPLITS, _split),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "mT", "T", "t", "permute"), _rearrange),
    **dict.fromkeys(("expand", "expand_as", "unsqueeze", "squeeze", "unbind"), _rearrange),
    "__getitem__": _rearrange,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), _matmul),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum"), _along_another),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "var", "std"), _along_another),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalize),
    "cross_entropy": _cross_entropy,
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenate),
    **dict.fromkeys(("pad", "repeat_interleave", "roll"), _keeps_shape),
}
