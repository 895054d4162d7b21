"""A problem and a placement -> the simulated time of one optimizer step.

A synchronous step runs the schedule's own actions with the costs of the stages, for every placement
that the schedule supports: one stage per rank, several per rank, or a stage on several ranks as
replicas. Otherwise replicas of a stage, and whole parallel pipelines, count as one rank of their
combined speed. `auto` is made for these costs as in a run, with backwards in one part. Its number
of micro-batches in flight is known only then, so its stages are evaluated again with that number;
its step is one of several consecutive steps, without a wait in between. For asynchronous schedules,
and for a schedule that puts stages on other ranks than the placement, a step is the slowest rank's
time for all its micro-batches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...runtime.errors import ScheduleError
from ...runtime.schedule.builders import AUTO, VIRTUAL, computed
from ...runtime.schedule.fit import Fit
from ...runtime.schedule.interleaved import REPLICATED, in_flight, replicated
from ...runtime.schedule.schedule import Schedule
from ...runtime.schedule.simulate import ActionCosts, Timeline, simulate
from ...runtime.schedule.tasks import Tasks
from ..graph.costs import Costs, Floats, Ints, Value
from ..graph.problem import Evaluation, Placement, Problem, evaluate
from ..graph.rank_model import scheduled
from .critical_path import CriticalPath

Edge = tuple[int, int]
LITTLE = 0.05  # effort for a schedule during the search for the best placement
NONE = 0.0  # for a start of the search: the best that is known, and one that is made
_ROUNDS = 3  # of making a schedule of costs that depend on what it keeps in flight


@dataclass(frozen=True)
class Step:
    """A placement, its costs, and the time of one step; with its schedule, if one was computed for
    it.
    """

    placement: Placement
    evaluation: Evaluation
    step_ms: float
    schedule: Schedule | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Communication:
    """The transfer times of ranks in addition to computing, for one micro-batch and by stage.

    overlapped_ms: times of the edges whose transfers overlap with computing
    edges: all edges
    grad_edges: the edges over which gradients come back
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    overlapped_ms: dict[Edge, float]
    edges: frozenset[Edge]
    grad_edges: frozenset[Edge]


def step_of(
    problem: Problem,
    placement: Placement,
    *,
    effort: float = 1.0,
    known: Sequence[Schedule] = (),
) -> Step:
    """The time of one optimizer step of the placement. With `effort` below 1, the schedule made for
    it is worse than that of a run; with `known` schedules it is at least as good as these.
    """
    setting = problem.setting
    if not is_simulated(problem, placement):
        evaluation = evaluate(problem, placement)
        # The bottleneck of replicas covers all their micro-batches, unless each has its own part.
        rounds = setting.micro_batches if setting.is_asynchronous else setting.shared_micro_batches
        return Step(placement, evaluation, rounds * evaluation.bottleneck_ms)
    if setting.schedule == AUTO:
        evaluation, fit = _fitted(problem, placement, effort, known)
        return Step(placement, evaluation, fit.period_ms, fit.schedule)
    held: tuple[int, ...] = ()
    if has_replicas(problem, placement):
        shape = tuple(map(len, placement.ranks_of_stage))
        held = in_flight(setting.schedule, setting.shared_micro_batches, shape)
    evaluation = evaluate(problem, placement, held)
    return Step(placement, evaluation, _timeline(problem, placement, evaluation).makespan_ms)


def is_simulated(problem: Problem, placement: Placement) -> bool:
    """The schedule runs the stages on the ranks of the placement."""
    setting, ranks = problem.setting, placement.ranks_of_stage
    if setting.is_asynchronous:
        return False
    if len({rank for of_stage in ranks for rank in of_stage}) == sum(map(len, ranks)):
        return True
    if placement.is_replicated:
        return False
    at = tuple(of_stage[0] for of_stage in ranks)
    if setting.schedule == AUTO:
        return True
    if setting.schedule not in VIRTUAL or len(at) % len(set(at)):
        return False
    count = setting.shared_micro_batches
    return scheduled(setting.schedule, len(at), count, at).rank_of_stage == at


