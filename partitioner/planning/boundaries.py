"""A placement in some order -> one with a shorter step, by moving the boundaries of its stages.

The stages of a placement are intervals of an order of the groups: the given one, or that of the
placement. The search moves all runs of adjacent boundaries, one run after the other, by 2^k, .., 4,
2, 1 groups: a run from boundary a to boundary b extends stage a and shortens stage b + 1, or the
reverse, and shifts the stages in between. This way work moves from one rank to another where each
rank has several stages. A move is kept if it reduces the missing memory, or if no memory is missing
and the step is shorter. If there are few cuts, all are tried. Moves are counted, not timed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ..graph.costs import Ints
from ..graph.problem import Evaluation, Placement, Problem
from .step_time import Step, StepTimer

MOVES = 1_500
"""Placements that are timed; fewer of over a thousand groups or eight stages."""
_LEAST = 1e-9
_NEAR = 24  # positions on either side of a boundary that a search for a tidier one tries


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
        found: list[int] = np.searchsorted(self.places, np.cumsum(counts)[:-1]).tolist()
        return found

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
            if found := _better(timer, cuts, moved, best):
                best, now = found, moved
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

    for border, here in enumerate(list(now)):
        first = now[border - 1] + 1 if border else 0
        last = now[border + 1] if border + 1 < len(now) else len(cuts.places)
        near = range(max(first, here - _NEAR), min(last, here + _NEAR + 1))
        tidier = [place for place in near if price(place) < price(here)]
        for place in sorted(tidier, key=lambda one: (price(one), abs(one - here))):
            trial = [*now[:border], place, *now[border + 1 :]]
            placement = cuts.placement(step.placement, trial)
            found = placement and timer.shorter(placement, limit_ms)
            if found:
                step, now = found, trial
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
