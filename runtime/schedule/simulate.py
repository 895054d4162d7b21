"""A schedule + the costs of its actions -> a timeline: when each rank runs each action.

A rank runs its list in order; an action begins when its rank is free and its dependencies
(`DependencyRule.dependencies`) have arrived. Transfers take none of a rank's time, but the tensors
of one edge and direction follow one another between two ranks. Ranks that share fewer processors
than there are ranks get equal parts of them at every moment.

Actions may vary: then the time of each is drawn (`varied`), always the same for one micro-batch of
a stage, whatever the schedule is.

A `Timeline`, simulated or measured, has the duration, the idle shares and the micro-batches in
flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from .dependencies import DependencyRule, Edge
from .schedule import Action, Schedule, count_in_flight
from .validation import validate


@dataclass(frozen=True, slots=True)
class Event:
    """An action of a rank, with its start and end."""

    rank: int
    action: Action
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of all ranks; those of a rank follow one another.

    A rank is idle while it has no event, between the first start and the last end of all ranks.
    """

    name: str
    ranks: int
    events: tuple[Event, ...]

    @property
    def start_ms(self) -> float:
        return min((event.start_ms for event in self.events), default=0.0)

    @property
    def end_ms(self) -> float:
        return max((event.end_ms for event in self.events), default=0.0)

    @property
    def makespan_ms(self) -> float:
        return self.end_ms - self.start_ms

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """The idle part of the makespan of each rank, 0 to 1."""
        return tuple(
            _idle_share(self.of_rank(rank), self.start_ms, self.end_ms)
            for rank in range(self.ranks)
        )

    @property
    def idle_share(self) -> float:
        """The mean of `idle_shares`."""
        return sum(self.idle_shares) / self.ranks

    @property
    def steady_idle_share(self) -> float:
        """The mean idle share from optimizer step to optimizer step, without fill and drain.

        Counts the whole steps of each rank after every rank has made its first and before any rank
        has begun its last forward. If there are none (a synchronous schedule, or too short a
        segment) it is `idle_share`.
        """
        windows = self._steady_windows()
        if windows is None:
            return self.idle_share
        shares = (
            _idle_share(self.of_rank(rank), begin, end)
            for rank, (begin, end, _) in enumerate(windows)
        )
        return sum(shares) / self.ranks

    @property
    def idle_ms_a_step(self) -> tuple[float, ...]:
        """The idle time of each rank in one optimizer step: in the steady state if there is one,
        otherwise the whole timeline's, divided by its number of steps."""
        windows = self._steady_windows()
        if windows is None:
            steps = [max(1, len(self._step_ends(rank))) for rank in range(self.ranks)]
            windows = [(self.start_ms, self.end_ms, count) for count in steps]
        return tuple(
            _idle_share(self.of_rank(rank), begin, end) * (end - begin) / steps
            for rank, (begin, end, steps) in enumerate(windows)
        )

    def between(self, begin_ms: float, end_ms: float) -> Timeline:
        """The events between two moments; those that reach beyond are cut."""
        events = (
            replace(
                event,
                start_ms=max(event.start_ms, begin_ms),
                end_ms=min(event.end_ms, end_ms),
            )
            for event in self.events
            if event.start_ms < end_ms and event.end_ms > begin_ms
        )
        return replace(self, events=tuple(events))

    @property
    def steady_step(self) -> tuple[float, float]:
        """Start and end of one optimizer step in the steady state: between two step ends of the
        first rank. The whole timeline if there is none, as for a synchronous schedule."""
        steps = [self._step_ends(rank) for rank in range(self.ranks)]
        steady_from = max((ends[0] for ends in steps if ends), default=0.0)
        steady_to = min(self._last_forward(rank) for rank in range(self.ranks))
        inside = [end for end in steps[0] if steady_from <= end <= steady_to]
        return (inside[-2], inside[-1]) if len(inside) >= 2 else (self.start_ms, self.end_ms)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that each stage held between forward and backward."""
        stages = 1 + max((event.action.stage for event in self.events), default=-1)
        rows = ([event.action for event in self.of_rank(rank)] for rank in range(self.ranks))
        return count_in_flight(rows, stages)

    def of_rank(self, rank: int) -> list[Event]:
        return [event for event in self.events if event.rank == rank]

    def _step_ends(self, rank: int) -> list[float]:
        """The ends of the optimizer steps of the rank's first stage to step."""
        steps = [event for event in self.of_rank(rank) if event.action.kind == "S"]
        return [event.end_ms for event in steps if event.action.stage == steps[0].action.stage]

    def _steady_windows(self) -> list[tuple[float, float, int]] | None:
        """Start, end and number of steps of each rank's steady state."""
        steps = [self._step_ends(rank) for rank in range(self.ranks)]
        if not all(steps):
            return None
        steady_from = max(ends[0] for ends in steps)
        steady_to = min(self._last_forward(rank) for rank in range(self.ranks))
        inside = [[end for end in ends if steady_from <= end <= steady_to] for ends in steps]
        if any(len(ends) < 2 for ends in inside):
            return None
        return [(ends[0], ends[-1], len(ends) - 1) for ends in inside]

    def _last_forward(self, rank: int) -> float:
        return max(
            (event.start_ms for event in self.of_rank(rank) if event.action.kind == "F"),
            default=self.start_ms,
        )


