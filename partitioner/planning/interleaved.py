"""A problem with fewer ranks than stages -> the cuts, and the rank of each stage.

A schedule with several stages per rank (`interleaved`, `looped-bfs`, `zb-v`) prescribes the rank of
each stage. `auto` runs any placement, so three are tried for it:

    loop      stage j on rank j mod p
    V         down the ranks and up again, and so on
    free      a search from the better one: it moves a stage to another rank or exchanges two

Neither the sum of a rank nor the time of a stage determines the step time: light stages of a rank
may compensate for a heavy one, and the waits of the others follow from the schedule's actions. So
the search for cuts minimizes the step time (`makespan.py`), from several starts:

    even      the smallest slowest stage for that number of stages, by the requested method
    counted   the split that counts blocks
    further   the best plan with one stage per rank, each cut into equal parts
    named     for `auto`, the best plan for interleaved, or zb-v
    balanced  for `auto`, equal work on every rank
    fewer     for `auto`, the best plan with fewer stages, the largest cut in two on their ranks

so a plan is never worse than any of these, and for `auto` none of 2, 4, 8 .. stages per rank is
worse than half as many. Everything else follows `makespan.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from ...runtime.errors import AsyncPipeError, PlanError
from ...runtime.formatting import write_bytes
from ...runtime.schedule.builders import AUTO
from ...runtime.schedule.schedule import Schedule
from ..graph.problem import DoesNotFit, Placement, Problem
from ..graph.rank_model import RankConfig, scheduled
from ..solvers import METHODS
from .makespan import improved, lacking_bytes, shaken, shortest_step, tidied, with_borders_moved
from .step_time import LITTLE, NONE, Step, StepTimer, least_step_ms, schedule_of, step_of

_SHAKES = 4
_FREE_TRIALS = 24
"""Schedules that are made while stages are given to other ranks."""
_PROMISING = 0.03
"""How much longer a step may be that is timed under a better schedule."""
_LEAST = 1e-9

Place = Callable[[Problem], Placement]


def place_several(problem: Problem, stages: int, place: Place, *, effort: float = 1.0) -> Step:
    """The best placement found with that many stages on the ranks of the problem; its step time is
    that of a schedule made with that effort.

    Raises DoesNotFit when no placement found fits into the memory of the ranks.
    """
    bound_ms = several_bound_ms(problem)
    is_made = problem.setting.schedule == AUTO and place in _PROVING
    fewer = _with_fewer(problem, stages, place) if is_made else None
    candidates = []
    for rank_of_stage in _rank_orders(problem, stages):
        steps = list(_starts(problem, rank_of_stage, place))
        best = min(steps, key=lambda step: _key(problem, step))
        if is_made:
            best = min(best, _balanced(problem, best), key=lambda step: _key(problem, step))
            best = step_of(problem, best.placement, effort=LITTLE)
        if place in _PROVING:
            promising = [best] if is_made else _distinct(steps)
            moved = (improved(problem, step, bound_ms) for step in promising)
            best = min((best, *moved), key=lambda step: _key(problem, step))
        if place is METHODS["auto"] and problem.setting.schedule != AUTO:
            best = _searched(problem, best, bound_ms)
        candidates.append(best)
    further = _cut_further(problem, fewer.placement, stages) if fewer else None
    if further:
        candidates.append(improved(problem, step_of(problem, further, effort=LITTLE), bound_ms))
    best = min(candidates, key=lambda step: _key(problem, step))
    if is_made:
        best = _free(problem, best, bound_ms)
    if not best.evaluation.fits:
        lacking = lacking_bytes(problem, best.evaluation)
        raise DoesNotFit(
            f"no plan of {stages} stages on {problem.stages} ranks that was found fits into the "
            f"memory of the ranks: the best lacks {write_bytes(lacking)} in all.",
            "Give the ranks more, use more --ranks or a smaller --micro-batch-size"
            + ("." if problem.setting.recompute != "none" else ", or --recompute auto."),
        )
    return _tidy(problem, best, fewer if further else None, further, effort)


def _with_fewer(problem: Problem, stages: int, place: Place) -> Step | None:
    """The best plan with half as many stages, or with one less per rank; None if there is none."""
    ranks = problem.stages
    number = stages // 2 if stages % (2 * ranks) == 0 else stages - ranks
    if number < ranks or number <= len(problem.rules.must_cut):
        return None
    try:
        if number == ranks:
            return shortest_step(problem, place(problem), place)
        return place_several(problem, number, place, effort=LITTLE)
    except AsyncPipeError:
        return None


def _cut_further(problem: Problem, placement: Placement, stages: int) -> Placement | None:
    """The placement with its largest stages cut in equal halves, both on the original rank."""
    at, work_ms, may_cut = (
        np.array(placement.stage_of),
        problem.least_work_ms,
        problem.rules.may_cut,
    )
    if (np.diff(at) < 0).any() and not may_cut.all():
        return None
    ranks, positions = list(placement.ranks_of_stage), np.arange(len(at))
    while len(ranks) < stages:
        of_stage_ms = np.bincount(at, weights=work_ms, minlength=len(ranks))
        for stage in np.argsort(-of_stage_ms, kind="stable").tolist():
            own = np.flatnonzero(at == stage)
            places = own[1:][may_cut[own[1:]]]
            if len(places):
                break
        else:
            return None
        before_ms = np.cumsum(work_ms[own])[np.searchsorted(own, places) - 1]
        place = places[np.abs(2 * before_ms - of_stage_ms[stage]).argmin()]
        at = at + (at > stage) + ((at == stage) & (positions >= place))
        ranks.insert(stage + 1, ranks[stage])
    return Placement(tuple(at.tolist()), tuple(ranks))


def _balanced(problem: Problem, start: Step) -> Step:
    """Equal work on every rank: the best plan if some schedule runs it without waits."""
    timer = StepTimer(problem, None)
    moved = with_borders_moved(timer, timer.step(start.placement))
    return step_of(problem, moved.placement, effort=NONE)


def _searched(problem: Problem, best: Step, bound_ms: float) -> Step:
    """Iterated local search: starts from boundaries near the best ones and moves them again."""
    rng = random.Random(0)
    for _ in range(_SHAKES if best.evaluation.fits else 0):
        if best.step_ms <= bound_ms * (1 + _LEAST):
            break
        start = shaken(StepTimer(problem, schedule_of(problem, best)), best, rng)
        descended = improved(problem, start, bound_ms)
        best = min(best, descended, key=lambda step: _key(problem, step))
    return best


# Of these the best of all cuts is wanted; other methods are there to be compared with.
_PROVING = (METHODS["auto"], METHODS["chain"])


def several_bound_ms(problem: Problem) -> float:
    """A bound of the step of every plan on these ranks: they share the work, and one of them has
    the largest group.
    """
    return problem.setting.rounds * rank_bound_ms(problem)


def rank_bound_ms(problem: Problem) -> float:
    """The same bound for the slowest rank's time per micro-batch."""
    work_ms = problem.least_work_ms
    return max(float(work_ms.sum()) / problem.stages, float(work_ms.max()))