def least_step_ms(problem: Problem, placement: Placement) -> float:
    """A lower bound for every schedule: the work of the rank that has the most."""
    rank_of = np.array([ranks[0] for ranks in placement.ranks_of_stage])
    work_ms = np.bincount(rank_of[list(placement.stage_of)], weights=problem.least_work_ms)
    return problem.setting.rounds * float(work_ms.max())


class StepTimer:
    """Computes the step of many placements of one problem, each by one pass over the schedule's
    actions.

    `schedule` is the schedule of one of them: `auto` is not made again for each. Without one, ranks
    are assumed to wait only for the slowest stage, once.
    """

    def __init__(self, problem: Problem, schedule: Schedule | None) -> None:
        self.problem, self.schedule = problem, schedule
        setting = problem.setting
        self._is_made = setting.schedule == AUTO
        self._is_plain = not setting.is_limited and not setting.replicas
        self._paths: dict[object, CriticalPath | None] = {}

    def step(self, placement: Placement) -> Step:
        """The result of `step_of` for the placement under this schedule."""
        held = self.schedule.in_flight if self._is_made and self.schedule else ()
        evaluation = evaluate(self.problem, placement, held)
        talk = communication_of(self.problem, placement)
        costs = action_costs(self.problem, placement, evaluation, talk)
        made = self.schedule if self._is_made else None
        return Step(placement, evaluation, self._end_ms(placement, costs, talk), made)

    def shorter(self, placement: Placement, than_ms: float) -> Step | None:
        """The step of the placement if it fits and is below `than_ms`. With unlimited memory, the
        stages are evaluated only in that case.
        """
        if self._is_plain:
            talk = communication_of(self.problem, placement)
            costs = self._plain_costs(placement, talk)
            if self._busy_ms(placement, costs) >= than_ms:
                return None
            if self._end_ms(placement, costs, talk) >= than_ms:
                return None
        step = self.step(placement)
        return step if step.evaluation.fits and step.step_ms < than_ms else None

    def _plain_costs(self, placement: Placement, talk: Communication) -> ActionCosts:
        """`action_costs` without the memory, for plans in which no stage recomputes to save
        memory.
        """
        problem, count = self.problem, placement.stages
        at, first = np.asarray(placement.stage_of), placement.ranks_of_stage
        by_seen = {id(seen): _sums_ms(seen, at, count) for seen in problem.seen}
        found = [by_seen[id(problem.seen[ranks[0]])][:, stage] for stage, ranks in enumerate(first)]
        forward_ms, backward_ms, weight_ms = np.stack(found, axis=1)
        if problem.setting.recompute == "all":
            setting = problem.setting.at(ranks[0] for ranks in first)
            held = (
                self.schedule.in_flight if self.schedule else map(setting.in_flight, range(count))
            )
            again = np.array([*held]) > 1
            backward_ms = backward_ms + forward_ms * again
        return ActionCosts(
            forward_ms=tuple((forward_ms + talk.forward_ms).tolist()),
            backward_ms=tuple((backward_ms + talk.backward_ms).tolist()),
            step_ms=exchanges_ms(problem, placement),
            transfer_ms=talk.overlapped_ms,
            weight_ms=tuple(weight_ms.tolist()),
        )

    def _busy_ms(self, placement: Placement, costs: ActionCosts) -> float:
        """The time in which the busiest rank computes and transfers in a step."""
        on_rank: dict[int, float] = defaultdict(float)
        for stage, (rank, *_) in enumerate(placement.ranks_of_stage):
            on_rank[rank] += costs.forward_ms[stage] + costs.backward_ms[stage]
        return self.problem.setting.shared_micro_batches * max(on_rank.values())

    def _end_ms(self, placement: Placement, costs: ActionCosts, talk: Communication) -> float:
        if self.schedule is None:
            stages_ms = map(sum, zip(costs.forward_ms, costs.backward_ms, strict=True))
            return self._busy_ms(placement, costs) + max(stages_ms)
        holders = _holders(self.problem, placement)
        key = (talk.edges, talk.grad_edges, holders)
        if key not in self._paths:
            self._paths[key] = _path(self.schedule, talk, holders)
        path = self._paths[key]
        if path is None:
            return math.inf
        return path.period_ms(costs) if self._is_made else path.end_ms(costs)


