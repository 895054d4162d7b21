"""A schedule's name and numbers -> its actions."""

from __future__ import annotations

from functools import lru_cache

from ..runtime.schedule import Schedule
from ..runtime.scheduler.tasks import Tasks
from ..runtime.schedules import AUTO, computed, make_schedule
from ..runtime.simulate import Costs


@lru_cache
def scheduled(
    name: str, stages: int, micro_batches: int, rank_of_stage: tuple[int, ...] = ()
) -> Schedule:
    """A synchronous schedule over one step, with the rank of every stage where it has several; of
    `auto` one of those with a name that suits equal costs, until they are known."""
    if name == AUTO:
        at = rank_of_stage or tuple(range(stages))
        tasks = Tasks(Costs.equal(stages), at, micro_batches, may_split=False)
        return computed(tasks, effort=0).schedule
    ranks = len(set(rank_of_stage)) or stages
    return make_schedule(name, stages=stages, micro_batches=micro_batches, ranks=ranks)
