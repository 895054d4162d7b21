"""Costs -> lower bounds of the bottleneck of every plan, and other topological orders to cut.

Bounds hold for all plans, not only for cuts of one topological order, so the chain optimum alone is
not a bound. The bounds are: an equal share of the work, the largest group, and the following
relaxation. A group that is an ancestor or descendant of every other group has the same place in
every order. Groups between two such fixed groups may come in any order, so the relaxation treats
their work as divisible and transfers as free: filling one stage after the other is then optimal
(`_stages_needed`). If every group is fixed, there is only one order and the chain optimum is the
bound.

A fourth bound starts from a heavy group h (`bound_around_ms`). Its stage S computes all its groups
and pays for what it sends and receives, so in every plan it costs at least

    min over all sets S with h of  work(S) + send(S) + receive(S)

which is a minimum cut: S is the side of h. A group on that side pays its work; a value pays once if
its owner is on that side and not all its readers are, and once if a reader is on that side and its
owner is not. A stage contains everything between two of its groups, so a group stays off that side
if the work between it and h exceeds a stage. Where one group decides the bottleneck, this bound
adds the transfers around the group.

`other_orders` gives topological orders that differ much from the given one, because the best cut of
any order is a plan. Where branches are parallel, three orders divide the work in different ways:
one that finishes each branch first, one that advances all branches at the same pace, and one that
postpones everything until a reader needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import networkx as nx
import numpy as np

from ..graph.costs import Costs, Floats, Ints, Value
from ..graph.problem import Placement, Problem


def lower_bound_ms(problem: Problem, placement: Placement) -> float:
    """The best known bound of the score of all plans with one stage per rank, or of all plans if
    `placement` is not of that kind.
    """
    if placement.ranks is not None:
        return float(problem.setting.rounds * problem.least_work_ms.sum() / problem.stages)
    if placement.bound_ms is not None:
        return placement.bound_ms
    return max(simple_bound_ms(problem), _order_ms(problem, placement))


def simple_bound_ms(problem: Problem) -> float:
    """The bound that follows from the work alone, for all plans with one stage per rank."""
    least_ms = problem.least_work_ms
    shared_ms = float(least_ms.sum() / ratios(problem).sum())
    return problem.setting.rounds * max(_relaxed_ms(problem, least_ms), shared_ms)


def more_than_any_ms(problem: Problem) -> float:
    """An upper bound of every plan's score: every stage computes everything twice, sends and
    receives it.
    """
    most_ms = max(
        2 * float(seen.work_ms.sum())
        + len(seen.groups) * float(seen.send_ms.sum() + seen.receive_ms.sum())
        for seen in problem.seen
    )
    return (2 * problem.setting.rounds + 3) * most_ms * (1 + 1e-9)


def ratios(problem: Problem) -> Floats:
    """For each position, the most work, in times of the fastest device, that it completes in a time
    of 1.
    """
    least_ms = problem.least_work_ms
    busy = least_ms > 0
    return np.array(
        [
            (least_ms[busy] / seen.work_ms[busy]).max() if busy.any() else 1.0
            for seen in problem.seen
        ]
    )


def _order_ms(problem: Problem, placement: Placement) -> float:
    """The proved optimum of the given order, if it is the only order."""
    proved = placement.order_optimum_ms
    if proved is None or not problem.rules.may_cut.all() or not all(is_fixed(problem.costs)):
        return 0.0
    return proved


def _relaxed_ms(problem: Problem, least_ms: Floats) -> float:
    if not least_ms.sum():
        return 0.0
    pieces = _fixed_and_divisible(problem.costs, least_ms)
    low = max(least_ms.sum() / problem.stages, least_ms.max())
    high = float(least_ms.sum())
    if _stages_needed(pieces, low) <= problem.stages:
        return float(low)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _stages_needed(pieces, middle) <= problem.stages:
            high = middle
        else:
            low = middle
    return float(low)


def _fixed_and_divisible(costs: Costs, least_ms: Floats) -> list[tuple[bool, float]]:
    """The groups in order as (is fixed, ms); adjacent groups that are not fixed are merged."""
    pieces: list[tuple[bool, float]] = []
    for fixed, work_ms in zip(is_fixed(costs), least_ms.tolist(), strict=True):
        if not fixed and pieces and not pieces[-1][0]:
            pieces[-1] = False, pieces[-1][1] + work_ms
        else:
            pieces.append((bool(fixed), work_ms))
    return pieces


def is_fixed(costs: Costs) -> list[bool]:
    """For each group: every earlier group is an ancestor and every later one a descendant."""
    num_groups = len(costs.groups)
    before: list[set[int]] = [set() for _ in range(num_groups)]
    for source, target in costs.edges:
        before[target].add(source)
    ancestors = [0] * num_groups
    descendants = [0] * num_groups
    for group in range(num_groups):
        for source in before[group]:
            ancestors[group] |= ancestors[source] | 1 << source
    for group in reversed(range(num_groups)):
        for source in before[group]:
            descendants[source] |= descendants[group] | 1 << group
    return [
        (above | below).bit_count() == num_groups - 1
        for above, below in zip(ancestors, descendants, strict=True)
    ]


def _stages_needed(pieces: list[tuple[bool, float]], limit_ms: float) -> float:
    """The number of stages of at most `limit_ms` that hold the pieces, each filled before the
    next.
    """
    stages, room_ms = 1.0, limit_ms
    for fixed, work_ms in pieces:
        if work_ms <= room_ms:
            room_ms -= work_ms
        elif fixed:
            stages, room_ms = stages + 1, limit_ms - work_ms
        else:
            more = np.ceil((work_ms - room_ms) / limit_ms)
            stages, room_ms = stages + more, room_ms + more * limit_ms - work_ms
    return stages


Edges = Sequence[tuple[int, int]]


def backwards(edges: Edges) -> Edges:
    """The reversed edges, in an order for `sum_over_reached`; each leads to a later position."""
    return sorted(((target, source) for source, target in edges), reverse=True)


def sum_over_reached(edges: Edges, amounts: Floats) -> Floats:
    """For each group the sum of the amounts of all groups that reach it, itself included; every
    edge comes after the edges into its source.
    """
    count = len(amounts)
    index = np.arange(count)
    reached = np.zeros((count, -(-count // 8)), dtype=np.uint8)
    reached[index, index // 8] = 1 << (index % 8)
    for source, target in edges:
        reached[target] |= reached[source]
    rows = (np.unpackbits(row, count=count, bitorder="little") for row in reached)
    return np.array([row @ amounts for row in rows])


_MOST_GROUPS = 1000
_MOST_HEAVY = 8
_END = "end"
_ROUNDING = 1e-9


def bound_around_ms(problem: Problem, bound_ms: float, limit_ms: float) -> float:
    """A bound, larger than `bound_ms`, of the score of every plan within `limit_ms`; else
    `bound_ms`.

    It considers the few groups whose work and transfers of all values together are largest. Groups
    far from the heavy one count as free, which lowers the bound.
    """
    setting = problem.setting
    if not all(map(setting.waits_for_transfers, range(problem.stages))):
        return bound_ms
    # At best sending and receiving overlap as far as the duplex of the links permits.
    send_ms, receive_ms = (
        np.minimum.reduce([getattr(seen, name) / seen.duplex for seen in problem.seen])
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
    """The groups for which the work between them and `heavy`, both included, exceeds `most_ms`."""
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
    """The minimum over the sets that contain `heavy` and no group that is `apart`, in whole
    nanoseconds, rounded down.
    """
    near = _near(problem.costs.values, heavy)
    graph = nx.DiGraph()
    for group in near - {heavy} - apart:
        graph.add_edge(group, _END, capacity=_ns(problem.least_work_ms[group]))
    for group in near & apart:
        graph.add_edge(group, _END)  # unlimited capacity
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
    """The groups nearest to one group, along the values that join them."""
    joined = nx.Graph()
    joined.add_node(heavy)
    for value in values:
        nx.add_star(joined, (value.owner, *value.readers))
    nearest_first = nx.bfs_tree(joined, heavy)
    return {heavy, *list(nearest_first)[:_MOST_GROUPS]}


_Edges = Sequence[tuple[int, int]]


def other_orders(costs: Costs) -> Iterator[Ints]:
    """Depth first, breadth first, and as late as possible; each order is a list of groups."""
    count, edges = len(costs.groups), list(dict.fromkeys(costs.edges))
    turned = [(target, source) for source, target in edges]
    yield np.array(_order(count, edges, deque.pop))
    yield np.array(_order(count, edges, deque.popleft))
    yield np.array(_order(count, turned, deque.pop)[::-1])
    yield np.array(_order(count, turned, deque.popleft)[::-1])


def _order(count: int, edges: _Edges, take: Callable[[deque[int]], int]) -> list[int]:
    """Kahn's order; the next group comes from either end of the ready groups."""
    after: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for source, target in edges:
        after[source].append(target)
        missing[target] += 1
    ready = deque(group for group in range(count) if not missing[group])
    order = []
    while ready:
        group = take(ready)
        order.append(group)
        for target in after[group]:
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    return order
