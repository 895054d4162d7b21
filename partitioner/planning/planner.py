"""The requested stages and devices -> a plan of every given cost graph, without a model.

A run makes several plans: the generated stages are measured, and the graph is cut again with their
costs. `planner_for` chooses the devices once, for the first graph; all further plans use them.

`choose_stages` chooses the number of stages per rank. More stages per rank shrink the bubble, but
need finer cuts and more actions, each of which costs the runtime a moment: v stages per rank and m
micro-batches have 2 m v actions, or 3 m v with split backwards. The numbers 1, 2, 4 .. are planned,
each for its schedule: one stage per rank for 1f1b if the schedule requires several.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import networkx as nx

from ...runtime.errors import AsyncPipeError, PlanError
from ...runtime.formatting import write_share
from ...runtime.plan.findings import Candidate, Finding
from ...runtime.schedule.builders import AUTO, VIRTUAL
from ..graph.cost_graph import costs_of
from ..graph.costs import LOCALHOST, Link, Value
from ..graph.rank_model import Device, RankConfig, scheduled
from .choose_devices import (
    DeviceChoice,
    advised,
    beside_other_shapes,
    choose,
    shape_candidates,
    shape_sentence,
)
from .cluster import ANY_HOST, Cluster
from .cluster_file import cluster_of
from .explain import explain as explain_plan
from .infeasible import explained
from .keywords import PlanConfig
from .signatures import checked
from .solve import Solution, solve

ACTION_MS = 0.15
"""Upper bound of an action's overhead besides computing, from the runtime's benchmark."""

_NUMBERS = (1, 2, 4, 8)
_WORTH_SAYING = 0.01
_MOST_EACH = (4, 2)  # how many numbers of stages per rank to compare: with another, with one
_MOST_GROUPS = 1_000  # of a graph whose other numbers of stages are planned
_OF_STAGES = ("method", "ranks")  # options that other shapes do not have


@dataclass(frozen=True)
class Way:
    """A number of stages per rank with its schedule and plan."""

    schedule: str
    stages_per_rank: int
    solution: Solution

    @property
    def step_ms(self) -> float:
        """The step with the overhead of its actions."""
        solution = self.solution
        ranks = tuple(of_stage[0] for of_stage in solution.placement.ranks_of_stage)
        repeated = ranks if len(set(ranks)) < len(ranks) else ()
        count = solution.setting.shared_micro_batches
        schedule = scheduled(self.schedule, len(ranks), count, repeated)
        return solution.step_ms + ACTION_MS * max(map(len, schedule.ranks))

    @property
    def name(self) -> str:
        stages = "1 stage" if self.stages_per_rank == 1 else f"{self.stages_per_rank} stages"
        return f"{self.schedule} with {stages} per rank"


def choose_stages(graph: nx.DiGraph, options: Mapping[str, Any]) -> int:
    """The number of stages with the shortest step on `ranks` of the options, under their schedule.

    Raises PlanError if the schedule has no plan on that many ranks.
    """
    ranks, schedule = int(options["ranks"]), options.get("schedule") or "async-1f1b"
    if schedule not in (*VIRTUAL, AUTO):
        return ranks
    ways, refused = [], None
    for stages_per_rank in _NUMBERS:
        try:
            ways.append(_way(graph, ranks, schedule, stages_per_rank, options))
        except AsyncPipeError as error:
            refused = refused or error
    if not ways:
        assert refused is not None
        raise PlanError(refused.what, refused.cure)
    return ranks * min(ways, key=lambda way: way.step_ms).stages_per_rank


def other_ways(
    graph: nx.DiGraph, solution: Solution, options: Mapping[str, Any]
) -> tuple[list[str], list[Candidate]]:
    """The steps of other numbers of stages per rank: a sentence if one is faster, and all of
    them."""
    setting, stages = solution.setting, len(solution.loads)
    ranks = setting.stages
    if setting.is_asynchronous or ranks == 1 or len(graph) > _MOST_GROUPS or stages % ranks:
        return [], []
    chosen = Way(setting.schedule, stages // ranks, solution)
    ways = list(_others(graph, chosen, {**options, "method": "chain"}))
    if not ways:
        return [], []
    best = min(ways, key=lambda way: way.step_ms)
    gain = 1 - best.step_ms / chosen.step_ms
    faster = [f"{best.name} would be {write_share(gain)} faster"] if gain > _WORTH_SAYING else []
    return faster, [_candidate(way, chosen) for way in ways]


def _others(graph: nx.DiGraph, chosen: Way, options: Mapping[str, Any]) -> Iterator[Way]:
    ranks = chosen.solution.setting.stages
    # What `auto` could do with them is never longer, and takes much longer to compute.
    several = "looped-bfs" if chosen.schedule == "looped-bfs" else "interleaved"
    for stages_per_rank in sorted({1, 2, 2 * chosen.stages_per_rank}):
        schedule = several if stages_per_rank > 1 else "1f1b"
        is_chosen = (schedule, stages_per_rank) == (chosen.schedule, chosen.stages_per_rank)
        if is_chosen or stages_per_rank > _MOST_EACH[chosen.stages_per_rank == 1]:
            continue
        try:
            yield _way(graph, ranks, schedule, stages_per_rank, options)
        except AsyncPipeError:  # there is no such plan
            continue


def _way(
    graph: nx.DiGraph, ranks: int, schedule: str, stages_per_rank: int, options: Mapping[str, Any]
) -> Way:
    running = {**options, "ranks": ranks, "schedule": schedule}
    solution = solve(graph, stages=ranks * stages_per_rank, link=LOCALHOST, **running)
    return Way(schedule, stages_per_rank, solution)


def _candidate(way: Way, chosen: Way) -> Candidate:
    more = way.step_ms / chosen.step_ms - 1
    solution = way.solution
    return Candidate(
        name=way.name,
        stages=len(solution.loads),
        bottleneck_ms=solution.bottleneck_ms,
        step_ms=solution.step_ms,
        peak_bytes=max(solution.evaluation.rank_bytes),
        crossing_bytes=solution.crossing_bytes,
        gap=solution.gap,
        note=f"{write_share(abs(more))} {'more' if more > 0 else 'less'} time per step",
    )


@dataclass(frozen=True)
class Planner:
    """Plans on equal ranks, or on those of `choice`; `options` are those of `solve`."""

    stages: int | None
    options: Mapping[str, Any]
    choice: DeviceChoice | None = None

    @property
    def link(self) -> Link:
        """The slowest link that a boundary may use."""
        return self.choice.cluster.slowest_link if self.choice else LOCALHOST

    def plan(self, graph: nx.DiGraph) -> Solution:
        """The stages of a graph on these ranks."""
        if self.choice:
            return self.choice.again(graph)
        assert self.stages is not None
        return solve(graph, stages=self.stages, link=LOCALHOST, **self.options)

    def advised(self, graph: nx.DiGraph, solution: Solution) -> Solution:
        """The plan with findings on other numbers of stages and on the devices."""
        if self.choice:
            return advised(self.choice, self.choice.bounded(graph, solution), self.stages)
        sentences, ways = other_ways(graph, solution, self.options)
        solution = replace(
            solution,
            explanation=(*solution.explanation, *sentences),
            candidates=(*solution.candidates, *ways),
        )
        if solution.setting.stages < len(solution.loads):
            return solution
        assert self.stages is not None
        equal = Cluster((Device(),) * self.stages, {ANY_HOST: LOCALHOST})
        options = {name: self.options[name] for name in self.options if name not in _OF_STAGES}
        choice = beside_other_shapes(graph, equal, solution, options)
        sentence = shape_sentence(choice, self.stages)
        return replace(
            solution,
            explanation=(*solution.explanation, *filter(None, [sentence])),
            candidates=(*solution.candidates, *shape_candidates(choice)),
        )


def planner_for(
    graph: nx.DiGraph, cluster: Cluster | None, stages: int | None, options: Mapping[str, Any]
) -> Planner:
    """Chooses the devices of `cluster` if there is one; otherwise the number of stages on `ranks`
    of the options, if none is given.
    """
    if cluster is None:
        return Planner(stages or choose_stages(graph, options), options)
    return Planner(stages, options, choose(graph, cluster, stages=stages, **options))


def with_times_on(graph: nx.DiGraph, others: Mapping[str, nx.DiGraph]) -> nx.DiGraph:
    """The graph with the times that the same groups take on other kinds of devices."""
    for group, node in graph.nodes(data=True):
        times = {
            kind: (other.nodes[group]["forward_ms"], other.nodes[group]["backward_ms"])
            for kind, other in others.items()
        }
        if times:
            node["times_on"] = times
    return graph


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that leaves a stage; its gradient comes back.

    A gradient that the graph has as a value of its own goes from a later stage to earlier ones.

    name: the name of the value
    source, targets: the stage that makes it, and those that read it
    forward_bytes, backward_bytes: bytes of the value and of its gradient, for one micro-batch
    """

    name: str
    source: int
    targets: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class GraphStage:
    """The costs of one stage of a planned graph for one micro-batch.

    index: the number of the stage, from 0
    groups: its nodes of the graph
    load_ms: its whole time, with transfers
    forward_ms, backward_ms: its computation; the backward includes a recomputed forward
    param_bytes, activation_bytes: bytes of its parameters, and kept for one micro-batch
    peak_bytes: its peak memory with all micro-batches in flight
    recompute: the backward runs the forward again
    sends, receives: the values that leave and enter it
    """

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
    """The stages of a planned cost graph, with the same interface as a model's plan.

    name: the name of the graph
    stages: the stages in order
    stage_of: the stage of each node of the graph
    ranks_of_stage: the ranks of each stage, several if it is replicated
    bottleneck_ms, lower_bound_ms: the slowest rank for one micro-batch, and its proven bound
    step_ms, step_bound_ms: an optimizer step under the schedule, and its proven bound
    gap: the share by which the objective is above its proven bound (0.02 is 2%)
    optimal: the objective reaches its bound
    method: the planning method
    seconds: the duration of the search
    explanation: why the cuts are where they are, in a few clauses
    findings: the long explanation, with `explain=True`
    candidates: other plans that were considered
    """

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
        """The rank of each stage, the first one if the stage is replicated."""
        return tuple(ranks[0] for ranks in self.ranks_of_stage)

    def to_json(self) -> str:
        """The plan as JSON, with the names of the fields."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


@checked
def plan_graph(
    graph: nx.DiGraph,
    stages: int | None = None,
    *,
    method: str = "auto",
    devices: Cluster | str | Path | None = None,
    link: Link | None = None,
    setting: RankConfig | None = None,
    prefer_modules: float = 0.0,
    granularity: str = "op",
    cut_before: Collection[str] = (),
    explain: bool = False,
    **running: Unpack[PlanConfig],
) -> GraphPlan:
    """Plans a cost graph, such as another tool's.

    - `graph`: a directed graph without cycles; see `costs_of` for the attributes of its nodes and
      edges.
    - `stages`: the number of stages, each on one rank; not needed with `devices` or `ranks`.
    - `method`, `prefer_modules`, `granularity`: the options of `PartitionOptions`.
    - `devices`: a `Cluster` or its TOML file. The planner chooses among the devices, and the number
      of stages if none is given.
    - `link`: the connection of consecutive stages. Without one transfers are free, unless the
      graph's edges give times.
    - `setting`: the ranks in detail, in place of `running`.
    - `cut_before`: nodes before which the plan must cut.
    - `explain`: adds the reasons for the cuts, the bounds, and the effect of other settings.
    - `running`: the intended run: `schedule`, `ranks`, `micro_batches`, `recompute`,
      `memory_limit`, `optimizer` and `staleness` of `PartitionOptions`.

    Raises PlanError for a graph with a cycle or an illegal cost, an illegal value of an option,
    and when no plan satisfies the options.
    """
    options: dict[str, Any] = {
        "method": method,
        "prefer_modules": prefer_modules,
        "granularity": granularity,
        "cut_before": cut_before,
        **running,
    }
    cluster = cluster_of(
        devices,
        stages,
        ranks=running.get("ranks"),
        zero=running.get("zero", 0) if setting is None else 0,
        method=method,
    )
    with explained():
        if cluster is not None:
            planner = planner_for(graph, cluster, stages, options)
            solution, on_link = planner.advised(graph, planner.plan(graph)), planner.link
        else:
            number = stages or choose_stages(graph, options)
            solution = solve(graph, stages=number, link=link, setting=setting, **options)
            on_link = link or Link()
    resolve = partial(solve, **options)
    findings = explain_plan(graph, solution, on_link, resolve) if explain else ()
    return _graph_plan(graph, solution, findings)


def _graph_plan(graph: nx.DiGraph, solution: Solution, findings: tuple[Finding, ...]) -> GraphPlan:
    crossings = _crossings(graph, solution)
    return GraphPlan(
        name=solution.problem.costs.name,
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
        findings=findings,
        candidates=solution.candidates,
    )


def _crossings(graph: nx.DiGraph, solution: Solution) -> list[Crossing]:
    costs = costs_of(graph)
    where = [solution.stage_of[group] for group in costs.groups]
    return [
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
