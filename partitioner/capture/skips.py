"""Layers that training leaves out at random -> nodes that are run unless a number says so.

`if torch.rand([]) < self.layerdrop: continue` has no one answer. The graph is that of no layer
left out; for each such decision forward runs once more with the other answer, and what is missing
from that graph is what the decision leaves out. Those nodes are in a region of the decision, and
what follows reads a choice: `unless(dropped, made, former)`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ...runtime.errors import CaptureError
from .graph import is_external
from .merge import Different, aligned, merged_arguments
from .values import Region


def unless(condition: Any, made: Any, former: Any) -> Any:
    """`former` where the condition holds, else `made`."""
    return former if condition else made


def is_drawn_below(condition: fx.Node) -> bool:
    """Whether a condition asks if a number drawn from 0 to 1 is below a fixed one."""
    if condition.target is not operator.lt:
        return False
    drawn, limit = condition.args
    is_drawn = isinstance(drawn, fx.Node) and drawn.target is torch.rand
    return is_drawn and isinstance(limit, (int, float))


def add_skip(graph: fx.Graph, condition: fx.Node, skipping: fx.Graph, decision: int) -> None:
    """Writes into the graph what the condition leaves out, given the graph where it does.

    Raises Different where leaving nodes out is not all that the condition does.
    """
    pairs = aligned(graph, skipping)
    partner = {other: node for node, other in pairs}
    now: dict[fx.Node, fx.Node] = {}  # What earlier decisions have made of a value.
    for node in graph.nodes:
        if node.target is unless:
            now[node.args[1]] = node
    kept = {*partner.values(), *now.values()}
    if any(node not in partner for node in skipping.nodes if not is_external(node)):
        raise Different
    skipped = [node for node in graph.nodes if node not in kept and not is_external(node)]
    if not skipped or skipped[0] < condition:
        raise Different
    region = Region("unless", decision=decision)
    for node in skipped:
        node.meta["regions"] = (region, *node.meta["regions"])
    condition.meta["decision"] = decision
    condition.meta["hint"] = "dropped"
    choices: dict[tuple[fx.Node, fx.Node], fx.Node] = {}

    def chosen(made: fx.Node, other: fx.Node) -> fx.Node:
        former = now.get(partner[other], partner[other])
        if former is made or partner[other] is made:
            return made
        if made not in skipped:
            raise Different
        if (made, former) not in choices:
            choices[made, former] = _choice(graph, condition, made, former, skipped[-1])
        return choices[made, former]

    for node, other in pairs:
        if not is_external(node):
            node.args = merged_arguments(node.args, other.args, chosen)
            node.kwargs = merged_arguments(node.kwargs, other.kwargs, chosen)


def undecided(condition: fx.Node) -> CaptureError:
    """What to say of a decision that does more than leave something out."""
    file, line = condition.meta["source"]
    return CaptureError(
        f"{file}:{line} decides at random between ways through forward that are more than a layer "
        "left out.",
        "Set the probability to 0, or keep the module as one node: --leaf Class.",
    )


def _choice(
    graph: fx.Graph, condition: fx.Node, made: fx.Node, former: fx.Node, last: fx.Node
) -> fx.Node:
    with graph.inserting_after(last):
        node = graph.call_function(unless, (condition, made, former))
    node.meta.update(
        made.meta, calls=condition.meta["calls"], regions=made.meta["regions"][1:],
        source=condition.meta["source"], random=False, mutates=frozenset(), touches=frozenset(),
        storages=made.meta["storages"] | former.meta["storages"], from_sizes=False,
    )  # fmt: skip
    return node
