"""A cost graph and a number of stages -> a plan of it, no model needed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import networkx as nx

from ..runtime.plan import Candidate, Finding
from .cluster import Cluster
from .cost import Link, Value
from .cost_graph import costs_of
from .explain import explain as explain_plan
from .infeasible import explained
from .options import checked
from .planner import cluster_of, planner_for
from .running import Running
from .setting import Setting
from .solve import Solution, solve
from .stages_per_rank import choose_stages


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that leaves stage `source` for the stages `targets`; its gradient comes back.

    A gradient that the graph has as a value of its own goes from a later stage to earlier ones.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class GraphStage:
    """What one stage of a planned graph costs for one micro-batch."""

    index: int
    groups: tuple[str, ...]
    load_ms: float
    forward_ms: float
    backward_ms: float
    param_bytes: int
    activation_bytes: int
    peak_bytes: int
    recompute: bool
    sends: tuple[Crossing, ...]
    receives: tuple[Crossing, ...]


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The stages of a planned cost graph; the same reading as of a model's plan."""

    name: str
    stages: tuple[GraphStage, ...]
    stage_of: Mapping[str, int]
    ranks_of_stage: tuple[tuple[int, ...], ...]
    bottleneck_ms: float
    lower_bound_ms: float
    step_ms: float
    step_bound_ms: float
    gap: float
    optimal: bool
    method: str
    seconds: float
    explanation: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    @property
    def device_of_stage(self) -> tuple[int, ...]:
        """The rank of each stage, its first one if it is replicated."""
        return tuple(ranks[0] for ranks in self.ranks_of_stage)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


@checked
def plan_graph(
    graph: nx.DiGraph,
    stages: int | None = None,
    *,
    method: str = "auto",
    devices: Cluster | str | Path | None = None,
    link: Link | None = None,
    setting: Setting | None = None,
    prefer_modules: float = 0.0,
    granularity: str = "op",
    cut_before: Collection[str] = (),
    explain: bool = False,
    **running: Unpack[Running],
) -> GraphPlan:
    """Plans a cost graph: see `costs_of` for what its nodes and edges may say.

    Without `link` transfers are free, unless the graph's edges give times; `running` says how the
    plan is meant to run, as for `solve`. With `devices`, or a file that describes them, they are
    chosen from, and so is the number of stages if none is given. With `explain` it says why the
    cuts are where they are, what bounds it, and what would change it. Raises PlanError as `solve`
    and `choose` do.
    """
    options: dict[str, Any] = {
        "method": method,
        "prefer_modules": prefer_modules,
        "granularity": granularity,
        "cut_before": cut_before,
        **running,
    }
    ranks = running.get("ranks")
    cluster = cluster_of(devices, stages, ranks)
    on_link, solve_again = link or Link(), partial(solve, **options)
    with explained():
        if cluster is not None:
            planner = planner_for(graph, cluster, stages, options)
            solution, on_link = planner.advised(graph, planner.plan(graph)), planner.link
        else:
            number = stages or choose_stages(graph, options)
            solution = solve(graph, stages=number, link=link, setting=setting, **options)
    costs = costs_of(graph, link)
    where = [solution.stage_of[group] for group in costs.groups]
    crossings = [
        Crossing(
            value.name,
            where[value.owner],
            targets,
            int(value.forward_bytes),
            int(value.backward_bytes),
        )
        for value in costs.values
        if (targets := _targets(value, where))
    ]
    return GraphPlan(
        name=costs.name,
        stages=tuple(
            _stage(graph, solution, index, crossings) for index in range(len(solution.loads))
        ),
        stage_of=solution.stage_of,
        ranks_of_stage=solution.ranks_of_stage,
        bottleneck_ms=solution.bottleneck_ms,
        lower_bound_ms=solution.lower_bound_ms,
        step_ms=solution.step_ms,
        step_bound_ms=solution.step_bound_ms,
        gap=solution.gap,
        optimal=solution.optimal,
        method=solution.method,
        seconds=solution.seconds,
        explanation=solution.explanation,
        findings=explain_plan(graph, solution, on_link, solve_again) if explain else (),
        candidates=solution.candidates,
    )


def _targets(value: Value, where: list[int]) -> tuple[int, ...]:
    return tuple(sorted({where[reader] for reader in value.readers} - {where[value.owner]}))


def _stage(
    graph: nx.DiGraph, solution: Solution, index: int, crossings: list[Crossing]
) -> GraphStage:
    load = solution.loads[index]
    return GraphStage(
        index=index,
        groups=tuple(str(group) for group in graph if solution.stage_of[str(group)] == index),
        load_ms=load.load_ms,
        forward_ms=load.forward_ms,
        backward_ms=load.backward_ms,
        param_bytes=load.param_bytes,
        activation_bytes=load.activation_bytes,
        peak_bytes=load.peak_bytes,
        recompute=load.recomputes,
        sends=tuple(crossing for crossing in crossings if crossing.source == index),
        receives=tuple(crossing for crossing in crossings if index in crossing.targets),
    )
