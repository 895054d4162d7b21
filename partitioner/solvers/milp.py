"""A problem -> a plan and a proven bound by a mixed-integer program, for graphs with too many
downsets.

Prefix variables give the latest stage of a group: y[v, s] = 1 if v is on stage s or before.

    minimize T
    y[v, s - 1] <= y[v, s]                                v stays where it is
    y[v, s] <= y[u, s]                    for u -> v      no edge backwards, so no cycle of stages
    send[t, s] >= x[o, s] - x[m, s]       for m in M      with x[v, s] = y[v, s] - y[v, s - 1]
    receive[t, s] >= x[m, s] - x[o, s]    for m in M
    T >= sum of work x + sends + receives                 for each stage

for values t of owner o and readers M; `sends` and `receives` become 0 or 1 without an integrality
constraint. In a plan with a score within the limit, the work of the ancestors and of the
descendants of v excludes some stages for v; these variables are fixed. The program omits memory,
and of a synchronous score everything but rounds x load, so the solver's dual bound holds for every
plan. The solver is HiGHS (Huangfu and Hall, "Parallelizing the dual revised simplex method", 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from ..graph.costs import Costs, Floats
from ..graph.problem import Placement, Problem, evaluate
from .bounds import backwards, ratios, sum_over_reached

SECONDS = 30.0
GAP = 1e-4
FEW_VARIABLES = 6_000  # the program is mostly solved within seconds
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Improved:
    """The best known plan, None if there is none, and a lower bound of the score of all plans."""

    stage_of: tuple[int, ...] | None
    bound_ms: float


def improve(
    problem: Problem,
    stage_of: Sequence[int] | None,
    limit_ms: float,
    *,
    seconds: float,
    gap: float = GAP,
) -> Improved:
    """Searches for a plan better than `stage_of`, whose score is the limit, until the plan is
    proved within `gap` of the optimum or the time is over.
    """
    program = _program(problem, limit_ms / problem.setting.rounds)
    is_small = len(problem.costs.groups) * problem.stages <= FEW_VARIABLES
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in {
        "output_flag": False,
        "threads": 1,
        "time_limit": float(seconds),
        "mip_rel_gap": gap,
        "mip_allow_restart": not is_small,  # a second presolve takes longer than it saves
        # Searches around the relaxation's plan: branching finds it sooner in a small program.
        "mip_heuristic_run_rens": not is_small,
        "mip_heuristic_run_rins": not is_small,
    }.items():
        solver.setOptionValue(option, value)
    solver.passModel(program.model())
    if stage_of is not None:
        known = highspy.HighsSolution()
        known.col_value = program.values_of(problem, stage_of)
        solver.setSolution(known)
    solver.run()
    info = solver.getInfo()
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return Improved(None if stage_of is None else tuple(stage_of), limit_ms)
    bound_ms = min(problem.setting.rounds * max(0.0, info.mip_dual_bound) * (1 - 1e-7), limit_ms)
    best = None if stage_of is None else tuple(stage_of)
    improved = program.stage_of(list(solver.getSolution().col_value))
    if improved is not None and _score_ms(problem, improved) < (limit_ms if best else np.inf):
        best = improved
    return Improved(best, bound_ms)


def _score_ms(problem: Problem, stage_of: Sequence[int]) -> float:
    evaluation = evaluate(problem, Placement(tuple(stage_of)))
    return evaluation.score_ms if evaluation.fits else np.inf


@dataclass
class _Program:
    """Columns and rows of the program; column 0 is T, then y[v, s] by group and stage."""

    num_groups: int
    stages: int
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def column(self, low: float, high: float) -> int:
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1

    def row(self, terms: dict[int, float], *, least: float = -np.inf, most: float = np.inf) -> None:
        self.starts.append(len(self.columns))
        self.columns += terms
        self.factors += terms.values()
        self.least.append(least)
        self.most.append(most)

    def at_most(self, group: int, stage: int) -> int:
        """The column of y[group, stage]."""
        return 1 + group * (self.stages - 1) + stage

    def on(self, group: int, stage: int) -> tuple[dict[int, float], float]:
        """x[group, stage] as terms and a constant."""
        terms: dict[int, float] = {}
        if stage > 0:
            terms[self.at_most(group, stage - 1)] = -1.0
        if stage < self.stages - 1:
            terms[self.at_most(group, stage)] = 1.0
        return terms, float(stage == self.stages - 1)

    def model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.low), len(self.starts)
        model.col_cost_ = [1.0] + [0.0] * (len(self.low) - 1)
        model.col_lower_, model.col_upper_ = self.low, self.high
        model.row_lower_, model.row_upper_ = self.least, self.most
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = [*self.starts, len(self.columns)]
        model.a_matrix_.index_, model.a_matrix_.value_ = self.columns, self.factors
        binary = 1 + self.num_groups * (self.stages - 1)
        whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        model.integrality_ = [
            whole if 0 < column < binary else real for column in range(len(self.low))
        ]
        return model

    def values_of(self, problem: Problem, stage_of: Sequence[int]) -> list[float]:
        """The columns of a plan; the solver computes those of the transfers itself."""
        values = [float(high) for high in self.high]
        values[0] = _score_ms(problem, stage_of) / problem.setting.rounds
        for group, at in enumerate(stage_of):
            for stage in range(self.stages - 1):
                values[self.at_most(group, stage)] = float(at <= stage)
        return values

    def stage_of(self, values: list[float]) -> tuple[int, ...] | None:
        """The plan of a solution; None if there is none or a stage has no groups."""
        if len(values) != len(self.low):
            return None
        prefix = np.array(values[1 : 1 + self.num_groups * (self.stages - 1)])
        later = (prefix.reshape(self.num_groups, -1) < 0.5).sum(axis=1)
        return tuple(later.tolist()) if len(set(later.tolist())) == self.stages else None


def _program(problem: Problem, limit_ms: float) -> _Program:
    costs, stages = problem.costs, problem.stages
    program = _Program(len(costs.groups), stages)
    program.column(0.0, limit_ms * (1 + _ROUNDING))
    first, last = _range_of_stages(problem, limit_ms)
    for group in range(len(costs.groups)):
        for stage in range(stages - 1):
            program.column(float(stage >= last[group]), float(stage >= first[group]))
    for group in range(len(costs.groups)):
        for stage in range(1, stages - 1):
            before, after = program.at_most(group, stage - 1), program.at_most(group, stage)
            program.row({before: 1.0, after: -1.0}, most=0.0)
    for source, target in dict.fromkeys(costs.edges):
        for stage in range(stages - 1):
            reader, owner = program.at_most(target, stage), program.at_most(source, stage)
            program.row({reader: 1.0, owner: -1.0}, most=0.0)
    for stage in range(stages):
        _add_stage(program, problem, stage)
    return program


def _add_stage(program: _Program, problem: Problem, stage: int) -> None:
    """The rows of one stage: it is not empty, its sends, its receives, and its load."""
    seen, setting = problem.seen[stage], problem.setting
    some: dict[int, float] = {}
    load: dict[int, float] = {0: -1.0}
    fixed = fixed_some = 0.0
    for group, work_ms in enumerate(seen.work_ms.tolist()):
        terms, constant = program.on(group, stage)
        fixed += work_ms * constant
        fixed_some += constant
        for column, factor in terms.items():
            some[column] = some.get(column, 0.0) + factor
            if work_ms:
                load[column] = load.get(column, 0.0) + factor * work_ms
    if some:
        program.row(some, least=1.0 - fixed_some)
    talks: tuple[dict[int, float], dict[int, float]] = {}, {}
    if setting.devices[stage].pays_transfers:
        for (owner, readers, is_exchange), (send_ms, receive_ms) in _transfers(seen).items():
            ends = (talks[is_exchange], send_ms, 1.0), (talks[1], receive_ms, -1.0)
            for talk, cost_ms, sign in ends:
                if cost_ms:
                    column = program.column(0.0, 1.0)
                    talk[column] = cost_ms
                    for reader in readers:
                        _add_difference(program, column, owner, reader, stage, sign)
    if not setting.overlap:
        for talk in _both_ways(*talks, seen.duplex):
            program.row(load | talk, most=-fixed)
        return
    if any(talks) and setting.is_asynchronous:
        for talk in _both_ways(*talks, seen.duplex):
            program.row({0: -1.0, **talk}, most=0.0)
    program.row(load, most=-fixed)


def _both_ways(
    sending: dict[int, float], receiving: dict[int, float], duplex: float
) -> list[dict[int, float]]:
    """The sums whose maximum is `both_ways_ms`."""
    in_turn = {column: cost_ms / duplex for column, cost_ms in (sending | receiving).items()}
    return [in_turn] if duplex == 1 else [sending, receiving, in_turn]


def _add_difference(
    program: _Program, column: int, owner: int, reader: int, stage: int, sign: float
) -> None:
    """column >= sign x (x[owner, stage] - x[reader, stage]); constants cancel."""
    terms = {column: -1.0}
    for group, of_group in ((owner, sign), (reader, -sign)):
        for index, factor in program.on(group, stage)[0].items():
            terms[index] = terms.get(index, 0.0) + of_group * factor
    program.row(terms, most=0.0)


def _transfers(costs: Costs) -> dict[tuple[int, tuple[int, ...], bool], Floats]:
    """Milliseconds to send and to receive all values with the same ends; exchanges are apart."""
    times_of_ends: dict[tuple[int, tuple[int, ...], bool], Floats] = {}
    for index, value in enumerate(costs.values):
        ends = value.owner, value.readers, value.is_exchange
        times_ms = times_of_ends.setdefault(ends, np.zeros(2))
        times_ms += costs.send_ms[index], costs.receive_ms[index]
    return times_of_ends


def _range_of_stages(problem: Problem, limit_ms: float) -> tuple[list[int], list[int]]:
    """The first and the last stage of each group, from the work of its ancestors and of its
    descendants.
    """
    least_ms, stages = problem.least_work_ms, problem.stages
    speeds, blur = ratios(problem), _ROUNDING * float(least_ms.sum())
    edges = problem.costs.edges
    up = sum_over_reached(edges, least_ms)
    down = sum_over_reached(backwards(edges), least_ms)
    first = np.searchsorted(np.cumsum(speeds) * limit_ms + blur, up)
    last = stages - 1 - np.searchsorted(np.cumsum(speeds[::-1]) * limit_ms + blur, down)
    first = np.minimum(first, stages - 1)
    return first.tolist(), np.maximum(first, last).tolist()
