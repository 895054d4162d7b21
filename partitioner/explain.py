"""A graph and its solution -> why the plan is as it is, what bounds it, and what would change it.

Nothing is guessed: cuts that lay elsewhere are evaluated (`explain_cuts.py`), plans of another
kind are solved and simulated (`what_if.py`), and bounds are recomputed here.
"""

from __future__ import annotations

import networkx as nx
import numpy as np

from ..runtime.plan import Finding
from ..runtime.wording import counted, write_gap, write_ms
from .cost import Floats, Link
from .explain_cuts import explain_cuts
from .problem import Problem
from .solve import Solution
from .what_if import Resolve, explain_changes

_LARGEST = 3
_TIGHT = 1 + 1e-3


def explain(
    graph: nx.DiGraph, solution: Solution, link: Link, resolve: Resolve | None = None
) -> tuple[Finding, ...]:
    """Why the cuts are where they are and what bounds the plan; given `resolve`, which is `solve`
    with the plan's other arguments, also what other settings would change."""
    return (
        *explain_cuts(solution),
        *explain_bound(solution),
        *(explain_changes(graph, solution, link, resolve) if resolve else ()),
    )


def explain_bound(solution: Solution) -> list[Finding]:
    """What the slowest stage consists of, which lower bound is the tight one, and what lies
    between an equal share of the work and the slowest stage."""
    return [
        _slowest(solution),
        _tightest_bound(solution),
        _above_equal_share(solution),
    ]


def _on_slowest_rank(solution: Solution) -> tuple[int, list[int]]:
    """The slowest rank and its stages."""
    rank = int(np.argmax(solution.evaluation.rank_ms))
    ranks = solution.placement.ranks_of_stage
    return rank, [stage for stage, of_stage in enumerate(ranks) if rank in of_stage]


def _slowest(solution: Solution) -> Finding:
    rank, stages = _on_slowest_rank(solution)
    loads = [solution.loads[stage] for stage in stages]
    load_ms = sum(load.load_ms for load in loads)
    replicas = max(_replicas(solution, stage) for stage in stages)
    costs = solution.problem.seen_by(solution.placement.ranks_of_stage[stages[0]])
    members = np.flatnonzero(np.isin(solution.placement.stage_of, stages))
    largest = members[np.argsort(-costs.work_ms[members], kind="stable")][:_LARGEST]
    named = ", ".join(
        f"{costs.labels[group]} {write_ms(costs.work_ms[group])}" for group in largest
    )
    numbers = " and ".join(map(str, stages))
    name = f"stage {numbers}" if len(stages) == 1 else f"rank {rank} with stages {numbers}"
    beside = [
        *(["a second forward included"] if any(load.recomputes for load in loads) else []),
        *([f"shared by {replicas} replicas"] if replicas > 1 else []),
    ]
    how = f" ({', '.join(beside)})" if beside else ""
    if solution.setting.overlap:
        talk = f"{write_ms(sum(load.talk_ms for load in loads))} of transfers at the same time"
    else:
        talk = f"{write_ms(_waiting_ms(solution, stages))} of transfers"
        talk += " and sums of gradients" if replicas > 1 else ""
    update_ms = _update_ms(solution, stages)
    update = f", {write_ms(update_ms)} of the optimizer" if update_ms else ""
    return Finding(
        "bound",
        "the slowest stage",
        f"{name} takes {write_ms(load_ms)} a micro-batch: "
        f"{write_ms(_work_ms(solution, stages))} of computing{how}{update} and {talk}. "
        f"Its largest parts are {named}.",
    )


def _replicas(solution: Solution, stage: int) -> int:
    """Among how many ranks the micro-batches of a stage are shared out."""
    of_stage = solution.placement.ranks_of_stage[stage]
    return len(of_stage) * solution.setting.shares_at(of_stage[0])


def _work_ms(solution: Solution, stages: list[int]) -> float:
    """Forwards and backwards of `stages` on their rank, for one micro-batch."""
    return sum(solution.loads[stage].work_ms / _replicas(solution, stage) for stage in stages)


def _update_ms(solution: Solution, stages: list[int]) -> float:
    """The same of the optimizer."""
    return sum(solution.loads[stage].update_ms for stage in stages)


def _waiting_ms(solution: Solution, stages: list[int]) -> float:
    """What the rank of `stages` does not compute of the time that they take."""
    load_ms = sum(solution.loads[stage].load_ms for stage in stages)
    return max(0.0, load_ms - _work_ms(solution, stages) - _update_ms(solution, stages))


def _least_ms(problem: Problem) -> Floats:
    """Each group's time on the device that is fastest at it."""
    least: Floats = np.minimum.reduce([seen.work_ms for seen in problem.seen])
    return least


def _tightest_bound(solution: Solution) -> Finding:
    problem = solution.problem
    least_ms = _least_ms(problem)
    share_ms = float(least_ms.sum()) / problem.stages
    largest = int(least_ms.argmax())
    largest_ms, bound_ms = float(least_ms[largest]), solution.lower_bound_ms
    name = problem.costs.labels[largest]
    parts = (
        f"an equal share of the work is {write_ms(share_ms)}, the largest operation, {name}, takes "
        f"{write_ms(largest_ms)}; no plan of {counted(problem.stages, 'stage')} can be below "
        f"{write_ms(bound_ms)}"
    )
    if problem.stages == 1:
        decides = "one stage does all the work"
    elif bound_ms <= share_ms * _TIGHT:
        decides = "the equal share decides: only more devices or less work would lower it"
    elif bound_ms <= largest_ms * _TIGHT:
        decides = f"{name} decides: it is never cut, so more devices alone would not lower it"
    else:
        above_ms = bound_ms - max(share_ms, largest_ms)
        nearest = f"{name} alone" if largest_ms > share_ms else "the equal share"
        decides = (
            f"what has to be together and what has to be sent decide, {write_ms(above_ms)} above "
            f"{nearest}"
        )
    return Finding("bound", "the lower bound", f"{parts}; {decides}.", round(bound_ms, 6))


def _above_equal_share(solution: Solution) -> Finding:
    share_ms = float(_least_ms(solution.problem).sum()) / solution.problem.stages
    _, stages = _on_slowest_rank(solution)
    waiting_ms = _waiting_ms(solution, stages)
    above_ms = max(0.0, solution.bottleneck_ms - share_ms)
    status = (
        "the plan is proved the best there is under these costs"
        if solution.optimal
        else f"the plan is {write_gap(solution.gap)} above the best there is"
    )
    step = (
        ""
        if solution.setting.is_asynchronous
        else f" A {solution.setting.schedule} step takes {write_ms(solution.step_ms)}, and that of "
        f"no plan can be below {write_ms(solution.step_bound_ms)}."
    )
    return Finding(
        "bound",
        "the proof",
        f"{status}: its slowest stage is {write_ms(above_ms)} above the equal share, "
        f"with {write_ms(waiting_ms)} of transfers.{step}",
    )
