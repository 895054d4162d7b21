"""A schedule with a rank for every stage -> the same on fewer ranks, each with several stages.

Every stage keeps exactly its own order of forwards, backwards and steps, and so its weight
versions. What a rank does next is found by playing the schedule with costs: of the actions that
its stages have come to and that wait for nothing, it takes the backward before the forward, of two
the one of the earlier micro-batch. An order that was played can be carried out, so the ranks never
wait in a circle.

It goes by the dependencies of a chain of stages, any two of which may share parameters: those of
other models are among them. An action is looked at when it is its stage's next and again for each
action that it waits for, so that the time is proportional to the number of actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from .dependencies import Rule
from .errors import ScheduleError
from .schedule import Action, Schedule, shared_delay
from .simulate import Costs

_FIRST = {"S": 0, "W": 1, "B": 2, "F": 3}


def fold(schedule: Schedule, rank_of_stage: Sequence[int], costs: Costs | None = None) -> Schedule:
    """The schedule, which has a stage on every rank, with its stages on the ranks given.

    `costs` are those that it is played with, by default equal ones. Raises ScheduleError where the
    ranks do not fit the stages.

    >>> from asyncpipe.runtime.schedules import async_1f1b
    >>> print(fold(async_1f1b(2, 2, step_every=1), [0, 0]))
    rank 0: 0F0@v0 1F0@v0 1B0@v0 1S1 0F1@v0 0B0@v0 0S1 1F1@v1 1B1@v1 1S2 0B1@v1 0S2
    """
    assert not schedule.is_lowered and len(schedule.ranks) == schedule.stages
    placed = sorted(set(rank_of_stage))
    if len(rank_of_stage) != schedule.stages or placed != list(range(len(placed))):
        raise ScheduleError(
            f"{schedule.stages} stages cannot be on ranks {list(rank_of_stage)}: each needs one, "
            "and ranks are counted from 0 without a gap."
        )
    rows: list[list[Action]] = [[] for _ in range(1 + max(rank_of_stage))]
    for action in _played(schedule, rank_of_stage, costs or Costs.equal(schedule.stages)):
        rows[rank_of_stage[action.stage]].append(action)
    return replace(schedule, ranks=tuple(map(tuple, rows)), rank_of_stage=tuple(rank_of_stage))


def _played(schedule: Schedule, rank_of_stage: Sequence[int], costs: Costs) -> Iterator[Action]:
    """The actions in the order in which they begin, when each rank does one at a time."""
    rule, every = Rule(schedule), schedule.step_every
    delays = [shared_delay(schedule, [stage]) for stage in range(schedule.stages)]
    rows = [iter(row) for row in schedule.ranks]
    done: set[Action] = set()
    waiting: dict[Action, list[Action]] = defaultdict(list)
    ready: dict[int, list[tuple[int, int, int, Action]]] = defaultdict(list)
    under_way: list[tuple[float, int, Action]] = []

    def needed(action: Action) -> list[Action]:
        if action.kind != "S":
            return rule.dependencies(action)
        # Of its own backwards it comes after; later stages are further with theirs.
        ends = [every * (action.index - late) for late in delays[: action.stage]]
        return [Action(earlier, "B", end - 1) for earlier, end in enumerate(ends) if end > 0]

    def look_at(action: Action) -> None:
        for other in needed(action):
            if other not in done:
                waiting[other].append(action)
                return
        first = _FIRST[action.kind], action.index, -action.stage
        heappush(ready[rank_of_stage[action.stage]], (*first, action))

    for row in rows:
        look_at(next(row))
    idle, now_ms = set(rank_of_stage), 0.0
    while True:
        for rank in sorted(rank for rank in idle if ready[rank]):
            action = heappop(ready[rank])[-1]
            yield action
            idle.remove(rank)
            heappush(under_way, (now_ms + costs.of(action), rank, action))
        if not under_way:
            return
        now_ms = under_way[0][0]
        while under_way and under_way[0][0] == now_ms:
            _, rank, action = heappop(under_way)
            idle.add(rank)
            done.add(action.unversioned)
            for freed in (next(rows[action.stage], None), *waiting.pop(action.unversioned, ())):
                if freed is not None:
                    look_at(freed)
