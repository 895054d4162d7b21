"""A problem with a synchronous schedule -> a placement with a short simulated step, and a bound.

The step time is the result of the simulator for the schedule (`runtime/schedule/simulate.py`),
which a search over cuts cannot add up stage by stage. So the method works from two sides:

- From below. `RankConfig.score_ms` of every stage is a lower bound of the step time, so the largest
  score is a bound for one plan, and the smallest largest score, which a min-max search finds
  exactly, is a bound for all plans. The scores assume that a micro-batch passes one stage after the
  other; `StepBounds.beside_ms` bounds the gain of plans with parallel stages.
- From above. Candidates are simulated: the plan with the smallest score, the one with the smallest
  bottleneck, and those that carry the fewest bytes among all within a threshold of the smallest
  score, as Alpa (Zheng et al., OSDI 2022, section 5.2) minimizes the sum of stages under a
  threshold of the slowest. From the best candidate, boundaries move by 1, 2, 4 .. groups as long as
  the simulated step gets shorter.

A plan whose step meets the bound is optimal under the cost model.

`with_borders_moved` searches by the step itself. The stages of a placement are intervals of an
order of the groups: the given one, or that of the placement. The search moves all runs of adjacent
boundaries, one run after the other, by 2^k, .., 4, 2, 1 groups: a run from boundary a to boundary b
extends stage a and shortens stage b + 1, or the reverse, and shifts the stages in between. This way
work moves from one rank to another where each rank has several stages. A move is kept if it reduces
the missing memory, or if no memory is missing and the step is shorter. If there are few cuts, all
are tried. Moves are counted, not timed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from ...runtime.schedule.builders import AUTO
from ..graph.costs import Ints
from ..graph.problem import DoesNotFit, Evaluation, Placement, Problem, evaluate
from ..solvers.bounds import lower_bound_ms
from ..solvers.chain import place as place_in_order
from ..solvers.relaxed_order import relaxed_order_ms
from .shape_bounds import StepBounds, most_beside_ms
from .step_time import LITTLE, Step, StepTimer, schedule_of, step_of

MOVES = 1_500
"""Placements that are timed; fewer of over a thousand groups or eight stages."""
_LEAST = 1e-9
_NEAR = 24  # positions on either side of a boundary that a search for a tidier one tries
_THRESHOLDS = (0.01, 0.05)
_MANY_GROUPS = 3_000  # from this number on no thresholds are tried
_LEVELED = 0.25  # the part of what tidy cuts may give up that even stages may give up
_SCHEDULES = 3  # that are made for what the one before has led to


def shortest_step(
    problem: Problem,
    placement: Placement,
    place: Callable[[Problem], Placement],
    bound_ms: float = 0.0,
) -> Step:
    """The best of `placement` and the candidates in the module docstring.

    `placement` is the result of `place` for the problem. It is returned unchanged for an
    asynchronous schedule, for a method that proves nothing, which serves for comparison, and by
    rules that ask for a quick answer.
    """
    step = step_of(problem, placement)
    proves = placement.bound_ms is not None or placement.order_optimum_ms is not None
    is_given = problem.setting.is_asynchronous or not proves or placement.ranks is not None
    if is_given or problem.rules.is_quick:
        return step
    steps = [step, *(step_of(problem, other) for other in _candidates(problem, place))]
    steps = [candidate for candidate in steps if candidate.evaluation.fits]
    given_up = problem.rules.prefer_modules
    tidy = best = _most_even(steps, given_up * _LEVELED)
    in_order = (
        candidate
        for candidate in steps
        if [*candidate.placement.stage_of] == sorted(candidate.placement.stage_of)
    )
    # Boundaries move within one order: that of the best plan, and the given one.
    starts = {step.placement.stage_of: step for step in (tidy, next(in_order, tidy))}
    moved = [improved(problem, start, bound_ms) for start in starts.values()]
    best = _most_even([best, *moved], given_up * _LEVELED)
    return tidy if tidy.step_ms <= best.step_ms * (1 + given_up) else best


def _most_even(steps: Sequence[Step], given_up: float) -> Step:
    """Of the steps that are as short as the shortest, or longer by the share `given_up`, the one
    with the smallest bottleneck: with few micro-batches an uneven plan may be as fast, and is not
    with more."""
    limit_ms = (1 + given_up) * min(step.step_ms for step in steps)
    return min(
        (step for step in steps if step.step_ms <= limit_ms),
        key=lambda step: (step.evaluation.bottleneck_ms, step.step_ms),
    )


def bottleneck_bound_ms(problem: Problem, free: Placement) -> float:
    """A bound of the slowest rank's time per micro-batch in all plans; `free` is the problem
    without demanded cuts.
    """
    if problem.setting.score_is_load and problem.setting.rounds == 1:
        return lower_bound_ms(problem, free)
    return lower_bound_ms(problem, _unproved(free)) / problem.setting.rounds


def step_bound_ms(problem: Problem, free: Placement) -> float:
    """A bound of the step of all plans: the smallest score, or the smallest step of a plan with
    parallel stages; minus the exchange of tied gradients, which can overlap with other
    computations.
    """
    if problem.setting.is_asynchronous:
        return problem.setting.micro_batches * lower_bound_ms(problem, free)
    if free.ranks is not None:
        return lower_bound_ms(problem, free)
    always_ms = lower_bound_ms(problem, _unproved(free))
    exchanged_ms = problem.setting.micro_batches * sum(
        float(problem.costs.send_ms[index])
        for index, value in enumerate(problem.costs.values)
        if value.is_exchange
    )
    in_a_row_ms = lower_bound_ms(problem, free) - exchanged_ms
    if free.bound_ms is None:
        score_ms = evaluate(problem, free).score_ms
        in_a_row_ms = max(in_a_row_ms, relaxed_order_ms(problem, score_ms))
    if problem.setting.score_is_load:
        return max(always_ms, in_a_row_ms)
    steps = StepBounds(problem.setting.schedule, problem.stages, problem.setting.rounds)
    total_ms = float(problem.least_work_ms.sum())
    return max(always_ms, min(in_a_row_ms, steps.beside_ms(total_ms, most_beside_ms(problem))))


def _unproved(placement: Placement) -> Placement:
    return replace(placement, bound_ms=None, order_optimum_ms=None)


def _candidates(problem: Problem, place: Callable[[Problem], Placement]) -> Iterator[Placement]:
    yield place(replace(problem, setting=replace(problem.setting, by_load=True)))
    thresholds = _THRESHOLDS if len(problem.costs.groups) < _MANY_GROUPS else ()
    wider = (threshold for threshold in thresholds if threshold > problem.rules.prefer_modules)
    try:
        for share in (problem.rules.prefer_modules, *wider):
            rules = replace(problem.rules, prefer_modules=share)
            yield place_in_order(replace(problem, rules=rules))
    except DoesNotFit:
        return  # Only plans in another order fit into memory.


def improved(problem: Problem, start: Step, bound_ms: float) -> Step:
    """The step with its boundaries moved; a schedule made for the costs is made again for the
    result, as long as that helps.
    """
    if problem.setting.schedule != AUTO:
        timer = StepTimer(problem, schedule_of(problem, start))
        return with_borders_moved(timer, start, bound_ms)
    best = start
    for _ in range(_SCHEDULES):
        timer = StepTimer(problem, schedule_of(problem, best))
        moved = with_borders_moved(timer, best, bound_ms, moves=MOVES // 8)
        if moved is best:
            break
        schedule = schedule_of(problem, moved)
        again = step_of(problem, moved.placement, effort=LITTLE, known=[schedule])
        if not _is_better(again, best):
            break
        best = again
    return best


def _is_better(step: Step, other: Step) -> bool:
    if step.evaluation.fits != other.evaluation.fits:
        return step.evaluation.fits
    return step.step_ms < other.step_ms


# --- moving the cuts ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cuts:
    """The order that a placement cuts, the legal cut positions, and the demanded cuts."""

    order: Ints
    places: Ints
    demanded: frozenset[int]

    @classmethod
    def of(cls, problem: Problem, placement: Placement) -> _Cuts | None:
        """None for an order other than the given one if rules name positions."""
        num_groups, rules = len(problem.costs.groups), problem.rules
        given = np.arange(num_groups)
        order = np.lexsort((given, np.asarray(placement.stage_of)))
        may_cut = rules.may_cut
        if (order != given).any():
            if rules.must_cut or not rules.may_cut.all():
                return None
            may_cut = np.ones(num_groups + 1, dtype=bool)
        places = np.flatnonzero(may_cut[1:-1]) + 1
        return cls(order, places, frozenset(rules.must_cut))

    def at(self, placement: Placement) -> list[int]:
        """The cuts of a placement, as indices of `places`."""
        counts = np.bincount(placement.stage_of, minlength=placement.stages)
        cuts: list[int] = np.searchsorted(self.places, np.cumsum(counts)[:-1]).tolist()
        return cuts

    def placement(self, like: Placement, cuts: Sequence[int]) -> Placement | None:
        """The placement with these cuts; None if a demanded cut is missing."""
        at = self.places[list(cuts)]
        if not self.demanded <= set(at.tolist()):
            return None
        stage_of = np.empty(len(self.order), dtype=np.int64)
        stage_of[self.order] = np.searchsorted(at, np.arange(len(self.order)), side="right")
        return Placement(tuple(stage_of.tolist()), like.ranks)


def with_borders_moved(
    timer: StepTimer, start: Step, bound_ms: float = 0.0, *, moves: int = MOVES
) -> Step:
    """Hill climbing over the cuts of one order, until no move helps or the step meets
    `bound_ms`.
    """
    cuts = _Cuts.of(timer.problem, start.placement)
    if cuts is None or start.placement.stages == 1:
        return start
    num_places, stages = len(cuts.places), start.placement.stages
    size = max(1, len(cuts.order) / 1000) * max(1, stages / 8)
    budget = max(20, int(moves / size))
    best = start
    if math.comb(num_places, stages - 1) <= budget:
        for trial in combinations(range(num_places), stages - 1):
            best = _better(timer, cuts, trial, best) or best
        return best
    now = cuts.at(start.placement)
    stride = 1 << int(math.log2(num_places / stages))
    while stride and budget > 0 and not _is_least(best, bound_ms):
        for moved in _moves(now, stride, num_places):
            budget -= 1
            if better := _better(timer, cuts, moved, best):
                best, now = better, moved
                break
        else:
            stride //= 2
    return best


def shaken(timer: StepTimer, step: Step, rng: random.Random) -> Step:
    """The step with every boundary moved a little, as another start of a search."""
    cuts = _Cuts.of(timer.problem, step.placement)
    if cuts is None:
        return step
    now, num_places = cuts.at(step.placement), len(cuts.places)
    reach = max(1, num_places // (2 * step.placement.stages))
    moved = sorted(cut + rng.randint(-reach, reach) for cut in now)
    for index in range(len(moved)):  # rising, with room for the following cuts
        least = moved[index - 1] + 1 if index else 0
        moved[index] = min(max(moved[index], least), num_places - len(moved) + index)
    placement = cuts.placement(step.placement, moved)
    if placement is None:
        return step
    return timer.step(placement)


def tidied(timer: StepTimer, step: Step, limit_ms: float) -> Step:
    """The step with boundaries of the given order moved where they tear fewer modules and carry
    fewer bytes, one after the other, as long as the step stays within the limit.
    """
    cuts = _Cuts.of(timer.problem, step.placement)
    if cuts is None or (cuts.order != np.arange(len(cuts.order))).any():
        return step
    costs, now = timer.problem.costs, cuts.at(step.placement)

    def price(place: int) -> tuple[int, float]:
        position = int(cuts.places[place])
        return int(costs.cut_depth[position]), float(costs.cut_bytes[position])

    for border, current in enumerate(list(now)):
        first = now[border - 1] + 1 if border else 0
        last = now[border + 1] if border + 1 < len(now) else len(cuts.places)
        near = range(max(first, current - _NEAR), min(last, current + _NEAR + 1))
        tidier = [place for place in near if price(place) < price(current)]
        for place in sorted(tidier, key=lambda other: (price(other), abs(other - current))):
            trial = [*now[:border], place, *now[border + 1 :]]
            placement = cuts.placement(step.placement, trial)
            shorter = placement and timer.shorter(placement, limit_ms)
            if shorter:
                step, now = shorter, trial
                break
    return step


def lacking_bytes(problem: Problem, evaluation: Evaluation) -> float:
    """The missing memory of all ranks together."""
    rooms = (device.memory_bytes for device in problem.setting.devices)
    pairs = zip(evaluation.rank_bytes, rooms, strict=True)
    return sum(max(0.0, needed - room) for needed, room in pairs)


def _is_least(step: Step, bound_ms: float) -> bool:
    return step.evaluation.fits and step.step_ms <= bound_ms * (1 + _LEAST)


def _better(timer: StepTimer, cuts: _Cuts, trial: Sequence[int], best: Step) -> Step | None:
    """The step with these cuts, if it is better."""
    placement = cuts.placement(best.placement, trial)
    if placement is None:
        return None
    if best.evaluation.fits:
        return timer.shorter(placement, best.step_ms * (1 - _LEAST))
    step = timer.step(placement)
    lacking = lacking_bytes(timer.problem, step.evaluation)
    return step if lacking < lacking_bytes(timer.problem, best.evaluation) else None


def _moves(cuts: list[int], stride: int, num_places: int) -> Iterator[list[int]]:
    """The cuts with a run of adjacent cuts moved, still rising; short runs first."""
    for length in range(1, len(cuts) + 1):
        for first in range(len(cuts) - length + 1):
            for by in (-stride, stride):
                moved = [
                    cut + by if first <= index < first + length else cut
                    for index, cut in enumerate(cuts)
                ]
                rising = all(a < b for a, b in zip(moved, moved[1:], strict=False))
                if rising and moved[0] >= 0 and moved[-1] < num_places:
                    yield moved