def on_ranks(placement: Placement, rank_of_stage: Sequence[int]) -> Placement:
    """The placement with these ranks, without proven bounds."""
    return Placement(placement.stage_of, tuple((rank,) for rank in rank_of_stage))


def rank_of_stage_in(problem: Problem, stages: int) -> tuple[int, ...]:
    """The ranks that the problem's schedule gives to that many stages; for `auto` the loop."""
    ranks = problem.stages
    loop = tuple(stage % ranks for stage in range(stages))
    name, count = problem.setting.schedule, problem.setting.micro_batches
    return loop if name == AUTO else scheduled(name, stages, count, loop).rank_of_stage


def _rank_orders(problem: Problem, stages: int) -> Iterator[tuple[int, ...]]:
    yield rank_of_stage_in(problem, stages)
    if problem.setting.schedule == AUTO:
        ranks = problem.stages
        there_and_back = [*range(ranks), *reversed(range(ranks))]
        yield tuple(there_and_back[stage % (2 * ranks)] for stage in range(stages))


def _starts(problem: Problem, rank_of_stage: tuple[int, ...], place: Place) -> Iterator[Step]:
    """The available starts of the search; the method's own plan first."""
    unfolded = replace(problem, setting=problem.setting.at(rank_of_stage))
    ample = replace(unfolded, setting=_without_limits(unfolded))
    makers: list[Callable[[], Placement]] = [lambda: _or_ample(place, unfolded, ample)]
    if place in _PROVING:
        makers.append(lambda: METHODS["uniform"](ample))
        makers.append(lambda: _further(problem, place, len(rank_of_stage)))
        if problem.setting.schedule == AUTO:
            makers.append(lambda: _named(problem, rank_of_stage))
    for number, make in enumerate(makers):
        try:
            yield step_of(problem, on_ranks(make(), rank_of_stage), effort=NONE)
        except AsyncPipeError:
            if number == 0:
                raise


def _named(problem: Problem, rank_of_stage: tuple[int, ...]) -> Placement:
    """The best plan for a named schedule that has the stages on these ranks."""
    ranks = problem.stages
    is_loop = rank_of_stage == tuple(stage % ranks for stage in range(len(rank_of_stage)))
    name = "interleaved" if is_loop else "zb-v"
    setting = replace(problem.setting, schedule=name)
    named = replace(problem, setting=setting)
    return place_several(named, len(rank_of_stage), METHODS["chain"]).placement


def _or_ample(place: Place, problem: Problem, ample: Problem) -> Placement:
    """The plan of the method, or its plan for `ample` if none fits: moves may still find a plan
    that fits.
    """
    try:
        return place(problem)
    except DoesNotFit:
        return place(ample)


