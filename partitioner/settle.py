"""A profile and a way to cut -> a cut whose stages were timed, and the profile that agrees.

A plan is made from the costs of operations; its stages are timed as wholes; the costs of each
stage are scaled to its time; and with these costs the plan is made again. If that moves no cut,
costs and plan agree. If it moves some for a gain, the new stages are timed too, and of the plans
that were timed the one whose slowest rank is fastest is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx
from torch import fx

from .capture import Capture
from .graph import with_copies
from .profiler import Profile
from .solve import Solution, explain_shortly
from .split import StageGraph
from .stage_times import rescaled
from .step_time import step_of
from .whole import WholeTimes

_WORTH = 0.02
"""The share of the slowest stage that a new plan has to promise before its stages are timed."""


@dataclass(frozen=True)
class Cut:
    """A captured model cut into stages: the graph that was planned on, and what came of it."""

    captured: Capture
    stages: tuple[StageGraph, ...]
    placed: Mapping[fx.Node, int]
    graph: nx.DiGraph
    solution: Solution


def settled(
    cut: Callable[[Profile], Cut],
    profile: Profile,
    time: Callable[[Cut], Sequence[WholeTimes]],
    *,
    rounds: int = 2,
) -> tuple[Profile, Cut]:
    """Cuts, times and cuts again, `rounds` times at most.

    The groups that `cut` places are the same for every profile. The solution that is returned is
    that of the profile that is returned, and its bound holds for it.
    """
    parts, current = profile, cut(profile)
    timed: list[tuple[Cut, Sequence[WholeTimes]]] = []
    for _ in range(rounds):
        timed.append((current, time(current)))
        profile = _corrected(parts, *timed[-1])
        after = cut(profile)
        if _same(after, current):
            return profile, after
        now_ms = _evaluated(current.solution, after).bottleneck_ms
        if after.solution.bottleneck_ms > (1 - _WORTH) * now_ms:
            break
        current = after
    best, times = min(timed, key=lambda pair: _slowest_ms(*pair))
    profile = _corrected(parts, best, times)
    after = cut(profile)
    if _same(after, best):
        return profile, after
    return profile, replace(best, graph=after.graph, solution=_evaluated(best.solution, after))


def _corrected(profile: Profile, cut: Cut, times: Sequence[WholeTimes]) -> Profile:
    return rescaled(with_copies(profile, cut.captured), cut.stages, times)


def _same(cut: Cut, other: Cut) -> bool:
    one, two = cut.solution.placement, other.solution.placement
    return (one.stage_of, one.ranks_of_stage) == (two.stage_of, two.ranks_of_stage)


def _slowest_ms(cut: Cut, times: Sequence[WholeTimes]) -> float:
    """The rank that computes longest for one micro-batch; replicas share theirs."""
    rank_ms: dict[int, float] = defaultdict(float)
    for ranks, time in zip(cut.solution.placement.ranks_of_stage, times, strict=True):
        for rank in ranks:
            rank_ms[rank] += (time.forward_ms + time.backward_ms) / len(ranks)
    return max(rank_ms.values())


def _evaluated(solution: Solution, under: Cut) -> Solution:
    """A solution under the costs of another one: its own placement, the other's bounds."""
    problem, best = under.solution.problem, under.solution
    optimum_ms = best.placement.order_optimum_ms
    placement = replace(solution.placement, bound_ms=None, order_optimum_ms=optimum_ms)
    step = step_of(problem, placement)
    return replace(
        solution,
        problem=problem,
        placement=placement,
        evaluation=step.evaluation,
        lower_bound_ms=min(best.lower_bound_ms, step.evaluation.bottleneck_ms),
        step_ms=step.step_ms,
        step_bound_ms=min(best.step_bound_ms, step.step_ms),
        even_split=best.even_split,
        explanation=explain_shortly(problem, step.evaluation, placement),
    )
