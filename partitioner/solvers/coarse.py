"""Costs and units of groups -> the costs of the units: other orders, coarser graphs, whole blocks.

Under the cost model of `cost.py` a unit costs just what a stage of its groups does, so a placement
of units is evaluated exactly; a unit for every group in another order is the same graph in that
order. Units of groups that follow each other in a topological order, and blocks made by
`merging.py`, never have a cycle between them.
"""

from __future__ import annotations

import heapq
import os.path
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np

from ..cost import Costs, Floats, Held, Value
from ..problem import Placement, Problem, Rules
from .method import Method


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
    costs = contracted(problem.costs, unit_of)
    free = np.ones(len(costs.groups) + 1, dtype=bool)
    return Problem(costs, problem.setting, Rules(free, problem.rules.prefer_modules))


def expanded(placement: Placement, unit_of: Sequence[int]) -> Placement:
    """A placement of units as one of their groups; what was proved of units is not kept."""
    stage_of = tuple(placement.stage_of[unit] for unit in unit_of)
    return Placement(stage_of, placement.ranks)


def contracted(costs: Costs, unit_of: Sequence[int]) -> Costs:
    """The costs of units; `unit_of` gives each group its unit, numbered topologically from 0."""
    units = np.asarray(unit_of, dtype=np.int64)
    members: list[list[int]] = [[] for _ in range(int(units.max()) + 1)]
    for group, unit in enumerate(unit_of):
        members[unit].append(group)
    kept = [
        (index, moved)
        for index, value in enumerate(costs.values)
        if (moved := _moved(value, unit_of)) is not None
    ]
    which = [index for index, _ in kept]
    transient = np.zeros(len(members))
    np.maximum.at(transient, units, costs.transient_bytes)

    def summed(of_groups: Floats) -> Floats:
        return np.bincount(units, weights=of_groups, minlength=len(members)).astype(np.float64)

    return replace(
        costs,
        groups=tuple(costs.groups[of_unit[0]] for of_unit in members),
        labels=tuple(costs.labels[of_unit[0]] for of_unit in members),
        forward_ms=summed(costs.forward_ms),
        backward_ms=summed(costs.backward_ms),
        edges=_between(costs.edges, unit_of),
        values=tuple(value for _, value in kept),
        send_ms=costs.send_ms[which],
        receive_ms=costs.receive_ms[which],
        parameters=_held(costs.parameters, unit_of),
        saved=_held(costs.saved, unit_of),
        buffer_bytes=summed(costs.buffer_bytes),
        transient_bytes=transient,
        modules=tuple(_common([costs.modules[group] for group in of_unit]) for of_unit in members),
        blocks=tuple(_only({costs.blocks[group] for group in of_unit}) for of_unit in members),
        has_params=np.array([bool(costs.has_params[of_unit].any()) for of_unit in members]),
        times_on={kind: (summed(fwd), summed(bwd)) for kind, (fwd, bwd) in costs.times_on.items()},
    )


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


def _between(
    edges: Iterable[tuple[int, int]], unit_of: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    pairs = {(unit_of[source], unit_of[target]) for source, target in edges}
    return tuple(sorted((source, target) for source, target in pairs if source != target))


def _moved(value: Value, unit_of: Sequence[int]) -> Value | None:
    """A value between units, None when one unit has all of it."""
    owner = unit_of[value.owner]
    readers = tuple(sorted({unit_of[reader] for reader in value.readers} - {owner}))
    return replace(value, owner=owner, readers=readers) if readers else None


def _held(held: Iterable[Held], unit_of: Sequence[int]) -> tuple[Held, ...]:
    return tuple(
        Held(tuple(sorted({unit_of[group] for group in item.groups})), item.num_bytes)
        for item in held
    )


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(os.path.commonprefix(paths))


def _only(names: set[str]) -> str:
    return names.pop() if len(names) == 1 else ""