def _idle_share(events: Iterable[Event], begin_ms: float, end_ms: float) -> float:
    if end_ms <= begin_ms:
        return 0.0
    busy_ms = sum(
        max(0.0, min(event.end_ms, end_ms) - max(event.start_ms, begin_ms)) for event in events
    )
    return max(0.0, 1 - busy_ms / (end_ms - begin_ms))


__all__ = ["ActionCosts", "Event", "Timeline", "simulate"]

_Link = tuple[int, int, int, int]
"""Source and target stage, and their ranks."""


@dataclass(frozen=True, slots=True)
class ActionCosts:
    """The costs of each stage's actions for one micro-batch, and of each edge's transfers, in
    milliseconds.

    forward_ms, backward_ms, step_ms: of F, of B with W, and of S, for each stage
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    step_ms: tuple[float, ...]
    transfer_ms: Mapping[Edge, float] = field(default_factory=dict)
    """Edge -> time of its tensors, and of their gradients on the way back; 0 for other edges and
    within a rank."""
    weight_ms: tuple[float, ...] = ()
    """The part of `backward_ms` that is W if a backward is split; by default half."""
    split_ms: tuple[float, ...] = ()
    """The extra time of a split B; by default none."""

    @classmethod
    def equal(
        cls,
        stages: int,
        *,
        forward_ms: float = 1.0,
        backward_ms: float = 2.0,
        step_ms: float = 0.0,
        transfer_ms: float = 0.0,
    ) -> ActionCosts:
        """Stages with equal costs, each connected to the next."""
        return cls(
            (forward_ms,) * stages,
            (backward_ms,) * stages,
            (step_ms,) * stages,
            {(stage, stage + 1): transfer_ms for stage in range(stages - 1)},
        )

    def of(self, action: Action, *, split: bool = False) -> float:
        """The milliseconds of an F, B, W or S that has a processor of its own; `split` for a B with
        a W."""
        stage = action.stage
        weight_ms = self.weight_ms[stage] if self.weight_ms else self.backward_ms[stage] / 2
        match action.kind:
            case "F":
                return self.forward_ms[stage]
            case "B" if split:
                extra_ms = self.split_ms[stage] if self.split_ms else 0.0
                return self.backward_ms[stage] - weight_ms + extra_ms
            case "B":
                return self.backward_ms[stage]
            case "W":
                return weight_ms
            case _:
                return self.step_ms[stage]


def simulate(
    schedule: Schedule,
    costs: ActionCosts,
    edges: Iterable[Edge] | None = None,
    *,
    grad_edges: Iterable[Edge] | None = None,
    shared_stages: Iterable[Sequence[int]] = (),
    processors: int | None = None,
    spread: float = 0.0,
) -> Timeline:
    """The timeline of one segment, without the messages of a lowered schedule.

    `edges`, `grad_edges` and `shared_stages` are as for `DependencyRule`; `processors` is the
    number that all ranks share, None for one each; `spread` is the standard deviation of an
    action's time, as a share of it. Raises ScheduleError if the schedule never ends.

    >>> from asyncpipe.runtime.schedule.builders import one_f_one_b
    >>> timeline = simulate(one_f_one_b(4, 8), ActionCosts.equal(4))
    >>> timeline.makespan_ms, round(timeline.idle_share, 3)
    (33.0, 0.273)
    """
    shared_stages = [tuple(group) for group in shared_stages]
    rule = DependencyRule(
        schedule.compute, edges, grad_edges=grad_edges, shared_stages=shared_stages
    )
    ranks = len(schedule.ranks)
    clock = _Clock(rule, costs, ranks if processors is None else processors, spread)
    while clock.begin_actions():
        clock.advance()
    if not clock.is_over():
        validate(rule.schedule, rule.edges, grad_edges=rule.grad_edges, shared_stages=shared_stages)
    return Timeline(schedule.name, ranks, tuple(clock.events))


MOST_SPREAD = 0.9
"""A larger one would make times negative."""


def varied(random: Random, spread: float) -> float:
    """A random factor of mean 1 and standard deviation `spread`, MOST_SPREAD at most.

    Delays have no upper bound and gains do, so it is `1 + spread * (e - 1)` with e from the
    exponential distribution of mean 1.
    """
    return 1 + min(spread, MOST_SPREAD) * (random.expovariate(1.0) - 1)


class _Clock:
    """Advances from event to event.

    Besides the time there is `work_ms`: the progress of an action that had been running since the
    start. All running actions progress equally fast, so one ends when `work_ms` has grown by its
    cost, however many others ran meanwhile.
    """

    def __init__(
        self, rule: DependencyRule, costs: ActionCosts, processors: int, spread: float
    ) -> None:
        self.events: list[Event] = []
        self._rule, self._costs, self._processors = rule, costs, processors
        self._split, self._spread = rule.schedule.split, spread
        self._draws: dict[tuple[int, str], Random] = {}  # of the actions of one kind at a stage
        self._rows = [list(row) for row in rule.schedule.ranks]
        self._position = [0] * len(self._rows)
        self._now_ms = self._work_ms = 0.0
        self._running: dict[int, tuple[float, float]] = {}  # rank: start, work_ms at its end
        self._wake_ms = math.inf
        self._end_ms: dict[Action, float] = {}
        self._arrival_ms: dict[tuple[Action, int], float] = {}  # at a stage of another rank
        self._link_free_ms: dict[_Link, float] = {}

    def is_over(self) -> bool:
        return self._position == [len(row) for row in self._rows]

    def begin_actions(self) -> bool:
        """Begins all actions that can begin now; False if there is nothing left to wait for."""
        self._wake_ms = math.inf
        for rank, row in enumerate(self._rows):
            if rank in self._running or self._position[rank] == len(row):
                continue
            action = row[self._position[rank]]
            ready_ms = self._ready_ms(action)
            if ready_ms <= self._now_ms:
                self._running[rank] = (self._now_ms, self._work_ms + self._cost(action))
            else:
                self._wake_ms = min(self._wake_ms, ready_ms)
        return bool(self._running) or self._wake_ms < math.inf

    def advance(self) -> None:
        """Advances to the next end of an action or arrival of a tensor."""
        next_work_ms = min((work_ms for _, work_ms in self._running.values()), default=math.inf)
        speed = min(1.0, self._processors / max(1, len(self._running)))
        next_end_ms = self._now_ms + (next_work_ms - self._work_ms) / speed
        if self._wake_ms < next_end_ms:
            self._work_ms += (self._wake_ms - self._now_ms) * speed
            self._now_ms = self._wake_ms
            return
        self._now_ms, self._work_ms = next_end_ms, next_work_ms
        for rank, (start_ms, work_ms) in list(self._running.items()):
            if work_ms <= next_work_ms:
                del self._running[rank]
                self._finish(rank, start_ms)

    def _ready_ms(self, action: Action) -> float:
        needed = self._rule.dependencies(action)
        return max((self._there_ms(other, action.stage) for other in needed), default=0.0)

    def _cost(self, action: Action) -> float:
        cost_ms = self._costs.of(action, split=(action.stage, action.index) in self._split)
        if not self._spread:
            return cost_ms
        key = action.stage, action.kind
        draws = self._draws.setdefault(key, Random(str(key)))
        return cost_ms * varied(draws, self._spread)

    def _there_ms(self, action: Action, stage: int) -> float:
        """When the result of `action` arrives at `stage`."""
        here_ms = self._end_ms.get(action, math.inf)
        return self._arrival_ms.get((action, stage), here_ms)

    def _finish(self, rank: int, start_ms: float) -> None:
        action = self._rows[rank][self._position[rank]]
        self._position[rank] += 1
        self.events.append(Event(rank, action, start_ms, self._now_ms))
        done = action.unversioned
        self._end_ms[done] = self._now_ms
        for message in self._rule.sends(action):
            assert message.peer is not None
            edge = (action.stage, message.peer)
            transfer_ms = self._costs.transfer_ms.get((min(edge), max(edge)), 0.0)
            link = (*edge, rank, self._rule.schedule.rank_of(message.peer, action.index))
            free_ms = max(self._now_ms, self._link_free_ms.get(link, 0.0)) + transfer_ms
            self._link_free_ms[link] = self._arrival_ms[done, message.peer] = free_ms
