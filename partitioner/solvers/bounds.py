"""Costs -> a number that the bottleneck of no plan can be below, for any cut of the graph.

Not only cuts of one topological order count, so the chain optimum is no bound in itself. Three
things are: an equal share of the work; the largest group; and the relaxation below. A group that
is an ancestor or descendant of every other one stands at the same place in every order. What
lies between two such fixed groups may come in any order, so it is taken as divisible at will, and
transfers as free: filling one stage after the other is then optimal (`_stages_needed`).
If every group is fixed, the order is the only one and the chain optimum is the bound.
"""

from __future__ import annotations

import numpy as np

from ..cost import Costs, Floats
from ..problem import Placement, Problem


def lower_bound_ms(problem: Problem, placement: Placement) -> float:
    """The best bound known of the score of what `placement` could have been: of all plans with
    one stage a rank, or, if it is not of that kind, of all plans."""
    if placement.ranks is not None:
        return float(problem.setting.rounds * problem.least_work_ms.sum() / problem.stages)
    if placement.bound_ms is not None:
        return placement.bound_ms
    return max(simple_bound_ms(problem), _order_ms(problem, placement))


def simple_bound_ms(problem: Problem) -> float:
    """What follows from the work alone, for all plans with one stage a rank."""
    least_ms = problem.least_work_ms
    shared_ms = float(least_ms.sum() / ratios(problem).sum())
    return problem.setting.rounds * max(_relaxed_ms(problem, least_ms), shared_ms)


def more_than_any_ms(problem: Problem) -> float:
    """What no plan's score exceeds: all is done twice, sent and received by every stage."""
    most_ms = max(
        2 * float(seen.work_ms.sum())
        + len(seen.groups) * float(seen.send_ms.sum() + seen.receive_ms.sum())
        for seen in problem.seen
    )
    return (2 * problem.setting.rounds + 3) * most_ms * (1 + 1e-9)


def ratios(problem: Problem) -> Floats:
    """For each position, the most work, as the fastest device counts it, that it does in a time
    of 1."""
    least_ms = problem.least_work_ms
    busy = least_ms > 0
    return np.array(
        [
            (least_ms[busy] / seen.work_ms[busy]).max() if busy.any() else 1.0
            for seen in problem.seen
        ]
    )


def _order_ms(problem: Problem, placement: Placement) -> float:
    """What was proved of the one order, if there is no other."""
    proved = placement.order_optimum_ms
    if proved is None or not problem.rules.may_cut.all() or not all(_is_fixed(problem.costs)):
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
    """The groups in order as (is fixed, ms), neighbours that are not fixed taken together."""
    pieces: list[tuple[bool, float]] = []
    for fixed, work_ms in zip(_is_fixed(costs), least_ms.tolist(), strict=True):
        if not fixed and pieces and not pieces[-1][0]:
            pieces[-1] = False, pieces[-1][1] + work_ms
        else:
            pieces.append((bool(fixed), work_ms))
    return pieces


def _is_fixed(costs: Costs) -> list[bool]:
    """Whether every earlier group is an ancestor and every later one a descendant."""
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
    """How many stages of at most `limit_ms` hold the pieces, each filled before the next."""
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
