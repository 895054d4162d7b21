"""A problem and a placement -> the simulated time of one optimizer step.

A synchronous step runs the schedule's own actions with the costs of the stages, for every placement
that the schedule supports: one stage per rank, several per rank, or a stage on several ranks as
replicas. Otherwise replicas of a stage, and whole parallel pipelines, count as one rank of their
combined speed. `auto` is made for these costs as in a run, with backwards in one part. Its number
of micro-batches in flight is known only then, so its stages are evaluated again with that number;
its step is one of several consecutive steps, without a wait in between. For asynchronous schedules,
and for a schedule that puts stages on other ranks than the placement, a step is the slowest rank's
time for all its micro-batches.

`CriticalPath` turns a schedule into a function from its costs to its end. Every rank has its own
processor, so costs change only the times, not the order:

    end(a)        = cost(a) + max(end of the previous action on the rank, arrivals of its inputs)
    arrival(a, t) = transfer + max(end(a), arrival of the previous message over that edge)

which is the longest path through the actions. The result equals that of
`runtime/schedule/simulate.py` in a fiftieth of the time: the dependencies are computed once
(`DependencyRule`), not for all costs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...runtime.errors import ScheduleError
from ...runtime.schedule.builders import AUTO, VIRTUAL, computed
from ...runtime.schedule.dependencies import DependencyRule, Edge
from ...runtime.schedule.fit import Fit
from ...runtime.schedule.interleaved import REPLICATED, in_flight, replicated
from ...runtime.schedule.schedule import Action, Schedule
from ...runtime.schedule.simulate import ActionCosts, Timeline, simulate
from ...runtime.schedule.tasks import Tasks
from ..graph.costs import Costs, Floats, Ints
from ..graph.problem import Evaluation, Placement, Problem, evaluate
from ..graph.rank_model import scheduled
from .transfers import Communication, communication_of, exchanges_ms

LITTLE = 0.05  # effort for a schedule during the search for the best placement
NONE = 0.0  # for a start of the search: the best that is known, and one that is made
_LAPS = 2  # of a computed schedule, of which the second is timed
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
    flights: tuple[int, ...] = ()
    if has_replicas(problem, placement):
        shape = tuple(map(len, placement.ranks_of_stage))
        flights = in_flight(setting.schedule, setting.shared_micro_batches, shape)
    evaluation = evaluate(problem, placement, flights)
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
        self._is_bounded = max(setting.replicas, default=1) == 1
        self._paths: dict[object, CriticalPath | None] = {}

    def step(self, placement: Placement) -> Step:
        """The result of `step_of` for the placement under this schedule."""
        flights = self.schedule.in_flight if self._is_made and self.schedule else ()
        evaluation = evaluate(self.problem, placement, flights)
        talk = communication_of(self.problem, placement)
        costs = action_costs(self.problem, placement, evaluation, talk)
        schedule = self.schedule if self._is_made else None
        return Step(placement, evaluation, self._end_ms(placement, costs, talk), schedule)

    def shorter(self, placement: Placement, than_ms: float) -> Step | None:
        """The step of the placement if it fits and is below `than_ms`. The stages are evaluated
        only if that is so without recomputation to save memory, which only adds to costs.
        """
        if self._is_bounded:
            talk = communication_of(self.problem, placement)
            costs = self._plain_costs(placement, talk)
            if self._busy_ms(placement, costs) >= than_ms:
                return None
            if self._end_ms(placement, costs, talk) >= than_ms:
                return None
        step = self.step(placement)
        return step if step.evaluation.fits and step.step_ms < than_ms else None

    def _plain_costs(self, placement: Placement, talk: Communication) -> ActionCosts:
        """`action_costs` without the memory: no stage recomputes to save it."""
        problem, count = self.problem, placement.stages
        at, first = np.asarray(placement.stage_of), placement.ranks_of_stage
        by_seen = {id(seen): _sums_ms(seen, at, count) for seen in problem.seen}
        times = [by_seen[id(problem.seen[ranks[0]])][:, stage] for stage, ranks in enumerate(first)]
        forward_ms, backward_ms, weight_ms = np.stack(times, axis=1)
        if problem.setting.recompute == "all":
            setting = problem.setting.at(ranks[0] for ranks in first)
            flights = (
                self.schedule.in_flight if self.schedule else map(setting.in_flight, range(count))
            )
            saved = problem.costs.saved_index.sums(at, count)
            again = (np.array([*flights]) > 1) & (saved > 0)
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
    return np.stack([np.bincount(at, weights=weights, minlength=count) for weights in amounts])


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
    first = [ranks[0] for ranks in placement.ranks_of_stage]
    # Replicas of a stage count as one rank.
    at = tuple(sorted(set(first)).index(rank) for rank in first)
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
    on = placement.ranks_of_stage
    replicas = [1 if has_replicas(problem, placement) else len(ranks) for ranks in on]

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
            tied_ms + load.summing_ms
            for tied_ms, load in zip(exchanges_ms(problem, placement), loads, strict=True)
        ),
        transfer_ms=talk.overlapped_ms,
        weight_ms=shared([load.weight_ms for load in loads], nothing),
    )


def _holders(problem: Problem, placement: Placement) -> tuple[tuple[int, ...], ...]:
    """The stages of every parameter that several stages hold."""
    shared = {
        tuple(sorted({placement.stage_of[group] for group in (value.owner, *value.readers)}))
        for value in problem.exchanges.values()
    }
    return tuple(sorted(stages_of for stages_of in shared if len(stages_of) > 1))


# --- the critical path ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """One action: its rank, its cost (a kind and a stage), the positions of the times that it waits
    for, its own position, and those of its messages with their edges.
    """

    rank: int
    kind: str
    stage: int
    needs: tuple[int, ...]
    place: int
    messages: tuple[tuple[int, Edge], ...]


class CriticalPath:
    """The actions of all ranks in an order in which each follows all its dependencies."""

    def __init__(
        self,
        schedule: Schedule,
        edges: Iterable[Edge],
        grad_edges: Iterable[Edge],
        shared_stages: Iterable[Sequence[int]],
    ) -> None:
        self._rule = DependencyRule(
            schedule, edges, grad_edges=grad_edges, shared_stages=shared_stages
        )
        self._place: dict[tuple[Action, int | None], int] = {}
        self._ranks = len(schedule.ranks)
        split = schedule.split
        rows, position = [list(row) for row in schedule.ranks], [0] * self._ranks
        self._rows: list[_Row] = []
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while position[rank] < len(row):
                    action = row[position[rank]]
                    needs = self._needs(action)
                    if needs is None:
                        break
                    is_part = action.kind == "B" and (action.stage, action.index) in split
                    kind = "part of B" if is_part else action.kind
                    self._rows.append(self._row(rank, kind, action, needs))
                    position[rank] += 1
                    moved = True
        if position != [len(row) for row in rows]:
            raise ScheduleError(f"{schedule.name} never ends.")

    def period_ms(self, costs: ActionCosts) -> float:
        """The time per step of consecutive steps, where a rank continues when its own step is
        over.
        """
        return (self.end_ms(costs, 2 * _LAPS) - self.end_ms(costs, _LAPS)) / _LAPS

    def end_ms(self, costs: ActionCosts, steps: int = 1) -> float:
        """The end of the last action of that many steps."""
        stages = range(len(costs.forward_ms))
        cost_ms = {
            "F": costs.forward_ms,
            "B": costs.backward_ms,
            "part of B": [costs.of(Action(stage, "B", 0), split=True) for stage in stages],
            "W": [costs.of(Action(stage, "W", 0)) for stage in stages],
            "S": costs.step_ms,
        }
        at_ms = [0.0] * len(self._place)
        free_ms = [0.0] * self._ranks
        link_free_ms: dict[Edge, float] = {}
        transfers = costs.transfer_ms
        for row in self._rows * steps:
            start_ms = free_ms[row.rank]
            for place in row.needs:
                if at_ms[place] > start_ms:
                    start_ms = at_ms[place]
            end_ms = start_ms + cost_ms[row.kind][row.stage]
            at_ms[row.place] = free_ms[row.rank] = end_ms
            for place, edge in row.messages:
                transfer_ms = transfers.get((min(edge), max(edge)), 0.0) if transfers else 0.0
                begin_ms = max(end_ms, link_free_ms.get(edge, 0.0))
                link_free_ms[edge] = at_ms[place] = begin_ms + transfer_ms
        return max(free_ms)

    def _needs(self, action: Action) -> tuple[int, ...] | None:
        """The positions of an action's dependencies; None if some of them are missing so far."""
        places = []
        for other in self._rule.dependencies(action):
            place = self._place.get((other, action.stage), self._place.get((other, None)))
            if place is None:
                return None
            places.append(place)
        return tuple(places)

    def _row(self, rank: int, kind: str, action: Action, needs: tuple[int, ...]) -> _Row:
        done = action.unversioned
        place = self._place[done, None] = len(self._place)
        messages = []
        for message in self._rule.sends(action):
            assert message.peer is not None
            self._place[done, message.peer] = len(self._place)
            edge = (action.stage, message.peer)
            messages.append((self._place[done, message.peer], edge))
        return _Row(rank, kind, action.stage, needs, place, tuple(messages))
