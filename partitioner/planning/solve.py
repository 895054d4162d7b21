"""A cost graph and a setting -> the stage of every group, with a proven bound."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Unpack

import networkx as nx
import numpy as np

from ...runtime.errors import PlanError
from ...runtime.formatting import write_gap, write_ms, write_share
from ...runtime.plan.findings import Candidate
from ...runtime.plan.setting import RankSpec
from ...runtime.plan.sharing import GRADIENTS
from ..graph.cost_graph import costs_of, with_exchanges, with_rotations, with_updates
from ..graph.costs import Bools, Costs, Link, slowest_link
from ..graph.problem import (
    DoesNotFit,
    Evaluation,
    Placement,
    Problem,
    Rules,
    StageLoad,
    crossing_bytes,
    evaluate,
)
from ..graph.rank_model import RankConfig
from ..solvers import METHODS, SUPPORTS_CUTS, SUPPORTS_RANKS
from .cluster import make_setting
from .compare_methods import or_all
from .empty_stages import without_empty_stages
from .infeasible import NothingFits
from .interleaved import on_ranks, place_several, rank_bound_ms, rank_of_stage_in, several_bound_ms
from .keywords import PlanConfig
from .makespan import bottleneck_bound_ms, shortest_step, step_bound_ms
from .options import PREFER_MODULES, check_options
from .step_time import Step, step_of

QUICK = "quick"
"""The method `chain` whose cuts are not moved for a shorter simulated step."""


@dataclass(frozen=True)
class Solution:
    """The placement of the groups of `problem`, the cost of each stage, and the proven bounds.

    lower_bound_ms: bound of the bottleneck of every legal placement under the cost model, whatever
        the method
    step_bound_ms: the same for one optimizer step
    optimal: the objective meets its bound: the bottleneck's, or the step's of a synchronous
        schedule
    even_split: the split that counts blocks
    explanation: a few clauses with reasons
    crossing_bytes: bytes sent between ranks for one micro-batch
    candidates: the results of the compared methods
    rank_specs: all used devices, if they come from a file
    stage_ranks: the ranks of each stage among them
    """

    stage_of: Mapping[str, int]
    problem: Problem
    placement: Placement
    setting: RankConfig
    evaluation: Evaluation
    lower_bound_ms: float
    step_ms: float
    step_bound_ms: float
    even_split: Evaluation
    method: str
    seconds: float
    explanation: tuple[str, ...]
    crossing_bytes: int = 0
    candidates: tuple[Candidate, ...] = ()
    rank_specs: tuple[RankSpec, ...] = ()
    stage_ranks: tuple[tuple[int, ...], ...] = ()

    @property
    def ranks_of_stage(self) -> tuple[tuple[int, ...], ...]:
        return self.stage_ranks or self.placement.ranks_of_stage

    @property
    def loads(self) -> tuple[StageLoad, ...]:
        return self.evaluation.stages

    @property
    def loads_ms(self) -> tuple[float, ...]:
        return tuple(load.load_ms for load in self.loads)

    @property
    def bottleneck_ms(self) -> float:
        return self.evaluation.bottleneck_ms

    @property
    def unit(self) -> str:
        """What loads are compared of: stages, or ranks that may have several."""
        several = self.placement.ranks is not None and not self.placement.is_replicated
        return "rank" if several else "stage"

    @property
    def asked_stages(self) -> int:
        """The number of stages that `solve` was asked for: one for each rank, unless it was given
        fewer ranks."""
        is_folded = METHODS[self.method] in SUPPORTS_RANKS and len(self.loads) > self.setting.stages
        return len(self.loads) if is_folded else self.setting.stages

    @property
    def even_split_ms(self) -> float:
        return self.even_split.bottleneck_ms

    @property
    def optimal(self) -> bool:
        objective_ms, bound_ms = self._objective_and_bound_ms
        return objective_ms <= bound_ms * (1 + 1e-6)  # the precision of a solver's arithmetic

    @property
    def gap(self) -> float:
        """The distance of the objective from its bound, as a share of the bound."""
        objective_ms, bound_ms = self._objective_and_bound_ms
        return objective_ms / bound_ms - 1 if bound_ms else 0.0

    @property
    def summary(self) -> str:
        """The objective and its proven bound, in one clause."""
        proven = "proven optimal" if self.optimal else f"{write_gap(self.gap)} above the optimum"
        slowest = f"bottleneck {self.unit} {write_ms(self.bottleneck_ms)}"
        if self.setting.is_asynchronous:
            return f"{self.method} · {slowest} ({proven})"
        step = f"{self.setting.schedule} step {write_ms(self.step_ms)}"
        return f"{self.method} · {step} ({proven}) · {slowest}"

    @property
    def objective_ms(self) -> float:
        """The objective that compares plans."""
        return self._objective_and_bound_ms[0]

    @property
    def _objective_and_bound_ms(self) -> tuple[float, float]:
        if self.setting.is_asynchronous:
            return self.bottleneck_ms, self.lower_bound_ms
        return self.step_ms, self.step_bound_ms


@or_all
def solve(
    graph: nx.DiGraph,
    *,
    stages: int,
    method: str = "auto",
    link: Link | None = None,
    setting: RankConfig | None = None,
    prefer_modules: float = PREFER_MODULES,
    granularity: str = "op",
    cut_before: Collection[str] = (),
    **running: Unpack[PlanConfig],
) -> Solution:
    """Cuts a cost graph into `stages` stages with a small largest load, on as many ranks, or on
    fewer ranks with several stages each if `ranks` is given.

    The load is that of one micro-batch, or the simulated step for a named synchronous schedule.
    `setting` describes the ranks and how they run; without one they are equal, and `running`
    describes how they run. `prefer_modules` is the share of the bottleneck that may be given up to
    cut between blocks; with `granularity="module"` a block is never cut. There is a cut before
    every group in `cut_before`, and the other cuts are optimal given these; the bound is that of a
    plan without demanded cuts.

    Raises PlanError for a graph without legal costs, an unknown method or granularity, more stages
    than pieces, and demanded cuts that are too many, or that the method cannot use.
    """
    started = time.perf_counter()
    is_quick, method = method == QUICK, "chain" if method == QUICK else method
    check_options({"method": method, "granularity": granularity, "prefer_modules": prefer_modules})
    link = link or Link()
    setting = setting or make_setting(stages, overlap=link.overlap, **running)
    _check_ranks(stages, setting)
    _check_zero(setting, method)
    costs = _costs_of_run(graph, link, setting)
    may_cut = _allowed_cuts(costs, granularity)
    must_cut = _demanded_cuts(costs, cut_before)
    _check_demands(stages, must_cut, method)
    may_cut[list(must_cut)] = True
    _check_stages(costs, stages, may_cut, granularity)
    problem = Problem(costs, setting, Rules(may_cut, prefer_modules, is_quick=is_quick))
    demanding = replace(problem, rules=replace(problem.rules, must_cut=must_cut))
    is_folded = stages > setting.stages
    result = (
        _folded(problem, demanding, stages, method)
        if is_folded
        else _one_a_rank(problem, demanding, method)
    )
    return _solution(problem, result, method, started)


def _costs_of_run(graph: nx.DiGraph, link: Link, setting: RankConfig) -> Costs:
    """The costs of the graph with what an optimizer step adds: memory, updates, exchanges."""
    costs = with_rotations(costs_of(graph, link), graph, setting.optimizer)
    update_ms_per_byte = _update_ms_per_byte(graph, setting)
    costs = with_updates(costs, update_ms_per_byte, setting.micro_batches)
    slowest = slowest_link(setting.links or (link,))
    return with_exchanges(costs, setting.micro_batches, slowest, update_ms_per_byte)


def _solution(problem: Problem, result: _Result, method: str, started: float) -> Solution:
    """The solution of a problem that was `started` at that time."""
    placement, evaluation = result.step.placement, result.step.evaluation
    explanation = explain_shortly(problem, evaluation, placement)
    if problem.setting.is_asynchronous:
        price = _price_of_demands(placement.order_optimum_ms, result.order_optimum_ms)
        explanation = (*explanation, *price)
    return Solution(
        stage_of=dict(zip(problem.costs.groups, placement.stage_of, strict=True)),
        problem=problem,
        placement=placement,
        setting=problem.setting,
        evaluation=evaluation,
        lower_bound_ms=result.bottleneck_bound_ms,
        step_ms=result.step.step_ms,
        step_bound_ms=result.step_bound_ms,
        even_split=evaluate(problem, result.even),
        method=_method_name(method),
        seconds=time.perf_counter() - started,
        explanation=explanation,
        crossing_bytes=crossing_bytes(problem.costs, placement),
    )


def _update_ms_per_byte(graph: nx.DiGraph, setting: RankConfig) -> float:
    """The optimizer's share of a rank's time. Under synchronous schedules it is omitted: ranks wait
    for a flush in any case, and the bounds cover the time before it.
    """
    return float(graph.graph.get("update_ms_per_byte", 0.0)) if setting.is_asynchronous else 0.0


@dataclass(frozen=True)
class _Result:
    """The plan, its bounds, the optimum over the cuts of the order without demanded cuts, and the
    split that counts blocks.
    """

    step: Step
    step_bound_ms: float
    bottleneck_bound_ms: float
    order_optimum_ms: float | None
    even: Placement


def _one_a_rank(problem: Problem, demanding: Problem, method: str) -> _Result:
    """As many stages as ranks, or the result of a method that gives a rank several stages."""
    place = METHODS[method]
    try:
        free = placement = place(problem)
        if demanding.rules.must_cut:
            placement = place(demanding)
    except DoesNotFit as error:
        raise NothingFits(demanding, method) from error
    bound_ms = step_bound_ms(problem, free)
    step = shortest_step(demanding, placement, place, bound_ms)
    step = without_empty_stages(
        demanding, step, lambda stage_of: step_of(demanding, Placement(tuple(stage_of)))
    )
    if not step.evaluation.fits:
        raise NothingFits(demanding, method)
    return _Result(
        step,
        bound_ms,
        bottleneck_bound_ms(problem, free),
        free.order_optimum_ms,
        METHODS["uniform"](problem),
    )


def _folded(problem: Problem, demanding: Problem, stages: int, method: str) -> _Result:
    """More stages than ranks, so that each has several."""
    if METHODS[method] not in SUPPORTS_RANKS:
        raise PlanError(
            f"--method {method} assigns stages to ranks itself and cannot use --ranks.",
            "--method auto plans several stages per rank for the schedule.",
        )
    if problem.setting.is_asynchronous:
        raise PlanError(
            f"{problem.setting.schedule} has one stage per rank, and {stages} stages on "
            f"{problem.stages} ranks are more.",
            "--schedule interleaved, or --method mpipe --stages "
            f"{problem.stages}, which gives ranks several stages where that balances better",
        )
    rank_of_stage = rank_of_stage_in(problem, stages)
    step = place_several(demanding, stages, METHODS[method])
    counting = replace(problem, setting=problem.setting.at(rank_of_stage))
    return _Result(
        step,
        several_bound_ms(problem),
        rank_bound_ms(problem),
        None,
        on_ranks(METHODS["uniform"](counting), rank_of_stage),
    )


def _method_name(method: str) -> str:
    """The name of the method that `auto` stands for."""
    place = METHODS[method]
    return next(name for name, other in METHODS.items() if other is place and name != "auto")


def _allowed_cuts(costs: Costs, granularity: str) -> Bools:
    """The legal cut positions; at module granularity before blocks and modules with parameters."""
    if granularity == "op":
        return np.ones(len(costs.groups) + 1, dtype=bool)
    blocks = np.array(costs.blocks)
    starts = np.ones(len(costs.groups) + 1, dtype=bool)
    starts[1:-1] = costs.has_params[1:] | (blocks[1:] != blocks[:-1])
    allowed: Bools = starts & (costs.cut_depth == 0)
    return allowed


def _demanded_cuts(costs: Costs, cut_before: Collection[str]) -> tuple[int, ...]:
    """The rising positions of the groups before which a cut is demanded."""
    position = {group: index for index, group in enumerate(costs.groups)}
    for group in cut_before:
        if not position.get(group):
            raise PlanError(f"no cut can be before {group} of {costs.name}.")
    return tuple(sorted({position[group] for group in cut_before}))


def _check_demands(stages: int, must_cut: tuple[int, ...], method: str) -> None:
    if must_cut and METHODS[method] not in SUPPORTS_CUTS:
        raise PlanError(
            f"--method {method} chooses all cuts itself and cannot use --cut-at.",
            "--method auto keeps the demanded cuts and optimizes the others.",
        )
    if len(must_cut) >= stages:
        raise PlanError(
            f"{len(must_cut)} cuts demanded, but with {stages} stages there are {stages - 1}.",
            f"--stages {len(must_cut) + 1}",
        )


def _check_zero(setting: RankConfig, method: str) -> None:
    """Raises PlanError where replicas of single stages would share out gradients."""
    if setting.zero >= GRADIENTS and METHODS[method] is METHODS["pipedream"]:
        raise PlanError(
            f"--zero {setting.zero} sums the gradients of every micro-batch over all replicas, but "
            "with --method pipedream single stages have replicas with micro-batches of their own.",
            "--zero 1, or another --method",
        )


def _check_ranks(stages: int, setting: RankConfig) -> None:
    """Raises PlanError if there are more ranks than stages."""
    if setting.stages > stages:
        raise PlanError(
            f"{stages} stages cannot be on {setting.stages} ranks: each rank has at least one.",
            f"--ranks {stages}, or --stages {setting.stages}",
        )


def _price_of_demands(optimum_ms: float | None, free_ms: float | None) -> list[str]:
    """The additional cost of the demanded cuts, compared with the cuts that the planner would
    choose.
    """
    if not optimum_ms or not free_ms or optimum_ms <= free_ms * 1.0005:
        return []
    return [
        f"the requested cuts cost {write_share(optimum_ms / free_ms - 1)}: without them the "
        f"bottleneck stage would take {write_ms(free_ms)}"
    ]


def _check_stages(costs: Costs, stages: int, may_cut: Bools, granularity: str) -> None:
    if stages < 1:
        raise PlanError(f"{stages} stages asked, a pipeline has at least 1.", "--stages 2")
    places = int(may_cut[1:-1].sum())
    if stages <= places + 1:
        return
    most = f"At most {places + 1} {'stage' if places == 0 else 'stages'}"
    has = f"{costs.name} has {places} {'place' if places == 1 else 'places'} to cut"
    if granularity == "module" and len(costs.groups) > places + 1:
        raise PlanError(
            f"{stages} stages asked, but {has} at module level.",
            f"{most}, or --granularity op ({len(costs.groups)} operators).",
        )
    raise PlanError(f"{stages} stages asked, but {has}.", f"{most}: --stages {places + 1}")


def explain_shortly(
    problem: Problem, evaluation: Evaluation, placement: Placement
) -> tuple[str, ...]:
    """The slowest rank with its largest group, and the time given up for tidier cuts."""
    of_rank: dict[int, list[int]] = {}
    for stage, ranks in enumerate(placement.ranks_of_stage):
        of_rank.setdefault(ranks[0], []).append(stage)
    rank = max(of_rank, key=lambda rank: evaluation.rank_ms[rank])
    stages, slowest_ms = of_rank[rank], evaluation.rank_ms[rank]
    costs = problem.seen[rank]
    who = f"stage {stages[0]}"
    if len(stages) > 1:
        who = f"rank {rank} with stages {', '.join(map(str, stages))}"
    members = np.flatnonzero(np.isin(placement.stage_of, stages))
    heaviest = int(members[costs.work_ms[members].argmax()])
    work_ms = costs.work_ms[heaviest] / len(placement.ranks_of_stage[stages[0]])
    share = work_ms / slowest_ms if slowest_ms else 0.0
    sentences = [
        f"{who} is the bottleneck with {write_ms(slowest_ms)} per micro-batch; its largest part is "
        f"{costs.labels[heaviest]} with {write_ms(work_ms)} ({write_share(share)})",
    ]
    optimum_ms = placement.order_optimum_ms
    if optimum_ms and slowest_ms > optimum_ms * 1.0005:
        sentences.append(
            f"the cuts are {write_share(slowest_ms / optimum_ms - 1)} slower than the fastest ones "
            f"({write_ms(optimum_ms)}), to split fewer modules or send fewer bytes"
        )
    return tuple(sentences)
