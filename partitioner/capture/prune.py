"""A traced graph -> the same graph without what no output, no state and no random draw needs.

`fx.Graph.eliminate_dead_code` cannot be used: it deletes a statement such as `y.add_(1)`, whose
result nobody names.
"""

from __future__ import annotations

from torch import fx

from .graph import is_external
from .guards import is_guard


def prune(graph: fx.Graph) -> None:
    """Erases nodes that nothing needs.

    A node is needed by the output, by a needed node, as a change of an input, a parameter or a
    buffer, as a change of memory that a later needed node reads, as a guard, or because it draws
    random numbers: without it, later draws would differ from the model's.
    """
    nodes = list(graph.nodes)
    read: set[int] = set()
    for node in nodes:
        if is_external(node):
            read |= node.meta["storages"]
        read |= node.meta["touches"]
    needed: set[fx.Node] = set()
    decisions: set[int] = set()
    for node in reversed(nodes):
        if (
            node.op in ("output", "placeholder")
            or node.meta["random"]
            or node.meta.get("decision") in decisions
            or is_guard(node)
            or node.meta["mutates"] & read
            or any(user in needed for user in node.users)
        ):
            needed.add(node)
            decisions.update(region.decision for region in node.meta["regions"])
            read |= node.meta["storages"]
            for used in node.all_input_nodes:
                read |= used.meta["storages"]
    for node in reversed(nodes):
        if node not in needed:
            graph.erase_node(node)
