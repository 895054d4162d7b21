"""A problem and units of its groups -> the problem of the units: other orders, coarser graphs.

Under the cost model of `cost.py` a unit costs just what a stage of its groups does, so a placement
of units is evaluated exactly; a unit for every group in another order is the same graph in that
order. Units of groups that follow each other in a topological order, and blocks made by
`merging.py`, never have a cycle between them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from ..problem import Placement, Problem, Rules
from .method import Method
from .reduce import contracted


def by_pieces(place: Callable[[Problem], Placement]) -> Method:
    """Makes a method heed where cuts may lie: what no cut may tear it sees as one group."""

    @wraps(place)
    def placed(problem: Problem) -> Placement:
        may_cut = problem.rules.may_cut
        if may_cut[1:-1].all():
            return place(problem)
        pieces = np.cumsum(may_cut[1:-1], dtype=np.int64)
        unit_of = np.concatenate([[0], pieces]).tolist()
        return expanded(place(on_units(problem, unit_of)), unit_of)

    return placed


def on_units(problem: Problem, unit_of: Sequence[int]) -> Problem:
    """The same problem of units, which are numbered in a topological order, free of rules."""
    costs = contracted(problem.costs, np.asarray(unit_of))
    free = np.ones(len(costs.groups) + 1, dtype=bool)
    return Problem(costs, problem.setting, Rules(free, problem.rules.prefer_modules))


def expanded(placement: Placement, unit_of: Sequence[int]) -> Placement:
    """A placement of units as one of their groups; what was proved of units is not kept."""
    stage_of = tuple(placement.stage_of[unit] for unit in unit_of)
    return Placement(stage_of, placement.ranks)


def topological(
    num_nodes: int, edges: Iterable[tuple[int, int]], key: Callable[[int], Any]
) -> list[int]:
    """The place of every node in the topological order that takes the least key that it can."""
    return _places(num_nodes, edges, lambda _, node: key(node))


def depth_first(
    num_nodes: int, edges: Iterable[tuple[int, int]], key: Callable[[int], Any]
) -> list[int]:
    """The same with what became ready last before all else: it follows a branch to its end."""
    return _places(num_nodes, edges, lambda time, node: (-time, key(node)))


def _places(
    num_nodes: int, edges: Iterable[tuple[int, int]], key: Callable[[int, int], Any]
) -> list[int]:
    """The place of every node when of all ready ones the least key (time, node) comes first."""
    waiting = [0] * num_nodes
    after: list[list[int]] = [[] for _ in range(num_nodes)]
    for source, target in edges:
        waiting[target] += 1
        after[source].append(target)
    ready = [(key(0, node), node) for node in range(num_nodes) if not waiting[node]]
    heapq.heapify(ready)
    places = [0] * num_nodes
    for place in range(num_nodes):
        _, node = heapq.heappop(ready)
        places[node] = place
        for target in after[node]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (key(place + 1, target), target))
    return places
