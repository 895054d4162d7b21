"""A capture -> the groups of nodes that one stage must hold together.

A stage receives copies. So a tensor that is changed in place lives in one stage from the node that
makes it to its last change, and state that is changed (a buffer, an input) in the stage of all who
touch it. Parts of a tuple stay with the node that makes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor, fx

from .graph import Capture, is_external


def colocated(capture: Capture) -> list[frozenset[fx.Node]]:
    """Groups of two or more nodes that have to be in one stage, in program order.

    Nodes for inputs, parameters and buffers are in no group: every stage has its own.
    """
    nodes = [node for node in capture.graph.nodes if node.op != "output"]
    groups = _Groups()
    for node in nodes:
        if not is_external(node) and _must_follow(node):
            groups.join([node, *(user for user in node.users if user.op != "output")])
    for decided in _decided(nodes).values():
        groups.join(decided)
    for storage, touching in _touching(nodes).items():
        changes = [i for i, node in enumerate(touching) if storage in node.meta["mutates"]]
        if changes:
            is_state = any(is_external(node) for node in touching) or any(
                storage in node.meta["touches"] for node in touching
            )
            last = len(touching) if is_state else changes[-1] + 1
            groups.join(touching[:last])
    order = {node: position for position, node in enumerate(nodes)}
    found = [frozenset(node for node in group if not is_external(node)) for group in groups.all()]
    return sorted(
        (group for group in found if len(group) > 1),
        key=lambda group: min(order[node] for node in group),
    )


def _must_follow(node: fx.Node) -> bool:
    """Whether the readers of a node's value have to be where it is made: it is no tensor, its
    shape depends on the values of tensors, or one mode alone has it."""
    if not isinstance(node.meta["val"], Tensor):
        return True
    if any(region.is_decided for region in node.meta["regions"]) or "decision" in node.meta:
        return True
    return bool(node.meta["data_dependent"])


def _decided(nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    """What each decision leaves out, with the decision."""
    found: dict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if "decision" in node.meta:
            found[node.meta["decision"]].append(node)
        for region in node.meta.get("regions", ()):
            if region.kind == "unless":
                found[region.decision].append(node)
    return found


def _touching(nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    """For each piece of memory the nodes that make, view, read or change it, in order."""
    found: dict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        storages = set(node.meta["storages"] | node.meta["mutates"] | node.meta["touches"])
        for used in node.all_input_nodes:
            storages |= used.meta["storages"]
        for storage in sorted(storages):
            found[storage].append(node)
    return found


class _Groups:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}

    def join(self, nodes: Iterable[fx.Node]) -> None:
        roots = [self._root(node) for node in nodes]
        for root in roots[1:]:
            self._parent[root] = roots[0]

    def _root(self, node: fx.Node) -> fx.Node:
        self._parent.setdefault(node, node)
        while self._parent[node] is not node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def all(self) -> list[list[fx.Node]]:
        found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self._parent:
            found[self._root(node)].append(node)
        return list(found.values())
