"""What a call or a whole forward returns -> the part of it that a graph can hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .structure import map_result


def fresh(value: Any, given: set[int]) -> Any:
    """`value` with every tensor that is an unchanged argument replaced by an alias of it.

    Dropout in evaluation mode returns its very argument; the alias tells the two apart, so that
    later readers name the same node as in training mode.
    """
    if isinstance(value, Tensor):
        return torch.ops.aten.alias.default(value) if id(value) in given else value
    if type(value) in (tuple, list):
        return type(value)(fresh(item, given) for item in value)
    return value


def plain(value: Any) -> Any:
    """A result without what is neither tensor nor number: a cache of keys and values."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if any(map(is_plain, leaves(item)))}
    if isinstance(value, (tuple, list)):
        return map_result(lambda leaf: leaf if is_plain(leaf) else None, value)
    return value if is_plain(value) else None


def is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (Tensor, int, float, str, torch.SymInt))


def leaves(value: Any) -> list[Any]:
    found: list[Any] = torch.utils._pytree.tree_leaves(value)
    return found