def _path(
    schedule: Schedule, talk: Communication, holders: Sequence[Sequence[int]]
) -> CriticalPath | None:
    """None if ranks would wait for each other: a schedule that was computed for other edges."""
    try:
        return CriticalPath(schedule, talk.edges, talk.grad_edges, holders)
    except ScheduleError:
        return None


def _sums_ms(seen: Costs, at: Ints, count: int) -> Floats:
    """Forward, backward and weight times of the stages."""
    amounts = (seen.forward_ms, seen.backward_ms, seen.weight_ms)
    return np.stack([np.bincount(at, weights=each, minlength=count) for each in amounts])


def schedule_of(problem: Problem, step: Step) -> Schedule:
    """The actions of the placement's ranks; for `auto` those of the schedule computed for the
    step.
    """
    return step.schedule or _schedule(problem, step.placement)


def _fitted(
    problem: Problem, placement: Placement, effort: float, known: Sequence[Schedule]
) -> tuple[Evaluation, Fit]:
    """The schedule for the costs of a placement, and the costs with its micro-batches in flight;
    these change if their number decides which stages recompute.
    """
    at = tuple(ranks[0] for ranks in placement.ranks_of_stage)
    count = problem.setting.shared_micro_batches
    talk, holders = communication_of(problem, placement), _holders(problem, placement)
    evaluation = evaluate(problem, placement)
    for _ in range(_ROUNDS):
        tasks = Tasks(
            action_costs(problem, placement, evaluation, talk),
            at,
            count,
            edges=talk.edges,
            grad_edges=talk.grad_edges,
            shared_stages=holders,
            may_split=False,
        )
        fit = computed(tasks, known, effort=effort)
        again = [load.recomputes for load in evaluation.stages]
        evaluation = evaluate(problem, placement, fit.schedule.in_flight)
        if again == [load.recomputes for load in evaluation.stages]:
            break
    return evaluation, fit


def _timeline(problem: Problem, placement: Placement, evaluation: Evaluation) -> Timeline:
    """One step, simulated."""
    talk = communication_of(problem, placement)
    return simulate(
        _schedule(problem, placement),
        action_costs(problem, placement, evaluation, talk),
        talk.edges,
        grad_edges=talk.grad_edges,
        shared_stages=_holders(problem, placement),
    )


def _schedule(problem: Problem, placement: Placement) -> Schedule:
    setting, ranks = problem.setting, placement.ranks_of_stage
    at = tuple(of_stage[0] for of_stage in ranks)
    rank_of_stage = at if len(set(at)) < len(at) else ()
    count = setting.shared_micro_batches
    if has_replicas(problem, placement):
        return replicated(setting.schedule, count, ranks)
    return scheduled(setting.schedule, placement.stages, count, rank_of_stage)


def has_replicas(problem: Problem, placement: Placement) -> bool:
    """Single stages are on several ranks, and the schedule trains them as replicas."""
    replicas = set(map(len, placement.ranks_of_stage))
    few = max(replicas) <= problem.setting.shared_micro_batches
    return problem.setting.schedule in REPLICATED and len(replicas) > 1 and few


def action_costs(
    problem: Problem, placement: Placement, evaluation: Evaluation, talk: Communication
) -> ActionCosts:
    """The costs of every stage's actions, transfers that ranks wait for included."""
    setting = problem.setting
    on = placement.ranks_of_stage
    replicas = [1 if has_replicas(problem, placement) else len(ranks) for ranks in on]
    positions = [ranks[0] for ranks in on]

    def shared(times_ms: Sequence[float], beside_ms: Sequence[float]) -> tuple[float, ...]:
        return tuple(
            (time_ms + talk_ms) / count
            for time_ms, talk_ms, count in zip(times_ms, beside_ms, replicas, strict=True)
        )

    loads, nothing = evaluation.stages, [0.0] * len(replicas)
    return ActionCosts(
        forward_ms=shared([load.forward_ms for load in loads], talk.forward_ms),
        backward_ms=shared([load.backward_ms for load in loads], talk.backward_ms),
        step_ms=tuple(
            tied_ms + float(setting.sum_gradients_ms(position, load.memory.gradients)) + summing_ms
            for position, tied_ms, summing_ms, load in zip(
                positions,
                exchanges_ms(problem, placement),
                _summing_ms(problem, placement, evaluation),
                loads,
                strict=True,
            )
        ),
        transfer_ms=talk.overlapped_ms,
        weight_ms=shared([load.weight_ms for load in loads], nothing),
    )


