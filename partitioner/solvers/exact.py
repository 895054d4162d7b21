"""The optimum over all plans with one stage per rank, and its proof: the method `auto`.

1. The best cut of the given order (`chain.py`) is a plan, so the optimum is at most its score T.
2. Reductions keep a plan within T that is as good (`reductions.py`).
3. The search over downsets (`downset_search.py`) runs with a limit that rises from the simple bound
to T: a limit without a plan is a proven bound, and the first limit with a plan gives the optimum.
4. If there are too many downsets, moves of single groups improve the best cuts of several orders,
the search over the downsets of a relaxation (`relaxed_freedom.py`) gives a bound, and a
mixed-integer program with a time limit (`milp.py`) may improve both. A program of few variables
mostly finds the optimum and its proof: there moves improve the best cut alone.

The bound holds for every plan in which no edge goes backwards. Among plans within `prefer_modules`
of the optimum, the method returns the tidiest cut of one order, as `chain.py` does.

`place_unordered` solves a problem whose devices may come in any order, or stay unused. It runs the
search of `downset_search.py` with another state: the number of devices of each kind that the first
stages use. One search covers all orders of k devices of q kinds with at most (k / q + 1)^q states,
so the result is the optimum over all orders. This is the setting of Tarnawski et al. (NeurIPS
2020): k accelerators and a CPU anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...runtime.errors import PlanError
from ..graph.costs import Ints
from ..graph.problem import DoesNotFit, Placement, Problem, evaluate
from . import chain, milp
from .bounds import bound_around_ms, more_than_any_ms, other_orders, simple_bound_ms
from .downset_search import (
    SearchResult,
    SearchStates,
    in_any_order,
    in_order,
    num_pairs,
    search,
    windows,
)
from .interval_sums import Downsets, find_downsets
from .local_search import Budget, GroupDivision, NeighbourOrder, chains, descend
from .reductions import cautious, contracted, reduce, without_memory
from .relaxed_freedom import relaxed

MOST_DOWNSETS = 150_000
_MOST_PAIRS = 250_000_000
_FEW_PAIRS = 1_000_000
_MOST_VARIABLES = 60_000
_MOST_TRIALS = 40_000  # about 4 s
_NEAR = 0.01  # of the bound: nearer plans and their bounds are left to the program
_ROUNDING = 1e-9


def place(problem: Problem) -> Placement:
    """The optimum with its proof, or the best plan found and a bound.

    Where the rules leave no free choice of cuts, the best cut of the given order that they allow.
    Raises DoesNotFit when no plan fits into the memory of the devices.
    """
    if not problem.rules.may_cut.all() or problem.rules.must_cut:
        return chain.place(problem)
    problem = without_memory(problem)
    stage_of = _best_of_order(problem)
    score_ms = _score_ms(problem, stage_of)
    bound_ms = simple_bound_ms(problem)
    if score_ms > bound_ms * (1 + _ROUNDING):
        stage_of, bound_ms = _improved(problem, stage_of, score_ms, bound_ms)
    if stage_of is not None and _score_ms(problem, stage_of) == np.inf:
        stage_of, _ = _improved(cautious(problem), None, np.inf, bound_ms)
    score_ms = _score_ms(problem, stage_of)
    if stage_of is None or score_ms == np.inf:
        raise DoesNotFit(f"no {problem.stages}-stage plan fits into the memory of the devices.")
    limit_ms = score_ms * (1 + problem.rules.prefer_modules) * (1 + _ROUNDING)
    tidy = _tidied(problem, stage_of, limit_ms)
    return Placement(
        tidy if _score_ms(problem, tidy) <= limit_ms else tuple(stage_of),
        bound_ms=min(bound_ms, score_ms),
        order_optimum_ms=score_ms,
    )


def _improved(
    problem: Problem,
    stage_of: Sequence[int] | None,
    score_ms: float,
    bound_ms: float,
    *,
    join_idle: bool = True,
) -> tuple[Sequence[int] | None, float]:
    """The optimal stages and the bound; the search starts from a plan with this score, or from
    none.
    """
    limit_ms = min(score_ms, more_than_any_ms(problem))
    reduced = reduce(problem, limit_ms, join_idle=join_idle)
    walk = in_order(reduced.problem)
    downsets = find_downsets(
        reduced.problem.costs,
        reduced.problem.least_work_ms,
        windows(reduced.problem, walk, limit_ms),
        most=MOST_DOWNSETS,
    )
    result = None
    if downsets is not None:
        result, bound_ms = rising_search(reduced.problem, walk, downsets, bound_ms, limit_ms)
    if downsets is None or result is None:
        return _by_program(problem, stage_of, limit_ms, bound_ms)
    if result.score_ms < np.inf:
        stage_of, score_ms = (
            reduced.stage_of([items for _, items in result.stages]),
            result.score_ms,
        )
    if not reduced.joined_idle:
        return stage_of, score_ms
    bound_ms = min(
        score_ms, _with_idle_stages_ms(reduced.problem, walk, downsets, result, limit_ms)
    )
    if bound_ms >= score_ms * (1 - _ROUNDING):
        return stage_of, score_ms
    return _improved(problem, stage_of, score_ms, bound_ms, join_idle=False)


def _by_program(
    problem: Problem, stage_of: Sequence[int] | None, limit_ms: float, bound_ms: float
) -> tuple[Sequence[int] | None, float]:
    """The same by the mixed-integer program, unless that is too large as well."""
    starts = [stage_of, *(_best_of_order(problem, order) for order in other_orders(problem.costs))]
    stage_of, limit_ms = _best_of(problem, starts, stage_of, limit_ms)
    bound_ms = min(bound_around_ms(problem, bound_ms, limit_ms), limit_ms)
    is_far = limit_ms > bound_ms * (1 + _NEAR)
    is_small = len(problem.costs.groups) * problem.stages <= milp.FEW_VARIABLES
    if is_far:
        # A small program finds what the other starts would, if one plan fits into memory.
        enough = is_small and _score_ms(problem, stage_of) < np.inf
        improvable = [stage_of] if enough else starts
        moved = (_moved_and_cut(problem, start) for start in improvable if start is not None)
        stage_of, limit_ms = _best_of(problem, moved, stage_of, limit_ms)
    reduced = reduce(problem, limit_ms, join_idle=False)
    size = len(reduced.problem.costs.groups) * problem.stages
    if is_far:
        bound_ms = _relaxed_bound_ms(reduced.problem, bound_ms, limit_ms)
    if size > _MOST_VARIABLES or limit_ms <= bound_ms * (1 + milp.GAP):
        return stage_of, bound_ms
    known = None
    if stage_of is not None:
        _, first = np.unique(reduced.item_of, return_index=True)
        known = np.asarray(stage_of)[first].tolist()
    improved = milp.improve(reduced.problem, known, limit_ms, seconds=milp.SECONDS)
    if improved.stage_of is not None:
        better = _moved_and_cut if is_far else _moved
        stage_of_item = better(reduced.problem, improved.stage_of)
        stage_of = tuple(np.asarray(stage_of_item)[reduced.item_of].tolist())
    return stage_of, max(bound_ms, improved.bound_ms)


def _best_of(
    problem: Problem,
    plans: Iterable[Sequence[int] | None],
    stage_of: Sequence[int] | None,
    limit_ms: float,
) -> tuple[Sequence[int] | None, float]:
    """The best of the plans and its score, or the given plan if none is below the limit."""
    for plan in plans:
        if _score_ms(problem, plan) < limit_ms:
            stage_of, limit_ms = plan, _score_ms(problem, plan)
    return stage_of, limit_ms


def _relaxed_bound_ms(problem: Problem, bound_ms: float, limit_ms: float) -> float:
    """The optimum of the relaxation, or a limit below it, if that is a larger bound."""
    easier = relaxed(problem, limit_ms)
    if easier is None:
        return bound_ms
    walk = in_order(easier)
    downsets = find_downsets(
        easier.costs,
        easier.least_work_ms,
        windows(easier, walk, limit_ms),
        most=MOST_DOWNSETS,
    )
    if downsets is None:
        return bound_ms
    # A stage with only groups that the relaxation leaves out has none there.
    _, easier_ms = rising_search(easier, walk, downsets, bound_ms, limit_ms, may_be_empty=True)
    return min(max(bound_ms, easier_ms), limit_ms)


def _moved_and_cut(problem: Problem, stage_of: Sequence[int]) -> Sequence[int]:
    """The plan after moves of single groups and the best cut of the order that they lead to, in
    turn while both make it better: a cut moves whole runs of groups, which single moves cannot.
    """
    best_ms = np.inf
    while (score_ms := _score_ms(problem, stage_of)) < best_ms * (1 - _ROUNDING):
        best_ms = score_ms
        moved = _moved(problem, stage_of)
        order: Ints = np.lexsort((np.arange(len(moved)), np.asarray(moved)))
        stage_of = _best_of_order(problem, order) or moved
        stage_of = min(moved, stage_of, key=lambda plan: _score_ms(problem, plan))
    return stage_of


def _moved(problem: Problem, stage_of: Sequence[int]) -> Sequence[int]:
    """The plan after moves of single groups, if that is better."""
    parts, order, budget = (
        GroupDivision(problem, stage_of),
        NeighbourOrder(problem.costs),
        Budget(_MOST_TRIALS),
    )
    descend(parts, order.advanced, budget)
    chains(parts, order.advanced, budget)
    return min(stage_of, parts.part_of, key=lambda plan: _score_ms(problem, plan))


def _with_idle_stages_ms(
    problem: Problem, walk: SearchStates, downsets: Downsets, result: SearchResult, limit_ms: float
) -> float:
    """A bound, or the limit, for plans in which some stage holds only groups that reductions joined
    to others.
    """
    if len(set(problem.like)) == 1 and result.score_ms < np.inf:
        # Without loss of generality, stages without groups are the last ones.
        return result.fewer_ms
    less_ms = min(limit_ms, result.score_ms) * (1 - _ROUNDING)
    loose = search(problem, walk, downsets, less_ms, may_be_empty=True)
    return min(loose.score_ms, limit_ms)


def rising_search(
    problem: Problem,
    walk: SearchStates,
    downsets: Downsets,
    bound_ms: float,
    limit_ms: float,
    *,
    may_be_empty: bool = False,
) -> tuple[SearchResult | None, float]:
    """Searches with limits from the bound to `limit_ms`; None when the work exceeds its limit."""
    for trial_ms, pairs in _limits(problem, walk, downsets, bound_ms, limit_ms):
        if pairs > _MOST_PAIRS:
            return None, bound_ms
        result = search(problem, walk, downsets, trial_ms, may_be_empty=may_be_empty)
        if result.score_ms < np.inf:
            return result, result.score_ms
        bound_ms = max(bound_ms, trial_ms)
    return SearchResult(np.inf), bound_ms


def _limits(
    problem: Problem, walk: SearchStates, downsets: Downsets, bound_ms: float, limit_ms: float
) -> Iterator[tuple[float, int]]:
    """Limits that rise from near the bound to the last one, which decides, and the pairs of each.

    A wider limit means more pairs. A limit is useful only if it has far fewer pairs than the last
    one and far more than the limit before it.
    """

    def pairs(limit_ms: float) -> int:
        within = downsets.within(windows(problem, walk, limit_ms))
        return num_pairs(problem, within, limit_ms)

    at_last, done, share = pairs(limit_ms), _FEW_PAIRS, 0.0005
    while bound_ms * (1 + share) < limit_ms:
        trial_ms = bound_ms * (1 + share)
        count = pairs(trial_ms)
        if 3 * count > at_last:
            break
        if count > done:
            yield trial_ms, count
            done = 3 * count
        share *= 1.4
    yield limit_ms, at_last


def _best_of_order(problem: Problem, order: Ints | None = None) -> Sequence[int] | None:
    """The best cut of an order, by default the given one; None if no cut fits."""
    place_of = None if order is None else np.argsort(order)
    rules = replace(problem.rules, prefer_modules=0.0)
    costs = problem.costs if place_of is None else contracted(problem.costs, place_of)
    try:
        stage_of = chain.place(replace(problem, costs=costs, rules=rules)).stage_of
    except PlanError:
        return None
    return stage_of if place_of is None else [stage_of[place] for place in place_of]


def _score_ms(problem: Problem, stage_of: Sequence[int] | None) -> float:
    if stage_of is None:
        return float(np.inf)
    return evaluate(problem, Placement(tuple(stage_of))).score_ms


def _tidied(problem: Problem, stage_of: Sequence[int], limit_ms: float) -> tuple[int, ...]:
    """The tidiest cut within the limit of the given order, or else of an order of the plan."""
    count = len(problem.costs.groups)
    tidy = chain.tidiest(problem, limit_ms)
    if tidy is not None:
        return tidy
    order: Ints = np.lexsort((np.arange(count), np.asarray(stage_of)))
    place_of = np.argsort(order)
    tidy = chain.tidiest(replace(problem, costs=contracted(problem.costs, place_of)), limit_ms)
    assert tidy is not None, "the plan itself is a cut of its order"
    return tuple(tidy[place] for place in place_of)


def place_unordered(problem: Problem) -> tuple[tuple[int, ...], Placement]:
    """The device of each stage, an index in `setting.devices`, and the stage of every group.

    `bound_ms` of the placement holds for every order and every choice of the devices. The links
    between all devices must be equal; the rules of the problem are ignored. Raises PlanError where
    links differ, nothing fits, or the graph has too many downsets.
    """
    setting = problem.setting
    if setting.replicas or len(set(setting.links or ())) > 1:
        raise PlanError(
            "devices in any order need one rank each and the same link between all of them.",
            "Give the devices in their order.",
        )
    problem = without_memory(problem)
    limit_ms = min(chain.optimum(problem), more_than_any_ms(problem))
    # A stage of only idle groups is an unused device, unless the number of stages matters.
    reduced = reduce(problem, limit_ms, join_idle=problem.is_simple)
    smaller = reduced.problem
    kinds = _kinds(smaller)
    walks = _walks(smaller, kinds)
    floor_ms = simple_bound_ms(smaller)
    downsets = find_downsets(
        smaller.costs,
        smaller.least_work_ms,
        windows(smaller, walks[-1], limit_ms),
        most=MOST_DOWNSETS,
    )
    if downsets is None:
        raise PlanError(
            f"{problem.costs.name} has too many parallel branches for devices in any order.",
            "Give the devices in their order.",
        )
    best: tuple[tuple[int, ...], Placement] | None = None
    best_ms = np.inf
    for walk in walks:
        result, _ = rising_search(smaller, walk, downsets, floor_ms, limit_ms)
        if result is None or result.score_ms >= best_ms:
            continue
        best_ms = limit_ms = result.score_ms
        left = [list(positions) for positions in kinds]
        longest = len(walk.stages) // len(kinds)
        order = tuple(left[index // longest].pop(0) for index, _ in result.stages)
        stage_of = reduced.stage_of([items for _, items in result.stages])
        best = order, Placement(stage_of, bound_ms=best_ms, order_optimum_ms=best_ms)
    if best is None:
        raise PlanError("no plan fits into the memory of the devices, in whatever order.")
    return best


def _kinds(problem: Problem) -> list[list[int]]:
    """The positions of devices that are alike, ordered by the first position of each kind."""
    kinds: dict[object, list[int]] = {}
    for position, (device, seen) in enumerate(
        zip(problem.setting.devices, problem.seen, strict=True)
    ):
        key = id(seen), device.memory_bytes, device.pays_transfers
        kinds.setdefault(key, []).append(position)
    return list(kinds.values())


def _walks(problem: Problem, kinds: list[list[int]]) -> list[SearchStates]:
    """One search for all numbers of stages, or one for each number where scores depend on it."""
    if problem.is_simple:
        return [in_any_order(problem, kinds, None)]
    return [in_any_order(problem, kinds, length) for length in range(1, problem.stages + 1)]
