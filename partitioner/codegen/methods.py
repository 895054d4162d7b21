"""Nodes of a stage -> whether a separate method can compute them.

A method takes its arguments and returns its results in both modes, so none of them may be a value
that only one mode, or one outcome of a random decision, computes:

    if self.training:
        hidden = hidden * 2
    else:
        other = self.linear(hidden)
    y = self.relu(x)
    hidden = self.gate(hidden, other)  # One of the two has no value.

Such a call is written out in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set

from torch import fx

from ..capture import Region
from ..capture.mode_merge import unless

Readers = Mapping[fx.Node, Set[fx.Node | None]]


def decided(regions: Iterable[Region]) -> frozenset[Region]:
    """The regions in which a statement runs only sometimes."""
    return frozenset(region for region in regions if region.is_decided)


def decided_around(node: fx.Node) -> frozenset[Region]:
    """The regions around a node in which it runs only sometimes."""
    return decided(node.meta.get("regions", ()))


def decisions_in(nodes: Iterable[fx.Node]) -> dict[int, set[fx.Node]]:
    """The nodes of each decision, by its number: its condition, the nodes that run only under it,
    and the choices that it makes."""
    nodes_of: dict[int, set[fx.Node]] = defaultdict(set)
    for node in nodes:
        numbers = [region.decision for region in node.meta.get("regions", ())]
        numbers.append(node.meta.get("decision", -1))
        if node.target is unless:
            numbers.append(node.all_input_nodes[0].meta["decision"])
        for number in numbers:
            if number >= 0:
                nodes_of[number].add(node)
    return nodes_of


def can_be_method(
    nodes: Set[fx.Node],
    order: Sequence[fx.Node],
    readers: Readers,
    decisions: Mapping[int, Set[fx.Node]],
) -> bool:
    """Returns whether the nodes are contiguous, whether each of their arguments and results has a
    value wherever the method is called, and whether every decision is made where it is read."""
    if not _is_contiguous(nodes, order):
        return False
    around = frozenset.intersection(*map(decided_around, nodes))
    crossing = {node for node in nodes if readers[node] - nodes}
    crossing |= {source for node in nodes for source in node.all_input_nodes} - nodes
    if not all(decided_around(node) <= around for node in crossing):
        return False
    return all(
        members <= nodes or not members & nodes or any(r.decision == number for r in around)
        for number, members in decisions.items()
    )


def _is_contiguous(nodes: Set[fx.Node], order: Sequence[fx.Node]) -> bool:
    positions = [position for position, node in enumerate(order) if node in nodes]
    return positions[-1] - positions[0] + 1 == len(positions)
