"""A node -> what its value is a view of, and the call that takes the same view of a copy."""

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
_VIEWS = _OF_SHAPE | _OF_ORDER | _OF_PARTS | _OF_ALL | _AS_ANOTHER.keys()
# Copies where the values do not lie in memory so that a view would do.
_BY_LAYOUT = frozenset({"reshape", "reshape_as", "flatten", "ravel", "contiguous"})


def _name(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def viewed(node: fx.Node) -> fx.Node | None:
    """The argument of which a node's value is a view, if the same call on a copy of it would make
    the same view of that."""
    source = _source(node)
    if source is None or node.meta["random"] or node.meta["mutates"]:
        return None
    if not node.meta["storages"] or node.meta["storages"] != source.meta["storages"]:
        return None
    if _name(node) == "detach" and node.meta["val"].requires_grad:
        return None  # A change has given it a gradient that is not its source's.
    if len(node.all_input_nodes) > 1:
        again = _name(node) in _AS_ANOTHER
    elif node.target is getattr:
        again = node.args[1] in _PROPERTIES
    else:
        again = node.target is operator.getitem or _name(node) in _VIEWS
    return source if again else None


def copied_for_its_layout(node: fx.Node) -> fx.Node | None:
    """The argument of which a node's value is a copy only because of how that lies in memory."""
    source = _source(node)
    if source is None or _name(node) not in _BY_LAYOUT:
        return None
    return None if node.meta["storages"] & source.meta["storages"] else source


def _source(node: fx.Node) -> fx.Node | None:
    source = node.args[0] if node.args else None
    is_call = node.op in ("call_function", "call_method")
    return source if is_call and isinstance(source, fx.Node) else None


def view_again(node: fx.Node, source: fx.Node) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
    """The fx call that views `source` as the node views its argument; no other node is needed."""
    name = _AS_ANOTHER.get(_name(node))
    if name is not None:
        return "call_method", name, (source, tuple(node.meta["shape"])), {}
    return node.op, node.target, (source, *node.args[1:]), dict(node.kwargs)
