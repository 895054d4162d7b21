"""A problem with a synchronous schedule -> a placement with a short simulated step, and a bound.

What a step takes is what the simulator says of the schedule (`runtime/simulate.py`), which no
search over cuts can add up stage by stage. So it goes in two directions:

- From below. `Setting.score_ms` of every stage is a time that a step takes at least because of
  it, so the largest score is a bound for one plan, and the least largest score, which a min-max
  search finds exactly, one for all plans. The scores take it that a micro-batch passes one stage
  after the other; what a plan could gain whose stages lie side by side instead is told by
  `_side_by_side_ms`.
- From above. Candidates are simulated: the plan with the least score, the one with the least
  bottleneck, and those that carry the fewest bytes among all within a threshold of the least
  score, as Alpa (Zheng et al., OSDI 2022, section 5.2) minimises the sum of stages under a
  threshold of the slowest. From the best, borders are moved by 1, 2, 4 .. groups as long as the
  simulated step falls.

A plan whose step meets the bound is optimal under the cost model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from ..runtime.schedules import make_schedule
from ..runtime.simulate import Costs as ActionCosts
from ..runtime.simulate import Timeline, simulate
from .cost import Bools, Floats, Value
from .evaluate import Evaluation, evaluate
from .problem import DoesNotFit, Placement, Problem
from .solvers.bounds import lower_bound_ms
from .solvers.chain import place as place_in_order

_THRESHOLDS = (0.01, 0.05)
_MANY_GROUPS = 3_000  # from here on thresholds are not looked at
_MOVES = 400
"""Evaluations while borders are moved; fewer for graphs of over a thousand groups."""
_LEAST = 1e-9

Edge = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """A placement, what it costs, and what one step of it takes."""

    placement: Placement
    evaluation: Evaluation
    step_ms: float


@dataclass(frozen=True)
class Talk:
    """What ranks spend on transfers beside computing, for one micro-batch and by stage, and the
    times of edges whose transfers go on meanwhile; `edges` are all, `grad_edges` those over which
    gradients come back."""

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    overlapped_ms: dict[Edge, float]
    edges: frozenset[Edge]
    grad_edges: frozenset[Edge]


def step_of(problem: Problem, placement: Placement) -> Step:
    """What one optimizer step of the placement takes: for an asynchronous schedule, and where
    several stages share a rank, the slowest rank's time for all micro-batches."""
    evaluation = evaluate(problem, placement)
    setting = problem.setting
    # The bottleneck of replicas is of all their micro-batches, unless each has its own part.
    rounds = setting.micro_batches if setting.is_asynchronous else setting.shared_micro_batches
    of_stage = placement.ranks_of_stage
    if problem.setting.is_asynchronous or len({rank for of in of_stage for rank in of}) < sum(
        map(len, of_stage)
    ):
        return Step(placement, evaluation, rounds * evaluation.bottleneck_ms)
    return Step(placement, evaluation, timeline_of(problem, placement, evaluation).makespan_ms)


def timeline_of(problem: Problem, placement: Placement, evaluation: Evaluation) -> Timeline:
    """One step, simulated: stage j on rank j, replicas of a stage as one rank that is as fast."""
    stages, setting = placement.stages, problem.setting
    talk = talk_of(problem, placement)
    replicas = [len(ranks) for ranks in placement.ranks_of_stage]
    costs = ActionCosts(
        forward_ms=tuple(
            (load.forward_ms + talk_ms) / count
            for load, talk_ms, count in zip(
                evaluation.stages, talk.forward_ms, replicas, strict=True
            )
        ),
        backward_ms=tuple(
            (load.backward_ms + talk_ms) / count
            for load, talk_ms, count in zip(
                evaluation.stages, talk.backward_ms, replicas, strict=True
            )
        ),
        step_ms=tuple(
            tied_ms + float(setting.sum_gradients_ms(stage, load.param_bytes))
            for stage, (tied_ms, load) in enumerate(
                zip(exchanges_ms(problem, placement), evaluation.stages, strict=True)
            )
        ),
        transfer_ms=talk.overlapped_ms,
    )
    schedule = make_schedule(
        setting.schedule, stages=stages, micro_batches=setting.shared_micro_batches
    )
    shared = {
        tuple(sorted({placement.stage_of[group] for group in (value.owner, *value.readers)}))
        for value in problem.costs.values
        if value.is_exchange
    }
    holders = sorted(stages_of for stages_of in shared if len(stages_of) > 1)
    return simulate(schedule, costs, talk.edges, grad_edges=talk.grad_edges, shared_stages=holders)


