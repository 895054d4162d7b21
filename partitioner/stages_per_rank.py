"""A graph and ranks -> how many stages each of them should have.

More stages a rank make the bubble smaller and cost more actions, each of which takes the runtime a
moment, and finer cuts: with v stages a rank of m micro-batches there are 2 m v of them, or 3 m v
where backwards are in two parts. The numbers 1, 2, 4 .. are planned, each for its schedule: one
stage a rank for 1f1b where the schedule wants several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import networkx as nx

from ..runtime.errors import AsyncPipeError, PlanError
from ..runtime.plan import Candidate
from ..runtime.schedules import AUTO, VIRTUAL
from .actions import scheduled
from .cost import LOCALHOST
from .solve import Solution, solve

ACTION_MS = 0.15
"""What an action takes beside its computing, at most, as the runtime's benchmark has it."""

_NUMBERS = (1, 2, 4, 8)
_WORTH_SAYING = 0.01
_MOST_EACH = (4, 2)  # stages a rank that are looked at beside another number, and beside one
_MOST_GROUPS = 1_000  # of a graph whose other numbers of stages are looked at


@dataclass(frozen=True)
class Way:
    """A number of stages a rank with its schedule and plan."""

    schedule: str
    each: int
    solution: Solution

    @property
    def step_ms(self) -> float:
        """The step with what its actions take beside."""
        solution = self.solution
        ranks = tuple(of_stage[0] for of_stage in solution.placement.ranks_of_stage)
        repeated = ranks if len(set(ranks)) < len(ranks) else ()
        count = solution.setting.shared_micro_batches
        made = scheduled(self.schedule, len(ranks), count, repeated)
        return solution.step_ms + ACTION_MS * max(map(len, made.ranks))

    @property
    def name(self) -> str:
        stages = "1 stage" if self.each == 1 else f"{self.each} stages"
        return f"{self.schedule} with {stages} a rank"


def choose_stages(graph: nx.DiGraph, options: Mapping[str, Any]) -> int:
    """The number of stages with the shortest step on `ranks` of the options, under their schedule.

    Raises PlanError where the schedule has no plan on so many ranks.
    """
    ranks, schedule = int(options["ranks"]), options.get("schedule") or "async-1f1b"
    if schedule not in (*VIRTUAL, AUTO):
        return ranks
    found, refused = [], None
    for each in _NUMBERS:
        try:
            found.append(_way(graph, ranks, schedule, each, options))
        except AsyncPipeError as error:
            refused = refused or error
    if not found:
        assert refused is not None
        raise PlanError(refused.what, refused.cure)
    return ranks * min(found, key=lambda way: way.step_ms).each


def other_ways(
    graph: nx.DiGraph, solution: Solution, options: Mapping[str, Any]
) -> tuple[list[str], list[Candidate]]:
    """What other numbers of stages a rank would take: a sentence where one is faster, and all."""
    setting, stages = solution.setting, len(solution.loads)
    ranks = setting.stages
    if setting.is_asynchronous or ranks == 1 or len(graph) > _MOST_GROUPS or stages % ranks:
        return [], []
    taken = Way(setting.schedule, stages // ranks, solution)
    ways = list(_others(graph, taken, {**options, "method": "chain"}))
    if not ways:
        return [], []
    best = min(ways, key=lambda way: way.step_ms)
    gain = 1 - best.step_ms / taken.step_ms
    faster = [f"{best.name} would be {gain:.0%} faster"] if gain > _WORTH_SAYING else []
    return faster, [_candidate(way, taken) for way in ways]


def _others(graph: nx.DiGraph, taken: Way, options: Mapping[str, Any]) -> Iterator[Way]:
    ranks = taken.solution.setting.stages
    several = taken.schedule if taken.schedule in ("looped-bfs", AUTO) else "interleaved"
    for each in sorted({1, 2, 2 * taken.each}):
        schedule = several if each > 1 else "1f1b"
        if (schedule, each) == (taken.schedule, taken.each) or each > _MOST_EACH[taken.each == 1]:
            continue
        try:
            yield _way(graph, ranks, schedule, each, options)
        except AsyncPipeError:  # there is no such plan
            continue


def _way(
    graph: nx.DiGraph, ranks: int, schedule: str, each: int, options: Mapping[str, Any]
) -> Way:
    running = {**options, "ranks": ranks, "schedule": schedule}
    return Way(schedule, each, solve(graph, stages=ranks * each, link=LOCALHOST, **running))


def _candidate(way: Way, taken: Way) -> Candidate:
    more = way.step_ms / taken.step_ms - 1
    solution = way.solution
    return Candidate(
        name=way.name,
        stages=len(solution.loads),
        bottleneck_ms=solution.bottleneck_ms,
        step_ms=solution.step_ms,
        peak_bytes=max(solution.evaluation.rank_bytes),
        crossing_bytes=solution.crossing_bytes,
        gap=solution.gap,
        note=f"{abs(more):.0%} {'more' if more > 0 else 'less'} time a step",
    )
