"""A stretch of Dynamo's graph inside `vmap` or `grad` of torch.func -> plain functions of tensors.

Within a transform a tensor is not what it seems: a vmapped row is a whole batch. What really
happens is seen where operators run, one level below; it is called again, at the level of torch
functions, for the tracer to write down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ...runtime.errors import CaptureError
from .structure import map_leaves, tensors_in
from .tracer import Tracer


class Transforms:
    """Follows the nodes of a graph; takes those of a transform, and runs them at its end."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._depth = 0
        self._operators = _Operators()

    def take(
        self, node: fx.Node, args: Any, kwargs: Any, values: MutableMapping[fx.Node, Any]
    ) -> bool:
        """Runs a node if it belongs to a transform, and says whether it did."""
        name = getattr(node.target, "__name__", str(node.target))
        opens = name.endswith("_increment_nesting")
        if not self._depth and not opens:
            return False
        self._depth += opens
        with self._tracer.quiet(), self._operators:
            if node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            elif node.op == "call_function" and callable(node.target):
                values[node] = node.target(*args, **kwargs)
            else:
                raise CaptureError(f"{node.target} is used inside a transform of torch.func.")
        self._depth -= name.endswith("_decrement_nesting")
        if not self._depth:
            known = self._operators.again()
            for made, value in list(values.items()):
                values[made] = map_leaves(
                    lambda leaf: known.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf,
                    value,
                )
            self._operators = _Operators()
        return True


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the calls of operators that run within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def again(self) -> dict[int, Any]:
        """Calls everything once more by its name in torch; what the tensors are then, by their
        `id` before."""
        known: dict[int, Any] = {}

        def current(leaf: Any) -> Any:
            return known.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

        for func, args, kwargs, old in self._calls:
            options = map_leaves(current, _written(kwargs))
            result = spelled(func)(*map_leaves(current, args), **options)
            if isinstance(old, Tensor):
                known[id(old)] = result
                continue
            for before, after in zip(tensors_in(old), tensors_in(result), strict=True):
                known[id(before)] = after
        return known


def spelled(func: Any) -> Callable[..., Any]:
    """What a person would call an operator: a method of tensors, or a function of torch.

    >>> spelled(torch.ops.aten.add.Tensor) is Tensor.add
    True
    """
    namespace, name = func._schema.name.split("::")
    if namespace != "aten":
        return func  # type: ignore[no-any-return]
    if name in _NAMES:
        return _NAMES[name]
    arguments = func._schema.arguments
    is_method = bool(arguments) and arguments[0].name == "self"
    homes = [Tensor] if is_method else []
    for home in (*homes, torch, torch._C._nn):
        found = getattr(home, name, None)
        if found is not None and not name.startswith("_"):
            return found  # type: ignore[no-any-return]
    return func  # type: ignore[no-any-return]


def _written(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an operator without those that nobody would write."""
    return {
        name: value
        for name, value in options.items()
        if name not in ("pin_memory", "layout", "non_blocking")
        and value is not None
        and value is not torch.preserve_format
    }


def _to(value: Any, **options: Any) -> Any:
    # A number needs no conversion.
    return value.to(**options) if isinstance(value, Tensor) else value


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _norm(
    tensor: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, ord, dim, keepdim, **options)
    return norm


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(tensor: Tensor, dim: int, half_to_float: bool) -> Tensor:
        return function(tensor, dim, dtype=torch.float32 if half_to_float else None)

    return call


_NAMES: Mapping[str, Callable[..., Any]] = {
    "_to_copy": _to,
    "alias": _same,
    "_unsafe_view": Tensor.view,
    "linalg_vector_norm": _norm,
    "_softmax": _softmax(F.softmax),
    "_log_softmax": _softmax(F.log_softmax),
}