def talk_of(problem: Problem, placement: Placement) -> Talk:
    """The transfers of `stage_sums` by direction and by edge."""
    at, stages = placement.stage_of, placement.stages
    ranks = [of_stage[0] for of_stage in placement.ranks_of_stage]
    setting = problem.setting
    forward_ms, backward_ms = [0.0] * stages, [0.0] * stages
    on_edge_ms: dict[Edge, float] = defaultdict(float)
    edges: set[Edge] = set()
    grad_edges: set[Edge] = set()
    for index, value in enumerate(problem.costs.values):
        owner, readers = at[value.owner], {at[reader] for reader in value.readers}
        readers.discard(owner)
        if not readers or value.is_exchange:
            continue
        share = _forward_share(value, problem)
        pairs = {(min(owner, reader), max(owner, reader)) for reader in readers}
        edges |= pairs
        if share < 1:
            grad_edges |= pairs
        ends = [(owner, problem.seen[ranks[owner]].send_ms[index])]
        ends += [(reader, problem.seen[ranks[reader]].receive_ms[index]) for reader in readers]
        for stage, transfer_ms in ends:
            if setting.talks_in_turn(ranks[stage]):
                forward_ms[stage] += share * float(transfer_ms)
                backward_ms[stage] += (1 - share) * float(transfer_ms)
        if setting.overlap:
            for edge in pairs:
                # The simulator takes gradients to need the time of the tensors forwards.
                on_edge_ms[edge] += float(ends[0][1]) / 2
    return Talk(
        tuple(forward_ms),
        tuple(backward_ms),
        dict(on_edge_ms),
        frozenset(edges),
        frozenset(grad_edges),
    )


def exchanges_ms(problem: Problem, placement: Placement) -> tuple[float, ...]:
    """What each stage's optimizer step needs for the gradients of parameters that others hold."""
    at, rounds = placement.stage_of, problem.setting.micro_batches
    total = [0.0] * placement.stages
    for index, value in enumerate(problem.costs.values):
        if not value.is_exchange:
            continue
        owner, readers = at[value.owner], {at[reader] for reader in value.readers}
        readers.discard(owner)
        if readers:
            total[owner] += rounds * float(problem.costs.send_ms[index])
        for reader in readers:
            total[reader] += rounds * float(problem.costs.receive_ms[index])
    return tuple(total)


def shortest_step(
    problem: Problem,
    found: Placement,
    place: Callable[[Problem], Placement],
    bound_ms: float = 0.0,
) -> Step:
    """The best of `found` and the candidates of the module's head.

    `found` is what `place` made of the problem. It is taken as it is for an asynchronous
    schedule, and from a method that proves nothing: that is one to compare with.
    """
    step = step_of(problem, found)
    proves = found.bound_ms is not None or found.order_optimum_ms is not None
    if problem.setting.is_asynchronous or not proves or found.ranks is not None:
        return step
    steps = [step, *(step_of(problem, other) for other in _candidates(problem, place))]
    steps = [each for each in steps if each.evaluation.fits]
    tidy = best = min(steps, key=lambda each: each.step_ms)
    in_order = (one for one in steps if [*one.placement.stage_of] == sorted(one.placement.stage_of))
    # Borders are moved within one order: that of the best plan, and the given one.
    starts = {step.placement.stage_of: step for step in (tidy, next(in_order, tidy))}
    for start in starts.values():
        moved = _with_borders_moved(problem, start, bound_ms)
        best = min(best, moved, key=lambda step: step.step_ms)
    given_up_ms = best.step_ms * problem.rules.prefer_modules
    return tidy if tidy.step_ms <= best.step_ms + given_up_ms else best


def bottleneck_bound_ms(problem: Problem, free: Placement) -> float:
    """No plan's slowest rank takes less for a micro-batch; `free` is where no cut is demanded."""
    if problem.setting.rounds == 1:
        return lower_bound_ms(problem, free)
    return lower_bound_ms(problem, _unproved(free)) / problem.setting.rounds


def step_bound_ms(problem: Problem, free: Placement) -> float:
    """No plan's step is below: the least score, or the least step of a plan that has stages side
    by side; less what exchanging tied gradients takes, which can happen while others compute."""
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
    return max(always_ms, min(in_a_row_ms, _side_by_side_ms(problem)))


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
        return  # Only plans in another order fit.


