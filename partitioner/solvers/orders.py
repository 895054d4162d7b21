"""Costs -> topological orders that differ much from the given one, for better cuts of chains.

The best cut of any order is a plan. Where branches are parallel, one order that finishes each
branch, one that goes through all at the same pace, and one that puts off everything until it is
needed part the work in quite different ways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..cost import Costs, Ints

_Edges = Sequence[tuple[int, int]]


def other_orders(costs: Costs) -> Iterator[Ints]:
    """Depth first, breadth first, and as late as possible; each lists the groups."""
    count, edges = len(costs.groups), list(dict.fromkeys(costs.edges))
    turned = [(target, source) for source, target in edges]
    yield np.array(_order(count, edges, deque.pop))
    yield np.array(_order(count, edges, deque.popleft))
    yield np.array(_order(count, turned, deque.pop)[::-1])
    yield np.array(_order(count, turned, deque.popleft)[::-1])


def _order(count: int, edges: _Edges, take: Callable[[deque[int]], int]) -> list[int]:
    """Kahn's order, the next group taken from either end of those that are ready."""
    after: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for source, target in edges:
        after[source].append(target)
        missing[target] += 1
    ready = deque(group for group in range(count) if not missing[group])
    found = []
    while ready:
        group = take(ready)
        found.append(group)
        for target in after[group]:
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    return found