def _summing_ms(problem: Problem, placement: Placement, evaluation: Evaluation) -> list[float]:
    """Milliseconds per step in which the ranks that share a stage sum their gradients."""
    setting = problem.setting
    each_ms = [
        float(
            setting.exchange_ms(
                problem.link_among(ranks), np.asarray(load.memory.gradients), len(ranks)
            )
        )
        for ranks, load in zip(placement.ranks_of_stage, evaluation.stages, strict=True)
    ]
    return [setting.micro_batches * ms for ms in each_ms]


def _holders(problem: Problem, placement: Placement) -> tuple[tuple[int, ...], ...]:
    """The stages of every parameter that several stages hold."""
    shared = {
        tuple(sorted({placement.stage_of[group] for group in (value.owner, *value.readers)}))
        for value in problem.exchanges.values()
    }
    return tuple(sorted(stages_of for stages_of in shared if len(stages_of) > 1))


def communication_of(problem: Problem, placement: Placement) -> Communication:
    """The transfers of `stage_sums` by direction and by edge."""
    at, stages = placement.stage_of, placement.stages
    ranks = [of_stage[0] for of_stage in placement.ranks_of_stage]
    setting = problem.setting
    forward_ms, backward_ms = [0.0] * stages, [0.0] * stages
    on_edge_ms: dict[Edge, float] = defaultdict(float)
    edges: set[Edge] = set()
    grad_edges: set[Edge] = set()
    for index in problem.costs.leaving(placement.stage_of):
        value = problem.costs.values[index]
        if value.is_exchange:
            continue
        owner = at[value.owner]
        readers = sorted({at[reader] for reader in value.readers} - {owner}, reverse=True)
        share = forward_share(value, problem)
        pairs = {(min(owner, reader), max(owner, reader)) for reader in readers}
        edges |= pairs
        if share < 1:
            grad_edges |= pairs
        first_on = {ranks[reader]: reader for reader in readers}
        first_on.pop(ranks[owner], None)
        if not first_on:
            continue
        ends = [(owner, problem.seen[ranks[owner]].send_ms[index])]
        ends += [
            (reader, problem.seen[rank].receive_ms[index]) for rank, reader in first_on.items()
        ]
        for stage, transfer_ms in ends:
            if setting.talks_in_turn(ranks[stage]):
                forward_ms[stage] += share * float(transfer_ms)
                backward_ms[stage] += (1 - share) * float(transfer_ms)
        if setting.overlap:
            for edge in pairs:
                # The simulator assumes that gradients take as long as the forward tensors.
                on_edge_ms[edge] += float(ends[0][1]) / 2
    return Communication(
        tuple(forward_ms),
        tuple(backward_ms),
        dict(on_edge_ms),
        frozenset(edges),
        frozenset(grad_edges),
    )


def exchanges_ms(problem: Problem, placement: Placement) -> tuple[float, ...]:
    """Milliseconds of each stage's optimizer step for the gradients of parameters that other ranks
    hold.
    """
    at, rounds = placement.stage_of, problem.setting.micro_batches
    ranks = [of_stage[0] for of_stage in placement.ranks_of_stage]
    total = [0.0] * placement.stages
    for index, value in problem.exchanges.items():
        owner, readers = at[value.owner], {at[reader] for reader in value.readers}
        first_on = {ranks[reader]: reader for reader in sorted(readers, reverse=True)}
        first_on.pop(ranks[owner], None)
        if first_on:
            total[owner] += rounds * float(problem.costs.send_ms[index])
        for reader in first_on.values():
            total[reader] += rounds * float(problem.costs.receive_ms[index])
    return tuple(total)


def forward_share(value: Value, problem: Problem) -> float:
    """The forward part of a value's transfer time; 1 if no gradient comes back."""
    if value.owner > value.readers[0]:
        return 0.0
    if not value.backward_bytes:
        return 1.0
    link = problem.costs.link
    both_ms = link.transfer_ms(value.forward_bytes) + link.transfer_ms(value.backward_bytes)
    if value.known_ms is not None or not both_ms:
        return 0.5
    return link.transfer_ms(value.forward_bytes) / both_ms
