"""One problem, every planning method -> the best plan, with what each of the others gave.

All plans are priced by the one evaluator, so the rows can be compared; what a method takes for
granted (an order, one stage a rank, no replicas) is its own affair. A plan that is not better
never wins by coming from a finer method: of equal ones that of the first method is taken, and
`auto` is the first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec

from ..runtime.errors import PlanError
from ..runtime.plan import Candidate
from .solvers import METHODS

if TYPE_CHECKING:
    from .solve import Solution

ALL = "all"
_ROUNDING = 1e-9

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
    found: list[Solution] = []
    candidates: list[Candidate] = []
    refused: list[PlanError] = []
    for name in _distinct(methods):
        try:
            solution = by(name)
        except PlanError as error:
            refused.append(error)
            candidates.append(_refusal(name, error))
        else:
            found.append(solution)
            candidates.append(_candidate(name, solution))
    if not found:
        raise refused[0]
    least_ms = min(solution.objective_ms for solution in found)
    best = next(one for one in found if one.objective_ms <= least_ms * (1 + _ROUNDING))
    return replace(best, candidates=tuple(candidates))


def _distinct(methods: Collection[str]) -> list[str]:
    """The methods without further names of the same one."""
    first: dict[object, str] = {}
    for name in methods:
        first.setdefault(METHODS[name], name)
    return list(first.values())


def _candidate(name: str, solution: Solution) -> Candidate:
    ranks = solution.placement.ranks_of_stage
    notes = []
    if len({rank for of_stage in ranks for rank in of_stage}) < len(ranks):
        notes.append("several stages a rank")
    if any(len(of_stage) > 1 for of_stage in ranks):
        notes.append("replicas: " + ", ".join(str(len(of_stage)) for of_stage in ranks))
    return Candidate(
        name=name,
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
