"""A profile and a way to cut -> a cut whose stages were timed, and the profile that agrees.

A plan is made from the costs of operations; its stages are timed as wholes; the costs of each
stage are scaled to its time; and with these costs the plan is made again. If that moves no cut,
costs and plan agree. If it moves some for a gain, the new stages are timed too. The plan is always
the best for the profile that is returned with it.

Two cuts of one model do the same work, so where their times add up to different sums the machine
was faster once than the other time: each timing counts relative to its own sum. A profile that
agrees with several timings is found by scaling to one after the other, again and again, which is
iterative proportional fitting (Deming, Stephan: "On a least squares adjustment of a sampled
frequency table when the expected marginal totals are known", 1940).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx
from torch import fx

from .capture import Capture
from .graph import with_copies
from .problem import Problem
from .profiler import Profile
from .solve import Solution
from .split import StageGraph
from .stage_times import rescaled
from .step_time import step_of
from .whole import WholeTimes

_WORTH = 0.02
"""The share of what a plan is made for that a new one has to promise before it is timed."""
_SWEEPS = 10


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
    rounds: int = 3,
) -> tuple[Profile, Cut]:
    """Cuts, times and cuts again, `rounds` times at most.

    The groups that `cut` places are the same for every profile.
    """
    current = cut(profile)
    timed: list[tuple[Cut, Sequence[WholeTimes]]] = []
    for _ in range(rounds):
        timed.append((current, time(current)))
        fitted = _fitted(profile, timed)
        after = cut(fitted)
        if any(_same(after, one) for one, _ in timed):
            break
        stays_ms = _objective_ms(current.solution, after.solution.problem)
        if after.solution.objective_ms > (1 - _WORTH) * stays_ms:
            break
        current = after
    return fitted, after


def _fitted(profile: Profile, timed: Sequence[tuple[Cut, Sequence[WholeTimes]]]) -> Profile:
    """The profile whose parts add up to all that was timed, as nearly as that can be; the last of
    it exactly."""
    usual_ms = statistics.median(_sum_ms(times) for _, times in timed)
    scaled = [
        (cut, [time.scaled(usual_ms / (_sum_ms(times) or 1.0)) for time in times])
        for cut, times in timed
    ]
    found = profile
    for cut, _ in scaled:
        found = with_copies(found, cut.captured)
    parts = found
    for _ in range(_SWEEPS if len(scaled) > 1 else 1):
        for cut, times in scaled:
            found = rescaled(found, cut.stages, times)
    last, times = scaled[-1]
    return replace(found, stage_scales=rescaled(parts, last.stages, times).stage_scales)


def _sum_ms(times: Sequence[WholeTimes]) -> float:
    return sum(time.forward_ms + time.backward_ms for time in times)


def _same(cut: Cut, other: Cut) -> bool:
    one, two = cut.solution.placement, other.solution.placement
    return (one.stage_of, one.ranks_of_stage) == (two.stage_of, two.ranks_of_stage)


def _objective_ms(solution: Solution, problem: Problem) -> float:
    """What is to be made small, of that placement under the costs of another problem."""
    step = step_of(problem, replace(solution.placement, bound_ms=None, order_optimum_ms=None))
    is_asynchronous = problem.setting.is_asynchronous
    return step.evaluation.bottleneck_ms if is_asynchronous else step.step_ms
