"""Multilevel partitioning with acyclic quotient: coarsen, cut, then move groups at every level.

    coarsen    pairs of blocks along the edges that are dearest to cut (`merging.match`)
    cut        the best cut of several topological orders of the coarsest graph, by chain DP
    refine     at every level, finest last: descent by simple, then by advanced moves, global
               moves where the graph is small, then chains of advanced moves with rollback

After Moreira, Popp and Schulz, "Graph Partitioning with Acyclicity Constraints" (SEA 2017) and
"Evolutionary multi-level acyclic graph partitioning" (GECCO 2018), with the coarsening of
Herrmann et al. (SISC 2019). A global move puts a group into any stage if there is no cycle between
the stages then, and numbers the stages again. It proves no bound.

FTPipe's planner of this kind leaves out transfers and restarts for 20 seconds of the clock in
four processes; here all moves are judged by the load of the evaluator, memory and unlike devices
included, and restarts and trials are counted, so that a plan does not depend on the machine.
"""

from __future__ import annotations

import random
from graphlib import CycleError, TopologicalSorter

from ..cost import Costs
from ..evaluate import crossing_bytes
from ..problem import DoesNotFit, Placement, Problem
from . import chain
from .coarse import by_pieces, depth_first, expanded, on_units, topological
from .merging import Blocks, match
from .moves import Budget, Order, chains, descend
from .parts import Parts

RESTARTS = 6
ORDERS = 13
TRIALS = 40_000
_SMALL = 200


@by_pieces
def place(problem: Problem) -> Placement:
    """The best of a few restarts, each with blocks and orders of its own; of about equal ones
    (`Rules.prefer_modules`) that which carries the fewest bytes.

    Raises DoesNotFit when none fits into the memory of the devices.
    """
    found = [_restart(problem, random.Random(seed)) for seed in range(RESTARTS)]
    excess, (best_ms, *_) = min(parts.score for parts in found)
    if excess:
        raise DoesNotFit(f"no {problem.stages}-stage plan fits into the memory of the devices.")
    limit_ms = best_ms * (1 + problem.rules.prefer_modules)
    near = [parts for parts in found if not parts.score[0] and parts.score[1][0] <= limit_ms]
    placements = [Placement(tuple(parts.part_of)) for parts in near]
    return min(placements, key=lambda one: (crossing_bytes(problem.costs, one), one.stage_of))


def _restart(problem: Problem, generator: random.Random) -> Parts:
    levels, coarsest = _levels(problem, generator)
    budget = Budget(TRIALS)
    parts = _first_cut(coarsest, generator)
    for finer, unit_of in [*reversed(levels), (None, None)]:
        parts = _refine(parts, budget)
        if finer is not None and unit_of is not None:
            parts = Parts(finer, [parts.part_of[unit] for unit in unit_of])
    return parts


def _levels(
    problem: Problem, generator: random.Random
) -> tuple[list[tuple[Problem, list[int]]], Problem]:
    """Each problem with the blocks that the next coarser one is made of, and the coarsest."""
    levels = []
    smallest = max(60, 10 * problem.stages)
    most_ms = float(problem.costs.work_ms.sum()) / (3 * problem.stages)
    while len(problem.costs.groups) > smallest:
        blocks = Blocks(problem.costs)
        match(blocks, most_ms, generator)
        if len(blocks) > 0.95 * len(problem.costs.groups) or len(blocks) < problem.stages:
            break
        unit_of = blocks.numbered()
        levels.append((problem, unit_of))
        problem = on_units(problem, unit_of)
    return levels, problem


def _first_cut(problem: Problem, generator: random.Random) -> Parts:
    """The best of the cuts of a few orders, by number of stages if none of them fits."""
    num_groups = len(problem.costs.groups)
    best = Parts(problem, [group * problem.stages // num_groups for group in range(num_groups)])
    for attempt in range(ORDERS):
        place_of = _order(problem.costs, generator, attempt)
        try:
            ordered = chain.place(on_units(problem, place_of))
        except DoesNotFit:
            continue
        parts = Parts(problem, expanded(ordered, place_of).stage_of)
        best = min(best, parts, key=lambda one: one.score)
    return best


def _order(costs: Costs, generator: random.Random, attempt: int) -> list[int]:
    """The place of every group: in the order given first, then depth first or not at all so."""
    num_groups = len(costs.groups)
    if attempt == 0:
        return list(range(num_groups))
    key = [generator.random() for _ in range(num_groups)]
    if attempt % 2:
        return topological(num_groups, costs.edges, key.__getitem__)
    return depth_first(num_groups, costs.edges, key.__getitem__)


def _refine(parts: Parts, budget: Budget) -> Parts:
    order = Order(parts.problem.costs)
    descend(parts, order.simple, budget)
    descend(parts, order.advanced, budget)
    if len(parts.part_of) <= _SMALL:
        parts = _descend_globally(parts, budget)
    chains(parts, order.advanced, budget)
    return parts


def _descend_globally(parts: Parts, budget: Budget) -> Parts:
    """Global moves out of the slowest stage while one makes the score less."""
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
                moved = Parts(parts.problem, stage_of)
                if best is None or moved.score < best.score:
                    best = moved
        if best is None or best.score >= parts.score:
            return parts
        parts = best
    return parts


def _numbered_again(parts: Parts, group: int, target: int) -> list[int] | None:
    """The stages in order with a group in that one; None if there is a cycle between them."""
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
