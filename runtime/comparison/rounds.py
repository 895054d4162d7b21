"""A schedule with a rank for every stage -> the same on one rank, in rounds.

In a round every stage does what it would do up to its next backward, and the step after it: the
forwards from the first stage to the last, then the backwards from the last to the first. Stages of
1f1b, with a flush or without, keep their own order and so their weight versions, and after a round
in which one stage steps all have stepped equally often.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from ..errors import ScheduleError
from ..schedule import Action, Schedule


def in_rounds(schedule: Schedule) -> Schedule:
    """The schedule on rank 0 alone. Raises ScheduleError unless stage j, on rank j, runs no more
    forwards ahead than the stage before it.

    >>> from asyncpipe.runtime.schedules import async_1f1b
    >>> print(in_rounds(async_1f1b(2, 2, step_every=1)))
    rank 0: 0F0@v0 0F1@v0 1F0@v0 1B0@v0 1S1 0B0@v0 0S1 1F1@v1 1B1@v1 1S2 0B1@v1 0S2
    """
    ahead = schedule.in_flight
    if len(schedule.ranks) != schedule.stages or sorted(ahead, reverse=True) != list(ahead):
        raise ScheduleError(
            f"the {schedule.name} schedule cannot be carried out in rounds on one rank.",
            "Choose async-1f1b or 1f1b, with one rank a stage.",
        )
    return replace(
        schedule, ranks=(tuple(_rounds(schedule)),), rank_of_stage=(0,) * schedule.stages
    )


def _rounds(schedule: Schedule) -> Iterator[Action]:
    rows = [deque(row) for row in schedule.compute.ranks]
    for _ in range(schedule.micro_batches):
        for row in rows:
            while row[0].kind == "F":
                yield row.popleft()
        for row in reversed(rows):
            yield row.popleft()
            if row and row[0].kind == "S":
                yield row.popleft()
