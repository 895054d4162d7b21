"""Tensors whose values follow from sizes alone -> those values, so that forward may branch on them.

`torch.arange(length)` holds no data: a test such as "are the positions consecutive?" has one answer
for all sizes, and a model may ask it (transformers does, to leave out a causal mask). The nodes
that made the tensor are run for real at several sizes; only an answer that they share counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from .structure import map_leaves
from .values import LocalDevice, Size

READERS = frozenset({"__bool__", "__int__", "__float__", "__index__", "item", "tolist"})


def follows_from_sizes(node: fx.Node) -> bool:
    """Whether a new node's value depends on no input, parameter, buffer or random number."""
    return (
        node.op in ("call_function", "call_method")
        and not node.meta["random"]
        and not node.meta["touches"]
        and not node.meta["mutates"]
        and all(used.meta["from_sizes"] for used in node.all_input_nodes)
    )


def known_answer(
    node: fx.Node, samples: Iterable[Mapping[str, int]], read: Callable[[Tensor], Any]
) -> Any:
    """What `read` says of a node that follows from sizes; None if it depends on the sizes."""
    nodes = _ancestors(node)
    memory = {storage for used in nodes for storage in used.meta["storages"]}
    if any(memory & other.meta["mutates"] for other in node.graph.nodes):
        return None
    with _disable_current_modes(), torch.no_grad():
        first, *others = [read(_evaluate(nodes, sizes)) for sizes in samples]
    return first if all(first == other for other in others) else None


def _ancestors(node: fx.Node) -> list[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += current.all_input_nodes
    return sorted(found)


def _evaluate(nodes: list[fx.Node], sizes: Mapping[str, int]) -> Tensor:
    values: dict[fx.Node, Any] = {}

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, Size):
            return value.evaluate(sizes)
        return torch.device("cpu") if isinstance(value, LocalDevice) else value

    for node in nodes:
        args, kwargs = map_leaves(leaf, node.args), map_leaves(leaf, node.kwargs)
        if node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
    result = values[nodes[-1]]
    assert isinstance(result, Tensor)
    return result
