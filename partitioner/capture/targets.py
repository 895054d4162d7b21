"""A torch function as the mode sees it -> the fx call that a person would have written."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from .frames import is_augmented_assignment
from .structure import tensors_in

_BINARY = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "matmul": operator.matmul, "pow": operator.pow, "eq": operator.eq, "ne": operator.ne,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
    "remainder": operator.mod,
    "__add__": operator.add, "__sub__": operator.sub, "__mul__": operator.mul,
    "__truediv__": operator.truediv, "__div__": operator.truediv, "__matmul__": operator.matmul,
    "__pow__": operator.pow, "__eq__": operator.eq, "__ne__": operator.ne, "__lt__": operator.lt,
    "__le__": operator.le, "__gt__": operator.gt, "__ge__": operator.ge,
    "__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor,
    "__mod__": operator.mod, "__floordiv__": operator.floordiv,
    "__lshift__": operator.lshift, "__rshift__": operator.rshift,
    "__getitem__": operator.getitem,
}  # fmt: skip
_REVERSED = {
    "__radd__": operator.add, "__rsub__": operator.sub, "__rmul__": operator.mul,
    "__rdiv__": operator.truediv, "__rtruediv__": operator.truediv, "__rpow__": operator.pow,
    "__rmatmul__": operator.matmul, "__rfloordiv__": operator.floordiv, "__rmod__": operator.mod,
    "__rand__": operator.and_, "__ror__": operator.or_, "__rxor__": operator.xor,
}  # fmt: skip
_IN_PLACE = {
    "add_": operator.iadd, "sub_": operator.isub, "mul_": operator.imul,
    "div_": operator.itruediv, "true_divide_": operator.itruediv, "pow_": operator.ipow,
    "bitwise_and_": operator.iand, "bitwise_or_": operator.ior, "bitwise_xor_": operator.ixor,
    "__iadd__": operator.iadd, "__isub__": operator.isub, "__imul__": operator.imul,
    "__itruediv__": operator.itruediv, "__idiv__": operator.itruediv, "__ipow__": operator.ipow,
    "__iand__": operator.iand, "__ior__": operator.ior, "__ixor__": operator.ixor,
    "__ifloordiv__": operator.ifloordiv, "floor_divide_": operator.ifloordiv,
    "__imod__": operator.imod, "remainder_": operator.imod,
}  # fmt: skip
_UNARY = {
    "neg": operator.neg, "__neg__": operator.neg, "__invert__": operator.invert,
    "bitwise_not": operator.invert,
}  # fmt: skip
_METHODS = (FunctionType, MethodDescriptorType, WrapperDescriptorType)

Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def as_node(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
) -> Call:
    """Op, target, arguments and keyword arguments of the fx node for a call of `func`.

    `frame` is the user's: it tells `y += 1` from `y.add_(1)`, which torch does not.
    """
    if func is torch.ops.aten.detach.default:  # torch.autograd.Variable(x)
        func = Tensor.detach
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__), {}
    if name == "__set__":
        # `x.requires_grad = True`; the other properties that can be set are refused before.
        return "call_method", "requires_grad_", (args[0], args[1]), {}
    method = getattr(Tensor, name, None)
    if method is not func or not isinstance(method, _METHODS):
        return "call_function", func, args, kwargs
    if name == "__setitem__":
        return "call_function", operator.setitem, args, {}
    if not kwargs:
        if len(args) == 2 and name in _IN_PLACE:
            written = name.startswith("__") or (frame and is_augmented_assignment(frame))
            if written:
                return "call_function", _IN_PLACE[name], args, {}
        if len(args) == 2 and name in _BINARY:
            return "call_function", _BINARY[name], args, {}
        if len(args) == 2 and name in _REVERSED:
            return "call_function", _REVERSED[name], args[::-1], {}
        if len(args) == 1 and name in _UNARY:
            return "call_function", _UNARY[name], args, {}
    return "call_method", name, args, kwargs


def stand_in(func: Any) -> Callable[..., Any] | None:
    """A function to run on fake tensors in place of one whose fake version differs from the
    real one."""
    return _STAND_INS.get(func)


def traced(func: Callable[..., Any]) -> Callable[..., Any]:
    """What a tracer runs for `func`: it wants to know what comes out, not how."""
    return _SHORT_CUTS.get(func) or stand_in(func) or func


def runnable(func: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
    """What to call for `func`: its stand-in if there is one and a tensor among the arguments has
    no data."""
    other = stand_in(func)
    without_data = other is not None and any(
        tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors_in(arguments)
    )
    return other if other is not None and without_data else func


def _like_grouped_mm(left: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
    return left @ (right[0] if right.dim() == 3 else right)


def _like_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return F.dropout(input, p, training, inplace) if training and p else input


_STAND_INS: dict[Any, Callable[..., Any]] = {
    # On fake tensors torch makes a copy where on real ones it gives back its argument.
    F.dropout: _like_dropout,
    # On fake tensors torch 2.13 accepts bfloat16 only, on real ones others too.
    getattr(F, "grouped_mm", None): _like_grouped_mm,
    getattr(torch, "_grouped_mm", None): _like_grouped_mm,
}


def _attention_result(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Shape, dtype, gradient and draws of an attention, without its fifteen operators."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind) or query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    given = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
    made_from = next((tensor for tensor in given if tensor.requires_grad), query)
    batch: Any = query.shape[:2]
    if not enable_gqa:
        batch = torch.broadcast_shapes(batch, key.shape[:2])  # type: ignore[no-untyped-call]
    empty = query.new_empty((*batch, query.shape[2], value.shape[3]))
    result = empty + made_from.sum().to(query.dtype)
    return F.dropout(result, dropout_p) if dropout_p else result


def _linear_result(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Shape, dtype and gradient of a product with a weight, without unfolding it."""
    is_plain = weight.dim() == 2 and input.dtype == weight.dtype
    fits = is_plain and input.shape[-1] == weight.shape[1]
    if not fits or torch.is_autocast_enabled(input.device.type):
        return F.linear(input, weight, bias)
    given = [weight, input] if bias is None else [weight, bias, input]
    made_from = next((tensor for tensor in given if tensor.requires_grad), weight)
    empty = input.new_empty((*input.shape[:-1], weight.shape[0]))
    return empty + made_from.sum().to(input.dtype)


