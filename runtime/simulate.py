"""A schedule + the costs of its actions -> a timeline: when every rank does what.

A rank carries out its list in order; an action begins when its rank is free and all that it
waits for (`Rule.dependencies`) is there. Transfers take none of a rank's time, but the tensors of
one edge and direction follow one another between two ranks. Ranks that share fewer processors than
they are get equal parts of them at every moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .dependencies import Edge, Rule
from .schedule import Action, Schedule
from .timeline import Event, Timeline
from .validation import validate

__all__ = ["Costs", "Event", "Timeline", "simulate"]

_Link = tuple[int, int, int, int]
"""Source and target stage, and their ranks."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of each stage's actions for one micro-batch, and of each edge's transfers.

    Gradients take as long on their way back as the tensors forwards. An edge that is not in
    `transfer_ms`, or within a rank, costs nothing. `weight_ms` is what of `backward_ms` is W's
    where a backward is split, by default half; `split_ms` what its B takes beside the rest of it,
    for being split, by default nothing.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    step_ms: tuple[float, ...]
    transfer_ms: Mapping[Edge, float] = field(default_factory=dict)
    weight_ms: tuple[float, ...] = ()
    split_ms: tuple[float, ...] = ()

    @classmethod
    def equal(
        cls,
        stages: int,
        *,
        forward_ms: float = 1.0,
        backward_ms: float = 2.0,
        step_ms: float = 0.0,
        transfer_ms: float = 0.0,
    ) -> Costs:
        """Stages that all cost the same, each connected with the next."""
        return cls(
            (forward_ms,) * stages,
            (backward_ms,) * stages,
            (step_ms,) * stages,
            {(stage, stage + 1): transfer_ms for stage in range(stages - 1)},
        )

    def of(self, action: Action, *, split: bool = False) -> float:
        """Milliseconds of an F, B, W or S that has a processor of its own; `split` says that the
        B has a W."""
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
    costs: Costs,
    edges: Iterable[Edge] | None = None,
    *,
    grad_edges: Iterable[Edge] | None = None,
    shared_stages: Iterable[Sequence[int]] = (),
    processors: int | None = None,
) -> Timeline:
    """The timeline of one segment; the messages of a lowered schedule are left out.

    `edges`, `grad_edges` and `shared_stages` are as for `Rule`; `processors` is the number that
    all ranks share, None for one each. Raises ScheduleError when the schedule never ends.

    >>> from asyncpipe.runtime.schedules import one_f_one_b
    >>> timeline = simulate(one_f_one_b(4, 8), Costs.equal(4))
    >>> timeline.makespan_ms, round(timeline.idle_share, 3)
    (33.0, 0.273)
    """
    shared_stages = [tuple(group) for group in shared_stages]
    rule = Rule(schedule.compute, edges, grad_edges=grad_edges, shared_stages=shared_stages)
    ranks = len(schedule.ranks)
    clock = _Clock(rule, costs, ranks if processors is None else processors)
    while clock.begin_actions():
        clock.advance()
    if not clock.is_over():
        validate(rule.schedule, rule.edges, grad_edges=rule.grad_edges, shared_stages=shared_stages)
    return Timeline(schedule.name, ranks, tuple(clock.events))


class _Clock:
    """Goes from event to event.

    Beside the time there is `work_ms`: the work that an action would have got done that had been
    under way since the start. All actions under way get on equally fast, so one ends when
    `work_ms` has grown by its cost, whatever the number of others was meanwhile.
    """

    def __init__(self, rule: Rule, costs: Costs, processors: int) -> None:
        self.events: list[Event] = []
        self._rule, self._costs, self._processors = rule, costs, processors
        self._split = rule.schedule.split
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
        """Begins what can begin now; False when there is nothing to wait for any more."""
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
        """To the next end of an action or arrival of a tensor."""
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
        return self._costs.of(action, split=(action.stage, action.index) in self._split)

    def _there_ms(self, action: Action, stage: int) -> float:
        """When the result of `action` is at `stage`."""
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