def _without_limits(problem: Problem) -> RankConfig:
    setting = problem.setting
    devices = tuple(replace(device, memory_bytes=float("inf")) for device in setting.devices)
    return replace(setting, devices=devices)


def _further(problem: Problem, place: Place, stages: int) -> Placement:
    """The best plan with one stage per rank, each cut into the same number of parts of equal
    work.
    """
    if len(problem.rules.must_cut) >= problem.stages:
        raise PlanError("more cuts are demanded than one stage for each rank has.")
    alone = replace(problem, setting=replace(problem.setting, schedule="1f1b"))
    coarse = np.asarray(place(alone).stage_of)
    parts, may_cut = stages // problem.stages, problem.rules.may_cut
    if stages % problem.stages or (np.diff(coarse) < 0).any():
        raise PlanError("these stages cannot be cut into equal numbers of parts.")
    cuts: list[int] = []
    for stage in range(problem.stages):
        own = np.flatnonzero(coarse == stage)
        places = own[1:][may_cut[own[1:]]]
        if len(places) < parts - 1:
            raise PlanError("a stage has too few places to cut.")
        done = np.cumsum(problem.least_work_ms[own])
        wanted = own[np.searchsorted(done, done[-1] * np.arange(1, parts) / parts)]
        chosen = np.unique(places[np.searchsorted(places, wanted).clip(max=len(places) - 1)])
        if len(chosen) < parts - 1:
            raise PlanError("a stage has too few places to cut.")
        cuts += [int(own[0]), *chosen.tolist()] if stage else chosen.tolist()
    where = np.searchsorted(cuts, np.arange(len(coarse)), side="right")
    return Placement(tuple(where.tolist()))


def _distinct(steps: Sequence[Step]) -> list[Step]:
    return list({step.placement.stage_of: step for step in steps}.values())


def _key(problem: Problem, step: Step) -> tuple[float, float]:
    return lacking_bytes(problem, step.evaluation), step.step_ms


def _free(problem: Problem, best: Step, bound_ms: float) -> Step:
    """Stages on other ranks as long as the step gets shorter, with boundaries moved at the end;
    every rank keeps at least one stage.
    """
    trials, start = _FREE_TRIALS, best
    while True:
        for ranks in _with_other_ranks(best.placement.ranks_of_stage):
            placement = Placement(best.placement.stage_of, ranks)
            if best.evaluation.fits and least_step_ms(problem, placement) >= best.step_ms:
                continue
            trials -= 1
            step = step_of(problem, placement, effort=NONE)
            if step.step_ms < best.step_ms * (1 + _PROMISING):
                step = step_of(problem, placement, effort=LITTLE)
            if _key(problem, step) < _key(problem, best):
                best = step
                break
            if trials < 0:
                break
        else:
            break
        if trials < 0:
            break
    return best if best is start else improved(problem, best, bound_ms)


def _with_other_ranks(
    ranks: tuple[tuple[int, ...], ...],
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """One stage on another rank, or the ranks of two stages exchanged."""
    every = sorted(set(ranks))
    for stage, own in enumerate(ranks):
        if ranks.count(own) > 1:
            for other in every:
                if other != own:
                    yield (*ranks[:stage], other, *ranks[stage + 1 :])
    for first, second in combinations(range(len(ranks)), 2):
        if ranks[first] != ranks[second]:
            exchanged = list(ranks)
            exchanged[first], exchanged[second] = ranks[second], ranks[first]
            yield tuple(exchanged)


def _tidy(
    problem: Problem, best: Step, fewer: Step | None, further: Placement | None, effort: float
) -> Step:
    """Cuts between blocks and where few bytes cross, within the share that may be given up;
    `effort` applies to the schedule. The step is no longer than with `fewer` stages; if the
    latter are cut `further`, it is not longer than theirs either.
    """
    share, limit_ms = problem.rules.prefer_modules, math.inf
    best = step_of(problem, best.placement, effort=effort, known=_known(best))
    if fewer and fewer.evaluation.fits:
        if further:
            other = step_of(problem, further, effort=effort)
            best = min(best, other, key=lambda step: _key(problem, step))
        limit_ms = max(fewer.step_ms, best.step_ms)
    if not share or problem.rules.must_cut:
        return best
    limit_ms = min(limit_ms, best.step_ms * (1 + share)) * (1 + _LEAST)
    tidy = tidied(StepTimer(problem, schedule_of(problem, best)), best, limit_ms)
    if tidy.placement == best.placement:
        return best
    again = step_of(problem, tidy.placement, effort=effort, known=_known(tidy))
    return again if again.step_ms <= limit_ms else best


def _known(step: Step) -> list[Schedule]:
    """The schedule that was computed for the step, if there is one."""
    return [step.schedule] if step.schedule else []