def _with_borders_moved(problem: Problem, start: Step, bound_ms: float) -> Step:
    """Hill climbing over the cuts of one order in which the stages are intervals."""
    num_groups, stages = len(problem.costs.groups), problem.stages
    order = np.lexsort((np.arange(num_groups), np.asarray(start.placement.stage_of)))
    in_given_order = bool((order == np.arange(num_groups)).all())
    rules = problem.rules
    may_cut = rules.may_cut if in_given_order else np.ones(num_groups + 1, dtype=bool)
    if not in_given_order and (rules.must_cut or not rules.may_cut.all()):
        return start
    places = np.flatnonzero(may_cut[1:-1]) + 1
    budget = max(20, _MOVES * 1000 // max(1000, num_groups))

    def better(cuts: Sequence[int], best: Step, *, unless_scored: bool = True) -> Step | None:
        """The step with these of `places` as cuts, if it is shorter; `unless_scored`: it is not
        simulated where the score is no better."""
        at = places[list(cuts)]
        if not set(rules.must_cut) <= set(at.tolist()):
            return None
        stage_of = np.empty(num_groups, dtype=np.int64)
        stage_of[order] = np.searchsorted(at, np.arange(num_groups), side="right")
        placement = Placement(tuple(stage_of.tolist()))
        evaluation = evaluate(problem, placement)
        scored = unless_scored and evaluation.score_ms >= best.step_ms * (1 - _LEAST)
        if scored or not evaluation.fits:
            return None
        step_ms = timeline_of(problem, placement, evaluation).makespan_ms
        shorter = step_ms < best.step_ms * (1 - _LEAST)
        return Step(placement, evaluation, step_ms) if shorter else None

    best = start
    if math.comb(len(places), stages - 1) <= budget:
        for cuts in combinations(range(len(places)), stages - 1):
            best = better(cuts, best, unless_scored=False) or best
        return best
    counts = np.bincount(start.placement.stage_of, minlength=stages)
    now = np.searchsorted(places, np.cumsum(counts)[:-1]).tolist()
    stride = 1 << int(math.log2(len(places) / stages))
    while stride and budget > 0 and best.step_ms > bound_ms * (1 + _LEAST):
        for moved in _moves(now, stride, len(places)):
            budget -= 1
            if found := better(moved, best):
                best, now = found, moved
                break
        else:
            stride //= 2
    return best


def _moves(cuts: list[int], stride: int, num_places: int) -> Iterator[list[int]]:
    """The cuts with one or two neighbours moved, still rising."""
    for first in range(len(cuts)):
        for last in (first, first + 1):
            for by in (-stride, stride):
                moved = [
                    cut + by if first <= index <= last else cut for index, cut in enumerate(cuts)
                ]
                rising = all(a < b for a, b in zip(moved, moved[1:], strict=False))
                if last < len(cuts) and rising and moved[0] >= 0 and moved[-1] < num_places:
                    yield moved


def _side_by_side_ms(problem: Problem) -> float:
    """A bound for plans in which some stage needs not wait for the one before it.

    Such a stage has no group that stands at the same place in every order: it lies within a
    stretch between two of these, and its work is at most that of the stretch. The same holds of
    the way back, along gradients; a stage without them may have any group that has none. With n
    such stages k - n others have the remaining work W and wait for one another: before_j + m w_j
    <= T for all of them, so W <= T (1 - (1 - 1 / m) ** (k - n)).
    """
    costs, least_ms = problem.costs, problem.least_work_ms
    values = [value for value in costs.values if not value.is_exchange]
    forwards = [(v.owner, reader) for v in values for reader in v.readers if v.owner < reader]
    backwards = [
        (min(value.owner, reader), max(value.owner, reader))
        for value in values
        if _forward_share(value, problem) < 1
        for reader in value.readers
    ]
    trained = costs.backward_ms > 0
    side_ms = max(
        _longest_stretch_ms(least_ms, np.ones_like(trained), forwards),
        _longest_stretch_ms(least_ms, trained, backwards) + float(least_ms[~trained].sum()),
    )
    if not side_ms:
        return float("inf")
    total_ms, share = float(least_ms.sum()), 1 - 1 / problem.setting.rounds
    return min(
        (
            max(0.0, total_ms - count * side_ms) / (1 - share ** (problem.stages - count))
            for count in range(1, problem.stages)
        ),
        default=float("inf"),
    )


def _longest_stretch_ms(work_ms: Floats, members: Bools, pairs: Iterable[Edge]) -> float:
    """The most work between two members next to each other that are ancestor or descendant of
    every other member along `pairs`."""
    positions = np.flatnonzero(members)
    index = {int(position): number for number, position in enumerate(positions)}
    count = len(positions)
    first_reader, last_source = np.full(count, count), np.full(count, -1)
    for source, target in pairs:
        if source in index and target in index:
            a, b = index[source], index[target]
            first_reader[a] = min(first_reader[a], b)
            last_source[b] = max(last_source[b], a)
    longest_ms = stretch_ms = 0.0
    # All before v are its ancestors if each of them has a reader that is not after v.
    reached = np.concatenate([[-1], np.maximum.accumulate(first_reader)[:-1]])
    reaching = np.concatenate([np.minimum.accumulate(last_source[::-1])[::-1][1:], [count]])
    for v, position in enumerate(positions):
        is_fixed = reached[v] <= v <= reaching[v]
        stretch_ms = 0.0 if is_fixed else stretch_ms + float(work_ms[position])
        longest_ms = max(longest_ms, stretch_ms)
    return longest_ms


def _forward_share(value: Value, problem: Problem) -> float:
    """The part of a value's transfer that is on the way forward; 1 if no gradient comes back."""
    if value.owner > value.readers[0]:
        return 0.0
    if not value.backward_bytes:
        return 1.0
    link = problem.costs.link
    both_ms = link.transfer_ms(value.forward_bytes) + link.transfer_ms(value.backward_bytes)
    if value.known_ms is not None or not both_ms:
        return 0.5
    return link.transfer_ms(value.forward_bytes) / both_ms
