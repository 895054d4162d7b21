"""A solved graph -> what one more device, a faster link and the like would give.

Every answer is a plan of its own: the graph is solved again in the other setting, and numbers of
micro-batches are simulated. A setting without a plan says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import networkx as nx

from ..runtime.errors import PlanError
from ..runtime.forecast import forecast_one_step, told_schedules
from ..runtime.plan import Finding, Plan
from ..runtime.schedules import AUTO
from ..runtime.wording import counted, write_bytes, write_change, write_ms, write_share
from .cost import Link
from .setting import Setting
from .solve import Solution


class Resolve(Protocol):
    """`solve` with all that stays as it was."""

    def __call__(
        self, graph: nx.DiGraph, *, stages: int, link: Link, setting: Setting
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
    """What a step takes by schedule with the plan's micro-batches, one more, and twice as many."""
    if len(plan.stages) == 1:
        return []
    count = plan.setting.micro_batches
    findings = []
    for schedule in told_schedules(plan):
        if schedule == AUTO:  # which would take seconds for every number
            continue
        parts = []
        for number in (count, count + 1, 2 * count):
            step = forecast_one_step(plan, schedule, number)
            parts.append(
                f"{number} take {write_ms(step.step_ms)} a step ({write_ms(step.step_ms / number)} "
                f"each), idle {write_share(step.idle_share)}"
            )
        findings.append(Finding("change", f"micro-batches of {schedule}", "; ".join(parts) + "."))
    return findings


_Other = tuple[str, nx.DiGraph, int, Link, Setting]


def _others(graph: nx.DiGraph, solution: Solution, link: Link) -> Iterator[_Other]:
    """Each change with the graph, stages, link and setting to solve again."""
    setting = solution.setting
    stages = setting.stages
    devices = sum(map(setting.replicas_at, range(stages)))
    more = (
        f"one more device ({stages + 1})"
        if devices == stages
        else f"one more stage, on one more device ({devices + 1} devices)"
    )
    yield more, graph, stages + 1, link, _longer(setting)
    if stages > 1:
        fewer = counted(stages - 1, "stage")
        yield f"one stage fewer ({fewer})", graph, stages - 1, link, _shorter(setting)
        for factor in (2, 10):
            links = setting.links and tuple(_faster(one, factor) for one in setting.links)
            yield (
                f"links {factor} times as fast",
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


def _longer(setting: Setting) -> Setting:
    """One more device of the last one's kind, joined by a link as the last; no replica."""
    return replace(
        setting,
        devices=(*setting.devices, setting.devices[-1]),
        links=setting.links and (*setting.links, setting.links[-1]),
        replicas=setting.replicas and (*setting.replicas, 1),
        exchange=setting.exchange and (*setting.exchange, setting.exchange[-1]),
    )


def _shorter(setting: Setting) -> Setting:
    """Without the devices of the last stage."""
    left = setting.stages - 1
    return replace(
        setting,
        devices=setting.devices[:left],
        links=setting.links and setting.links[: left - 1],
        replicas=setting.replicas[:left],
        exchange=setting.exchange and setting.exchange[:left],
    )


def _faster(link: Link, factor: int) -> Link:
    """More bytes a second; the latency stays."""
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
    setting: Setting,
) -> Finding:
    try:
        other = resolve(graph, stages=stages, link=link, setting=setting)
    except PlanError as error:
        return Finding("change", about, f"there is no such plan: {error.what}")
    peaks = [max(one.evaluation.rank_bytes) for one in (solution, other)]
    memory = " to ".join(dict.fromkeys(write_bytes(peak) for peak in peaks))
    speed = solution.objective_ms / other.objective_ms if other.objective_ms else 1.0
    step = (
        "" if setting.is_asynchronous else f"step {write_change(solution.step_ms, other.step_ms)}, "
    )
    text = (
        f"slowest stage {write_change(solution.bottleneck_ms, other.bottleneck_ms)}, {step}"
        f"{speed:.2f} times the throughput; fullest rank "
        f"{memory}{'' if ' to ' in memory else ' as before'}."
    )
    return Finding("change", about, text, round(other.bottleneck_ms, 6))