_SHORT_CUTS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear_result,
    F.scaled_dot_product_attention: _attention_result,
}


@contextmanager
def averaging(module: nn.Module) -> Iterator[None]:
    """Batch norm without a momentum divides by a count, which on tensors without data is no
    number."""
    if (
        not isinstance(module, _BatchNorm)
        or module.momentum is not None
        or (detect_fake_mode() is None and not any(b.is_meta for b in module.buffers()))
    ):
        yield
        return
    module.momentum = 0.1
    try:
        yield
    finally:
        module.momentum = None


def refusal(func: Any) -> Callable[[str], tuple[str, str]] | None:
    """What to say of a function that no graph can hold, given where it is called."""
    name = getattr(func, "__name__", "")
    if name == "__set__" and func.__self__.__name__ in ("data", "grad"):
        return _assigned_state
    if func is torch.autograd.grad:
        return _gradient
    return _REFUSED.get(name)


def own_generator(where: str) -> tuple[str, str]:
    """What to say of a draw from a torch.Generator of the model's own."""
    return (
        f"{where} draws from a torch.Generator of its own, whose state no stage could hold.",
        "Draw from torch's default generator: leave out generator=...; each micro-batch has a "
        "state of it that follows from --seed.",
    )


def _assigned_state(where: str) -> tuple[str, str]:
    return (
        f"{where} assigns the data or the gradient of a tensor, which a graph cannot hold.",
        "Compute a new tensor instead, or copy into this one: x.copy_(y).",
    )


def _hook(where: str) -> tuple[str, str]:
    return (
        f"{where} registers a hook on a tensor, which a graph cannot hold.",
        "Write it as a torch.autograd.Function, or keep the module as one node: --leaf Class.",
    )


def _backward(where: str) -> tuple[str, str]:
    return (
        f"{where} calls backward inside forward.",
        "Keep the module as one node: --leaf Class.",
    )


def _gradient(where: str) -> tuple[str, str]:
    return (
        f"{where} computes a gradient inside forward.",
        "Keep the module as one node: --leaf Class.",
    )


def _packing(where: str) -> tuple[str, str]:
    return (
        f"{where} packs a padded sequence, whose sizes depend on the values of its lengths.",
        "Mask the padding instead, or keep the module that packs and unpacks as one node: "
        "--leaf Class.",
    )


_REFUSED = {
    "_pack_padded_sequence": _packing,
    "register_hook": _hook,
    "register_post_accumulate_grad_hook": _hook,
    "backward": _backward,
}
