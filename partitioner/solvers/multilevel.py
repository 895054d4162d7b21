"""Multilevel partitioning with acyclic quotient: coarsen, cut, then move groups at every level.

    coarsen    pairs of blocks along the edges that are costliest to cut (`coarsening.match`)
    cut        the best cut of several topological orders of the coarsest graph, by chain DP
    refine     at every level, finest last: descent by simple, then by advanced moves, global
               moves where the graph is small, then chains of advanced moves with rollback

After Moreira, Popp and Schulz, "Graph Partitioning with Acyclicity Constraints" (SEA 2017) and
"Evolutionary multi-level acyclic graph partitioning" (GECCO 2018), with the coarsening of Herrmann
et al. (SISC 2019). A global move puts a group into any stage if the stages then have no cycle, and
renumbers the stages. The method proves no bound.

FTPipe's planner of this kind omits transfers and restarts for 20 seconds of wall time in four
processes. Here the evaluator's load, with memory and unequal devices, decides all moves, and
restarts and trials are counted, so that a plan is the same on every machine.

`on_units` turns a problem and units of its groups into the problem of the units: another order, or
a coarser graph. Under the cost model of `partitioner/graph/costs.py` a unit costs exactly as much
as a stage of its groups, so the evaluation of a placement of units is exact; a unit per group in
another order is the same graph in that order. Units of consecutive groups of a topological order,
and blocks of `coarsening.py`, never have a cycle between them.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from ..graph.costs import Costs
from ..graph.problem import DoesNotFit, Placement, PlanningMethod, Problem, Rules, crossing_bytes
from . import chain
from .coarsening import BlockGraph, match
from .local_search import Budget, GroupDivision, NeighbourOrder, chains, descend
from .reductions import contracted


def by_pieces(place: Callable[[Problem], Placement]) -> PlanningMethod:
    """Adapts a method to rules on cuts: groups that no cut may separate become one group."""

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
    """The same problem for units, which are numbered in a topological order, without rules."""
    costs = contracted(problem.costs, np.asarray(unit_of))
    free = np.ones(len(costs.groups) + 1, dtype=bool)
    return Problem(costs, problem.setting, Rules(free, problem.rules.prefer_modules))


def expanded(placement: Placement, unit_of: Sequence[int]) -> Placement:
    """A placement of units as a placement of their groups, without the bounds proved for units."""
    stage_of = tuple(placement.stage_of[unit] for unit in unit_of)
    return Placement(stage_of, placement.ranks)


def topological(
    num_nodes: int, edges: Iterable[tuple[int, int]], key: Callable[[int], Any]
) -> list[int]:
    """The position of every node in the topological order with the smallest possible keys."""
    return _places(num_nodes, edges, lambda _, node: key(node))


def depth_first(
    num_nodes: int, edges: Iterable[tuple[int, int]], key: Callable[[int], Any]
) -> list[int]:
    """The same, with the node that became ready last first: it follows a branch to its end."""
    return _places(num_nodes, edges, lambda time, node: (-time, key(node)))


def _places(
    num_nodes: int, edges: Iterable[tuple[int, int]], key: Callable[[int, int], Any]
) -> list[int]:
    """The position of every node if among all ready nodes the smallest key (time, node) comes
    first.
    """
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


RESTARTS = 6
ORDERS = 13
TRIALS = 40_000
_SMALL = 200


@by_pieces
def place(problem: Problem) -> Placement:
    """The best of a few restarts, each with its own blocks and orders; among about equal plans
    (`Rules.prefer_modules`) the one that carries the fewest bytes.

    Raises DoesNotFit when no plan fits into the memory of the devices.
    """
    restarts = [_restart(problem, random.Random(seed)) for seed in range(RESTARTS)]
    excess, (best_ms, *_) = min(parts.score for parts in restarts)
    if excess:
        raise DoesNotFit(f"no {problem.stages}-stage plan fits into the memory of the devices.")
    limit_ms = best_ms * (1 + problem.rules.prefer_modules)
    near = [parts for parts in restarts if not parts.score[0] and parts.score[1][0] <= limit_ms]
    placements = [Placement(tuple(parts.part_of)) for parts in near]
    return min(
        placements,
        key=lambda placement: (crossing_bytes(problem.costs, placement), placement.stage_of),
    )


def _restart(problem: Problem, generator: random.Random) -> GroupDivision:
    levels, coarsest = _levels(problem, generator)
    budget = Budget(TRIALS)
    parts = _first_cut(coarsest, generator)
    for finer, unit_of in [*reversed(levels), (None, None)]:
        parts = _refine(parts, budget)
        if finer is not None and unit_of is not None:
            parts = GroupDivision(finer, [parts.part_of[unit] for unit in unit_of])
    return parts


def _levels(
    problem: Problem, generator: random.Random
) -> tuple[list[tuple[Problem, list[int]]], Problem]:
    """Each problem with the blocks that form the next coarser one, and the coarsest problem."""
    levels = []
    smallest = max(60, 10 * problem.stages)
    most_ms = float(problem.costs.work_ms.sum()) / (3 * problem.stages)
    while len(problem.costs.groups) > smallest:
        blocks = BlockGraph(problem.costs)
        match(blocks, most_ms, generator)
        if len(blocks) > 0.95 * len(problem.costs.groups) or len(blocks) < problem.stages:
            break
        unit_of = blocks.numbered()
        levels.append((problem, unit_of))
        problem = on_units(problem, unit_of)
    return levels, problem


def _first_cut(problem: Problem, generator: random.Random) -> GroupDivision:
    """The best of the cuts of a few orders, or a cut by the number of stages if none of them
    fits.
    """
    num_groups = len(problem.costs.groups)
    best = GroupDivision(
        problem, [group * problem.stages // num_groups for group in range(num_groups)]
    )
    for attempt in range(ORDERS):
        place_of = _order(problem.costs, generator, attempt)
        try:
            ordered = chain.place(on_units(problem, place_of))
        except DoesNotFit:
            continue
        parts = GroupDivision(problem, expanded(ordered, place_of).stage_of)
        best = min(best, parts, key=lambda cut: cut.score)
    return best


def _order(costs: Costs, generator: random.Random, attempt: int) -> list[int]:
    """The position of every group: at first in the given order, later depth first or in a random
    one.
    """
    num_groups = len(costs.groups)
    if attempt == 0:
        return list(range(num_groups))
    key = [generator.random() for _ in range(num_groups)]
    if attempt % 2:
        return topological(num_groups, costs.edges, key.__getitem__)
    return depth_first(num_groups, costs.edges, key.__getitem__)


def _refine(parts: GroupDivision, budget: Budget) -> GroupDivision:
    order = NeighbourOrder(parts.problem.costs)
    descend(parts, order.simple, budget)
    descend(parts, order.advanced, budget)
    if len(parts.part_of) <= _SMALL:
        parts = _descend_globally(parts, budget)
    chains(parts, order.advanced, budget)
    return parts


def _descend_globally(parts: GroupDivision, budget: Budget) -> GroupDivision:
    """Global moves out of the slowest stage while a move reduces the score."""
    while not budget.is_spent:
        best = None
        for group, part in enumerate(parts.part_of):
            if part != parts.slowest or parts.groups_in[part] == 1:
                continue
            for target in range(parts.problem.stages):
                stage_of = _numbered_again(parts, group, target)
                if target == part or stage_of is None:
                    continue
                budget.spend()
                moved = GroupDivision(parts.problem, stage_of)
                if best is None or moved.score < best.score:
                    best = moved
        if best is None or best.score >= parts.score:
            return parts
        parts = best
    return parts


def _numbered_again(parts: GroupDivision, group: int, target: int) -> list[int] | None:
    """The stages, renumbered, with the group in that stage; None if there is a cycle between
    them.
    """
    part_of = [*parts.part_of]
    part_of[group] = target
    before: dict[int, set[int]] = {stage: set() for stage in range(parts.problem.stages)}
    for source, far in parts.problem.costs.edges:
        if part_of[source] != part_of[far]:
            before[part_of[far]].add(part_of[source])
    try:
        number = {
            stage: index for index, stage in enumerate(TopologicalSorter(before).static_order())
        }
    except CycleError:
        return None
    return [number[part] for part in part_of]
