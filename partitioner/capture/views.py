"""A node -> whether its value is a view, and whether it would be one of another tensor."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

_OF_SHAPE = frozenset({"view", "reshape", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze"})
_OF_ORDER = frozenset(
    {"transpose", "permute", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint"}
)
_OF_PARTS = frozenset(
    {"narrow", "select", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit"}
    | {"dsplit", "unbind", "diagonal", "unfold", "expand", "broadcast_to"}
)
_OF_ALL = frozenset({"detach", "alias", "contiguous", "to", "type", "float", "double", "long"})
_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# As another tensor -> to sizes.
_AS_ANOTHER = {"view_as": "view", "expand_as": "expand", "reshape_as": "reshape"}
# Copies where the values do not lie in memory so that a view would do.
_BY_LAYOUT = frozenset({"reshape", "reshape_as", "flatten", "ravel", "contiguous"})


def _name(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def is_view(node: fx.Node) -> bool:
    """Whether the same call on a copy of its first argument would make the same view of that.

    Said of a node whose value is in its argument's memory.
    """
    if node.op not in ("call_function", "call_method") or node.meta["random"]:
        return False
    if node.meta["mutates"] or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if len(node.all_input_nodes) > 1:
        return _name(node) in _AS_ANOTHER
    if node.target is getattr:
        return node.args[1] in _PROPERTIES
    if node.target is operator.getitem:
        return True
    return _name(node) in _OF_SHAPE | _OF_ORDER | _OF_PARTS | _OF_ALL | _AS_ANOTHER.keys()


def may_copy(node: fx.Node) -> bool:
    """Whether a node's value is a copy of its argument only because of how that lies in memory."""
    if node.op not in ("call_function", "call_method") or _name(node) not in _BY_LAYOUT:
        return False
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and not node.meta["storages"] & source.meta["storages"]


def view_again(node: fx.Node, source: fx.Node) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
    """The fx call that views `source` as the node views its argument; no other node is needed."""
    name = _AS_ANOTHER.get(_name(node))
    if name is not None:
        return "call_method", name, (source, tuple(node.meta["shape"])), {}
    return node.op, node.target, (source, *node.args[1:]), dict(node.kwargs)
