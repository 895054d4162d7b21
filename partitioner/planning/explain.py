"""A graph and its solution -> the reasons for the plan, its bounds, and the effect of other
settings.

Every finding is computed, none is guessed: cuts elsewhere are evaluated (`explain_cuts.py`), and
bounds are recomputed. For one more device, a faster link and similar changes the graph is solved
again in the other setting, and numbers of micro-batches are simulated. A setting without a plan
reports the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import networkx as nx
import numpy as np

from ...runtime.errors import AsyncPipeError
from ...runtime.formatting import (
    counted,
    write_bytes,
    write_change,
    write_gap,
    write_ms,
    write_ratio,
    write_share,
)
from ...runtime.plan.findings import Finding
from ...runtime.plan.forecast import compared_schedules, forecast_one_step
from ...runtime.plan.plan import Plan
from ...runtime.schedule.builders import AUTO
from ..graph.costs import Floats, Link
from ..graph.problem import Problem
from ..graph.rank_model import RankConfig
from .explain_cuts import explain_cuts
from .solve import Solution


class Resolve(Protocol):
    """`solve` with all unchanged arguments."""

    def __call__(
        self, graph: nx.DiGraph, *, stages: int, link: Link, setting: RankConfig, method: str
    ) -> Solution: ...


def explain_changes(
    graph: nx.DiGraph, solution: Solution, link: Link, resolve: Resolve
) -> list[Finding]:
    """Findings of topic "change": other numbers of stages, faster links, recomputation."""
    return [
        _change(solution, about, resolve, other, stages, faster, setting)
        for about, other, stages, faster, setting in _others(graph, solution, link)
    ]


def explain_micro_batches(plan: Plan) -> list[Finding]:
    """The step time by schedule with the plan's micro-batches, one more, and twice as many."""
    if len(plan.stages) == 1:
        return []
    count = plan.setting.micro_batches
    findings = []
    for schedule in compared_schedules(plan):
        if schedule == AUTO:  # takes seconds for every number
            continue
        parts = []
        for number in (count, count + 1, 2 * count):
            step = forecast_one_step(plan, schedule, number)
            parts.append(
                f"{number}: {write_ms(step.step_ms)} per step ({write_ms(step.step_ms / number)} "
                f"each), {write_share(step.idle_share)} idle"
            )
        about = f"number of micro-batches with {schedule}"
        findings.append(Finding("change", about, "; ".join(parts) + "."))
    return findings


_Other = tuple[str, nx.DiGraph, int, Link, RankConfig]


def _others(graph: nx.DiGraph, solution: Solution, link: Link) -> Iterator[_Other]:
    """Each change with the graph, stages, link and setting to solve again."""
    setting = solution.setting
    ranks, stages = setting.stages, solution.asked_stages
    each = -(-stages // ranks)
    devices = sum(map(setting.replicas_at, range(ranks)))
    if each > 1:
        more, fewer = (
            f"{counted(number, 'device')} with {counted(number * each, 'stage')}"
            for number in (ranks + 1, ranks - 1)
        )
    else:
        more = (
            f"one more device ({ranks + 1})"
            if devices == ranks
            else f"one more stage, on one more device ({devices + 1} devices)"
        )
        fewer = f"one stage fewer ({counted(ranks - 1, 'stage')})"
    yield more, graph, (ranks + 1) * each, link, _longer(setting)
    if ranks > 1:
        yield fewer, graph, (ranks - 1) * each, link, _shorter(setting)
        for factor in (2, 10):
            links = setting.links and tuple(_faster(link, factor) for link in setting.links)
            yield (
                f"{factor}× faster links",
                _with_faster_edges(graph, factor),
                stages,
                _faster(link, factor),
                replace(setting, links=links),
            )
    if not any(load.recomputes for load in solution.loads):
        name = "recomputation in every stage with several micro-batches in flight"
        yield name, graph, stages, link, replace(setting, recompute="all")
    else:
        yield "no recomputation", graph, stages, link, replace(setting, recompute="none")


def _longer(setting: RankConfig) -> RankConfig:
    """One more device of the last one's kind, with a link like the last one; no replica."""
    return replace(
        setting,
        devices=(*setting.devices, setting.devices[-1]),
        links=setting.links and (*setting.links, setting.links[-1]),
        replicas=setting.replicas and (*setting.replicas, 1),
        exchange=setting.exchange and (*setting.exchange, setting.exchange[-1]),
    )


def _shorter(setting: RankConfig) -> RankConfig:
    """The ranks without the devices of the last stage."""
    left = setting.stages - 1
    return replace(
        setting,
        devices=setting.devices[:left],
        links=setting.links and setting.links[: left - 1],
        replicas=setting.replicas[:left],
        exchange=setting.exchange and setting.exchange[:left],
    )


def _faster(link: Link, factor: int) -> Link:
    """The link with more bytes a second and the same latency."""
    return replace(link, bytes_per_s=link.bytes_per_s * factor)


def _with_faster_edges(graph: nx.DiGraph, factor: int) -> nx.DiGraph:
    """The graph with its known transfer times divided; itself if it has none."""
    if not any("transfer_ms" in edge for _, _, edge in graph.edges(data=True)):
        return graph
    faster = graph.copy()
    for _, _, edge in faster.edges(data=True):
        if "transfer_ms" in edge:
            edge["transfer_ms"] = {name: ms / factor for name, ms in edge["transfer_ms"].items()}
    return faster


def _change(
    solution: Solution,
    about: str,
    resolve: Resolve,
    graph: nx.DiGraph,
    stages: int,
    link: Link,
    setting: RankConfig,
) -> Finding:
    try:
        other = resolve(graph, stages=stages, link=link, setting=setting, method=solution.method)
    except AsyncPipeError as error:
        return Finding("change", about, f"not possible: {error.what}")
    slowest = write_change(solution.bottleneck_ms, other.bottleneck_ms)
    peaks = [max(plan.evaluation.rank_bytes) for plan in (solution, other)]
    memory = " → ".join(dict.fromkeys(write_bytes(peak) for peak in peaks))
    speed = solution.objective_ms / other.objective_ms if other.objective_ms else 1.0
    step = (
        "" if setting.is_asynchronous else f"step {write_change(solution.step_ms, other.step_ms)}, "
    )
    text = (
        f"bottleneck {solution.unit} {slowest}, {step}{write_ratio(speed)} throughput; "
        f"largest peak memory {memory}{'' if ' → ' in memory else ' (unchanged)'}."
    )
    return Finding("change", about, text, round(other.bottleneck_ms, 6))


_LARGEST = 3
_TIGHT = 1 + 1e-3


def explain(
    graph: nx.DiGraph, solution: Solution, link: Link, resolve: Resolve | None = None
) -> tuple[Finding, ...]:
    """The reasons for the cuts and the bounds of the plan; with `resolve`, which is `solve` with
    the plan's other arguments, also the effect of other settings.
    """
    return (
        *explain_cuts(solution),
        *explain_bound(solution),
        *(explain_changes(graph, solution, link, resolve) if resolve else ()),
    )


def explain_bound(solution: Solution) -> list[Finding]:
    """The parts of the slowest stage, the tight lower bound, and the gap between an equal share of
    the work and the slowest stage.
    """
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
        *(["including recomputation"] if any(load.recomputes for load in loads) else []),
        *([f"shared by {replicas} replicas"] if replicas > 1 else []),
    ]
    how = f" ({', '.join(beside)})" if beside else ""
    if solution.setting.overlap:
        talk = f"{write_ms(sum(load.talk_ms for load in loads))} of transfers at the same time"
    else:
        talk = f"{write_ms(_waiting_ms(solution, stages))} of transfers"
        talk += " and gradient all-reduce" if replicas > 1 else ""
    update_ms = _update_ms(solution, stages)
    update = f", {write_ms(update_ms)} of optimizer" if update_ms else ""
    return Finding(
        "bound",
        "the bottleneck stage",
        f"{name} takes {write_ms(load_ms)} per micro-batch: "
        f"{write_ms(_work_ms(solution, stages))} of compute{how}{update} and {talk}. "
        f"Its largest parts are {named}.",
    )


