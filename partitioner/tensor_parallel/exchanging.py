"""Losses of logits, the operations over divided classes in which the ranks exchange values.

Each is written as a call of its split version in `runtime/tensor_parallel`, with the number of all
classes as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ...runtime.tensor_parallel.vocabulary import (
    split_cross_entropy,
    split_log_softmax,
    split_nll_loss,
)
from ..capture import Capture


@dataclass(frozen=True)
class _Loss:
    """A split version of a function.

    version: the split one
    arguments: the names of the arguments of the plain one that are positional in both
    with_classes: whether it is given the number of classes
    """

    version: Callable[..., Any]
    positional: tuple[str, ...]
    with_classes: bool = True


_CROSS_ENTROPY = _Loss(split_cross_entropy, ("input", "target"))
_NLL_LOSS = _Loss(split_nll_loss, ("input", "target"))
_LOG_SOFTMAX = _Loss(split_log_softmax, ("input", "dim"), with_classes=False)
_OPTIONS = frozenset({"weight", "ignore_index", "reduction", "label_smoothing", "dtype"})


def has_loss(capture: Capture) -> bool:
    """True if the model returns a loss, a single number, which a training run reads alone."""
    (output,) = capture.graph.find_nodes(op="output")
    (returned,) = output.args
    loss = returned.get("loss") if isinstance(returned, Mapping) else None
    return isinstance(loss, fx.Node) and loss.meta["shape"] == ()


def split_version(
    node: fx.Node, module: nn.Module | None, source: fx.Node, classes: int
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """The call that computes a node whose input `source` is in parts of so many classes: function,
    arguments and keyword arguments. None if there is none."""
    loss, given = _call(node, module)
    if loss is None or given.get("input") is not source:
        return None
    args = tuple(given.pop(name) for name in loss.positional if name in given)
    if len(args) < len(loss.positional) or not given.keys() <= _OPTIONS:
        return None
    tensors = [value for value in given.values() if isinstance(value, fx.Node)]
    if any(_is_trained(value) for value in tensors):
        return None
    return loss.version, args, given | ({"classes": classes} if loss.with_classes else {})


def _call(node: fx.Node, module: nn.Module | None) -> tuple[_Loss | None, dict[str, Any]]:
    """The split version, and the arguments of the plain function that are not its defaults."""
    loss, plain, names = _of_module(module)
    if loss is None:
        return _call_of_function(node)
    options = {name: getattr(module, name) for name in names}
    return loss, _given(plain, node.args, {**node.kwargs, **options})


def _of_module(
    module: nn.Module | None,
) -> tuple[_Loss | None, Callable[..., Any], tuple[str, ...]]:
    """The split version of a module, the function that it calls, and the attributes that it
    gives."""
    match module:
        case nn.CrossEntropyLoss(weight=None):
            names = ("ignore_index", "reduction", "label_smoothing")
            return _CROSS_ENTROPY, F.cross_entropy, names
        case nn.NLLLoss(weight=None):
            return _NLL_LOSS, F.nll_loss, ("ignore_index", "reduction")
        case nn.LogSoftmax():
            return _LOG_SOFTMAX, F.log_softmax, ("dim",)
    return None, F.cross_entropy, ()


def _call_of_function(node: fx.Node) -> tuple[_Loss | None, dict[str, Any]]:
    if node.op == "call_method" and node.target == "log_softmax":
        return _LOG_SOFTMAX, _given(_log_softmax, node.args, node.kwargs)
    functions: Mapping[Any, tuple[_Loss, Callable[..., Any]]] = {
        F.cross_entropy: (_CROSS_ENTROPY, F.cross_entropy),
        F.nll_loss: (_NLL_LOSS, F.nll_loss),
        F.log_softmax: (_LOG_SOFTMAX, F.log_softmax),
        torch.log_softmax: (_LOG_SOFTMAX, _log_softmax),
    }
    if node.op != "call_function" or node.target not in functions:
        return None, {}
    loss, plain = functions[node.target]
    return loss, _given(plain, node.args, node.kwargs)


def _log_softmax(input: Any, dim: Any, dtype: Any = None) -> None:
    """The arguments of `torch.log_softmax`, which has no signature."""


def _given(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that are not the defaults, by name."""
    parameters = signature(function).parameters
    try:
        bound = signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return {}
    return {
        name: value
        for name, value in bound.items()
        if isinstance(value, fx.Node) or value != parameters[name].default
    }


def _is_trained(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.requires_grad
