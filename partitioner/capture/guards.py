"""What forward decided by the values of tensors -> nodes that refuse inputs that decide otherwise.

A captured graph is one way through forward. Where that way depends on values, the graph holds a
call of `must_hold` or `must_fail`: for inputs that would go another way it raises, in place of
giving numbers that are not the model's.
"""

from __future__ import annotations

from typing import Any

from torch import fx


def must_hold(condition: Any, where: str) -> None:
    """Raises RuntimeError unless the condition, a tensor or a bool, is true."""
    if not condition:
        raise RuntimeError(other_way(where))


def must_fail(condition: Any, where: str) -> None:
    """Raises RuntimeError if the condition, a tensor or a bool, is true."""
    if condition:
        raise RuntimeError(other_way(where))


def is_guard(node: fx.Node) -> bool:
    return node.target in (must_hold, must_fail)


def other_way(where: str) -> str:
    """What is said of inputs that take another way at a line of the user's."""
    return f"captured for inputs that go the other way at {where}"
