"""A heavy group -> the least that any stage can take that has it in it.

The stage S of a group h takes the work of all its groups, and pays for what it sends and receives.
Whatever else a plan is, it takes at least

    min over all sets S with h of  work(S) + send(S) + receive(S)

which is a minimum cut: S is the side of h. A group on that side pays its work; a value pays once if
its owner is there and not all its readers, and once if a reader is there and not its owner. All
that lies between two groups of a stage is in it, so a group is kept off that side if what lies
between it and h is more than a stage can take. Where one group decides the bottleneck, this is
what the transfers around it add to the bound.
"""

from __future__ import annotations

import networkx as nx
import numpy as np

from ..cost import Floats, Value
from ..problem import Problem
from .reach import backwards, sum_over_reached

_MOST_GROUPS = 1000
_MOST_HEAVY = 8
_END = "end"
_ROUNDING = 1e-9


def bound_around_ms(problem: Problem, bound_ms: float, limit_ms: float) -> float:
    """A bound of the score of every plan within `limit_ms` that is above `bound_ms`, or `bound_ms`.

    Looked at are the few groups that take most with the transfers of all their values. Groups far
    from one count as free, which lowers what is found.
    """
    setting = problem.setting
    if not all(map(setting.talks_in_turn, range(problem.stages))):
        return bound_ms
    send_ms, receive_ms = (
        np.minimum.reduce([getattr(seen, name) for seen in problem.seen])
        for name in ("send_ms", "receive_ms")
    )
    most_ms = problem.least_work_ms.copy()
    for index, value in enumerate(problem.costs.values):
        most_ms[value.owner] += send_ms[index]
        most_ms[list(value.readers)] += receive_ms[index]
    for heavy in np.argsort(-most_ms, kind="stable")[:_MOST_HEAVY].tolist():
        if setting.rounds * most_ms[heavy] <= bound_ms:
            break
        apart = _apart(problem, heavy, limit_ms / setting.rounds)
        least_ms = _least_ms(problem, heavy, apart, send_ms, receive_ms)
        bound_ms = max(bound_ms, setting.rounds * least_ms)
    return bound_ms


def _apart(problem: Problem, heavy: int, most_ms: float) -> set[int]:
    """The groups between which and `heavy` there is more work than `most_ms`, theirs with it."""
    edges = problem.costs.edges
    graph = nx.DiGraph(edges)
    apart: set[int] = set()
    if heavy not in graph:
        return apart
    for reached, directed in (
        (nx.ancestors(graph, heavy), backwards(edges)),
        (nx.descendants(graph, heavy), edges),
    ):
        within = [edge for edge in directed if reached.union([heavy]).issuperset(edge)]
        between_ms = sum_over_reached(within, problem.least_work_ms)
        apart.update(group for group in reached if between_ms[group] > most_ms * (1 + _ROUNDING))
    return apart


def _least_ms(
    problem: Problem, heavy: int, apart: set[int], send_ms: Floats, receive_ms: Floats
) -> float:
    """The minimum over the sets that have `heavy` and nothing that is `apart`, in whole
    nanoseconds, rounded down."""
    near = _near(problem.costs.values, heavy)
    graph = nx.DiGraph()
    for group in near - {heavy} - apart:
        graph.add_edge(group, _END, capacity=_ns(problem.least_work_ms[group]))
    for group in near & apart:
        graph.add_edge(group, _END)  # without limit
    for index, value in enumerate(problem.costs.values):
        if value.owner not in near or near.isdisjoint(value.readers):
            continue
        sent, received = f"sent {index}", f"received {index}"
        graph.add_edge(value.owner, sent, capacity=_ns(send_ms[index]))
        graph.add_edge(received, value.owner, capacity=_ns(receive_ms[index]))
        for reader in near.intersection(value.readers):
            graph.add_edge(sent, reader)
            graph.add_edge(reader, received)
    if heavy not in graph or _END not in graph:
        return float(problem.least_work_ms[heavy])
    around_ns = int(nx.maximum_flow_value(graph, heavy, _END))
    return float(problem.least_work_ms[heavy]) + around_ns / 1e6


def _ns(milliseconds: float) -> int:
    return int(milliseconds * 1e6)


def _near(values: tuple[Value, ...], heavy: int) -> set[int]:
    """The groups nearest to one, by the values that join them."""
    joined = nx.Graph()
    joined.add_node(heavy)
    for value in values:
        nx.add_star(joined, (value.owner, *value.readers))
    found = nx.bfs_tree(joined, heavy)
    return {heavy, *list(found)[:_MOST_GROUPS]}
