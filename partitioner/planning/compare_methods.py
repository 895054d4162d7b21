"""One problem, every planning method -> the best plan, with the result of each other method.

The one evaluator computes the cost of all plans, so the rows are comparable, whatever a method
assumes (an order, one stage per rank). Among plans that are equal up to the share that may be given
up for tidy cuts, the plan of the first method is chosen, and `auto` is the first. Two kinds of
plans are listed, but chosen only if no other exists: those with replicated stages under a schedule
that cannot train them, and those with several stages on a rank where no synchronous schedule puts
them. No step is simulated for the latter, so their time excludes waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec

from ...runtime.errors import AsyncPipeError
from ...runtime.formatting import write_share
from ...runtime.plan.findings import Candidate
from ..solvers import METHODS
from .step_time import has_replicas, is_simulated

if TYPE_CHECKING:
    from .solve import Solution

ALL = "all"
_ROUNDING = 1e-9
_WORTH_SAYING = 0.0005

P = ParamSpec("P")


def or_all(solve: Callable[P, Solution]) -> Callable[P, Solution]:
    """Adds the method "all" to `solve`: the best of all other methods, with the others as
    candidates.
    """

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
    """The best solution of all `methods`, each run once, and one candidate for each.

    A method that cannot serve the request is a candidate with its reason. Raises the error of the
    first method when every method fails.
    """
    solutions: dict[str, Solution] = {}
    refused: dict[str, AsyncPipeError] = {}
    names = _distinct(methods)
    for name in names:
        try:
            solutions[name] = by(name)
        except AsyncPipeError as error:
            refused[name] = error
    if not solutions:
        raise refused[names[0]]
    solutions = _with_best_bound(solutions)
    eligible = [*filter(_runs_as_priced, solutions.values())] or [*solutions.values()]
    given_up = eligible[0].problem.rules.prefer_modules + _ROUNDING
    most_ms = min(solution.objective_ms for solution in eligible) * (1 + given_up)
    best = next(solution for solution in eligible if solution.objective_ms <= most_ms)
    candidates = [
        _candidate(solutions[name]) if name in solutions else _refusal(name, refused[name])
        for name in names
    ]
    return replace(best, candidates=tuple(candidates))


def _runs_as_priced(solution: Solution) -> bool:
    """Training runs the plan as its evaluation assumes."""
    placement = solution.placement
    if placement.is_replicated:
        return has_replicas(solution.problem, placement)
    return solution.setting.is_asynchronous or is_simulated(solution.problem, placement)


def _with_best_bound(solutions: dict[str, Solution]) -> dict[str, Solution]:
    """A bound that one method proves for all plans with one stage per rank applies to the plans of
    the others.
    """
    plain = {
        name: solution for name, solution in solutions.items() if solution.placement.ranks is None
    }
    bound_ms = max((solution.lower_bound_ms for solution in plain.values()), default=0.0)
    step_ms = max((solution.step_bound_ms for solution in plain.values()), default=0.0)
    return solutions | {
        name: replace(solution, lower_bound_ms=bound_ms, step_bound_ms=step_ms)
        for name, solution in plain.items()
    }


def _distinct(methods: Collection[str]) -> list[str]:
    """The methods without aliases."""
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
        notes += [f"{write_share(given_up)} slower for tidier cuts"] * (given_up > _WORTH_SAYING)
    if len({of_stage[0] for of_stage in ranks}) < len(ranks):
        waits = "" if _runs_as_priced(solution) else ", waiting time not included"
        notes.append("several stages per rank" + waits)
    if solution.placement.is_replicated:
        replicas = ", ".join(str(len(of_stage)) for of_stage in ranks)
        notes.append(f"ranks per stage: {replicas}")
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


def _refusal(name: str, error: AsyncPipeError) -> Candidate:
    """The row of a method that has no plan: no stages, and the reason."""
    return Candidate(name, 0, 0.0, 0.0, 0, 0, 0.0, 0.0, note=error.what)
