"""A node -> whether it changes something in place."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx


def is_mutating(node: fx.Node) -> bool:
    """Whether a node changes one of its arguments or a buffer in place."""
    if node.meta.get("mutates"):
        return True
    if node.op == "call_method":
        return _ends_in_place(str(node.target))
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":
        return name == "setitem" or node.target in AUGMENTED
    in_place = _ends_in_place(name) or name == "setattr"
    return in_place or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


def _ends_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


AUGMENTED: Mapping[Any, str] = {
    getattr(operator, f"i{name}"): f"{sign}="
    for name, sign in {
        "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%",
        "matmul": "@", "pow": "**", "and": "&", "or": "|", "xor": "^", "lshift": "<<",
        "rshift": ">>",
    }.items()
}  # fmt: skip
"""The functions of `x += y` and its like, with their signs."""
