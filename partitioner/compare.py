"""One problem, every planning method -> the best plan, with what each of the others gave.

All plans are priced by the one evaluator, so the rows can be compared; what a method takes for
granted (an order, one stage a rank) is its own affair. Of plans that are equal, but for the share
that may be given up for tidy cuts, that of the first method is taken, and `auto` is the first.
Shown but not taken are plans with replicated stages under a schedule that does not train them so,
and those with several stages on a rank where a synchronous schedule does not put them, so that no
step is simulated: what they wait is not in their time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec

from ..runtime.errors import PlanError
from ..runtime.plan import Candidate
from .solvers import METHODS
from .step_time import has_replicas, is_simulated

if TYPE_CHECKING:
    from .solve import Solution

ALL = "all"
_ROUNDING = 1e-9
_WORTH_SAYING = 0.0005

P = ParamSpec("P")


def or_all(solve: Callable[P, Solution]) -> Callable[P, Solution]:
    """Gives `solve` the method "all": the best of every other, with the others as candidates."""

    @wraps(solve)
    def solved(*args: P.args, **kwargs: P.kwargs) -> Solution:
        if kwargs.get("method") != ALL:
            return solve(*args, **kwargs)

        def by(method: str) -> Solution:
            kwargs["method"] = method
            return solve(*args, **kwargs)

        return best_of(by, METHODS)

    return solved


def best_of(by: Callable[[str], Solution], methods: Collection[str]) -> Solution:
    """The best solution of all `methods`, each tried once, and one candidate for each.

    A method that cannot do what is asked is a candidate with its reason. Raises PlanError, the
    first method's, when none can.
    """
    found: dict[str, Solution] = {}
    refused: dict[str, PlanError] = {}
    names = _distinct(methods)
    for name in names:
        try:
            found[name] = by(name)
        except PlanError as error:
            refused[name] = error
    if not found:
        raise refused[names[0]]
    found = _with_best_bound(found)
    eligible = [one for one in found.values() if _runs_as_priced(one)] or list(found.values())
    given_up = eligible[0].problem.rules.prefer_modules + _ROUNDING
    most_ms = min(one.objective_ms for one in eligible) * (1 + given_up)
    best = next(one for one in eligible if one.objective_ms <= most_ms)
    candidates = [
        _candidate(found[name]) if name in found else _refusal(name, refused[name])
        for name in names
    ]
    return replace(best, candidates=tuple(candidates))


def _runs_as_priced(solution: Solution) -> bool:
    """Whether training the plan takes what its evaluation says."""
    placement = solution.placement
    if placement.is_replicated:
        return has_replicas(solution.problem, placement)
    return solution.setting.is_asynchronous or is_simulated(solution.problem, placement)


def _with_best_bound(found: dict[str, Solution]) -> dict[str, Solution]:
    """What one method proves of all plans with one stage a rank holds for those of the others."""
    plain = {name: one for name, one in found.items() if one.placement.ranks is None}
    bound_ms = max((one.lower_bound_ms for one in plain.values()), default=0.0)
    step_ms = max((one.step_bound_ms for one in plain.values()), default=0.0)
    return found | {
        name: replace(one, lower_bound_ms=bound_ms, step_bound_ms=step_ms)
        for name, one in plain.items()
    }


def _distinct(methods: Collection[str]) -> list[str]:
    """The methods without further names of the same one."""
    first: dict[object, str] = {}
    for name in methods:
        first.setdefault(METHODS[name], name)
    return list(first.values())


def _candidate(solution: Solution) -> Candidate:
    ranks = solution.placement.ranks_of_stage
    notes = []
    optimum_ms = solution.placement.order_optimum_ms
    if solution.setting.is_asynchronous and optimum_ms:
        given_up = solution.bottleneck_ms / optimum_ms - 1
        notes += [f"{given_up:.1%} given up for tidy cuts"] * (given_up > _WORTH_SAYING)
    if len({of_stage[0] for of_stage in ranks}) < len(ranks):
        waits = "" if _runs_as_priced(solution) else ", without what they wait"
        notes.append("several stages a rank" + waits)
    if solution.placement.is_replicated:
        replicas = ", ".join(str(len(of_stage)) for of_stage in ranks)
        notes.append(f"ranks of each stage: {replicas}")
    return Candidate(
        name=solution.method,
        stages=len(ranks),
        bottleneck_ms=solution.bottleneck_ms,
        step_ms=solution.step_ms,
        peak_bytes=max(solution.evaluation.rank_bytes),
        crossing_bytes=solution.crossing_bytes,
        gap=solution.gap,
        seconds=solution.seconds,
        note="; ".join(notes),
    )


def _refusal(name: str, error: PlanError) -> Candidate:
    """What a method is in the table that has no plan: no stages, and why."""
    return Candidate(name, 0, 0.0, 0.0, 0, 0, 0.0, 0.0, note=error.what)