def _replicas(solution: Solution, stage: int) -> int:
    """The number of ranks that share the micro-batches of a stage."""
    of_stage = solution.placement.ranks_of_stage[stage]
    return len(of_stage) * solution.setting.shares_at(of_stage[0])


def _work_ms(solution: Solution, stages: list[int]) -> float:
    """Milliseconds of the forwards and backwards of `stages` on their rank, for one micro-batch."""
    return sum(solution.loads[stage].work_ms / _replicas(solution, stage) for stage in stages)


def _update_ms(solution: Solution, stages: list[int]) -> float:
    """The same for the optimizer."""
    return sum(solution.loads[stage].update_ms for stage in stages)


def _waiting_ms(solution: Solution, stages: list[int]) -> float:
    """The part of the time of `stages` in which their rank waits or transfers."""
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
    preposition = "with" if solution.unit == "stage" else "on"
    parts = (
        f"no plan {preposition} {counted(problem.stages, solution.unit)} can be faster than "
        f"{write_ms(bound_ms)}; "
        f"an equal share of the work is {write_ms(share_ms)}, and the largest operation, {name}, "
        f"takes {write_ms(largest_ms)}"
    )
    if problem.stages == 1:
        decides = f"one {solution.unit} does all the work"
    elif bound_ms <= share_ms * _TIGHT:
        decides = "limited by the equal share: only more devices or less work would lower it"
    elif bound_ms <= largest_ms * _TIGHT:
        decides = f"limited by {name}: one operation is never split, so more devices cannot help"
    else:
        above_ms = bound_ms - max(share_ms, largest_ms)
        nearest = f"{name} alone" if largest_ms > share_ms else "the equal share"
        decides = (
            f"limited by grouping constraints and communication: {write_ms(above_ms)} above "
            f"{nearest}"
        )
    return Finding("bound", "the lower bound", f"{parts}; {decides}.", round(bound_ms, 6))


def _above_equal_share(solution: Solution) -> Finding:
    share_ms = float(_least_ms(solution.problem).sum()) / solution.problem.stages
    _, stages = _on_slowest_rank(solution)
    waiting_ms = _waiting_ms(solution, stages)
    above_ms = max(0.0, solution.bottleneck_ms - share_ms)
    status = (
        "the plan is proven optimal for these costs"
        if solution.optimal
        else f"the plan is {write_gap(solution.gap)} above the optimum"
    )
    step = (
        ""
        if solution.setting.is_asynchronous
        else f" A step of {solution.setting.schedule} takes {write_ms(solution.step_ms)}; no plan "
        f"can have a step below {write_ms(solution.step_bound_ms)}."
    )
    return Finding(
        "bound",
        "the proof",
        f"{status}: its bottleneck {solution.unit} is {write_ms(above_ms)} above the equal share, "
        f"including {write_ms(waiting_ms)} of transfers.{step}",
    )
