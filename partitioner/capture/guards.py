"""What forward decided by values or sizes -> nodes that refuse inputs that decide otherwise.

A captured graph is one way through forward. Where that way depends on the values of tensors, the
graph holds a call of `must_hold` or `must_fail`, where it depends on sizes one of `must_fit`: for
inputs that would go another way it raises, in place of giving numbers that are not the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def must_fit(fits: bool, condition: str, sizes: Mapping[str, int]) -> None:
    """Raises RuntimeError unless the sizes meet the condition, which is told with its line."""
    if not fits:
        raise RuntimeError(unfit(condition, {name: str(size) for name, size in sizes.items()}))


def is_guard(node: fx.Node) -> bool:
    return node.target in (must_hold, must_fail, must_fit)


def other_way(where: str) -> str:
    """What is said of inputs that take another way at a line of the user's."""
    return f"captured for inputs that go the other way at {where}"


def unfit(condition: str, sizes: Mapping[str, str]) -> str:
    """What is said of inputs whose sizes do not meet a condition."""
    given = " and ".join(f"{name} {size}" for name, size in sizes.items())
    return f"captured for {condition}, not for {given}: make the plan again with such an example"


def is_refusal(error: BaseException | None) -> bool:
    """Whether an exception comes from what a guard says."""
    while error is not None:
        if isinstance(error, RuntimeError) and str(error).startswith("captured for "):
            return True
        error = error.__cause__
    return False


def refused_sizes(graph: fx.Graph, sizes: Mapping[str, int]) -> str:
    """What the graph's guards say of sizes that they refuse; empty if they let them pass."""
    for node in graph.find_nodes(op="call_function", target=must_fit):
        condition, where, symbols = node.args
        if not condition.evaluate(sizes):
            return unfit(where, {name: str(sizes[name]) for name in symbols})
    return ""
